"""Models of transformers outside of our families: traced sizes, and the plan that `fit` can run."""

import json
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    BertConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPTNeoXConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2MoeConfig,
    ResNetConfig,
    Starcoder2Config,
    T5Config,
    ViTConfig,
)

import meshwright
from meshwright.cli.main import run as command
from meshwright.errors import SpecError
from meshwright.modules.external_model import external_model
from meshwright.spec.parameters import num_matmul_parameters, num_parameters

SIZES = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "max_position_embeddings": 512,
}
GROUPED = {**SIZES, "num_key_value_heads": 4, "pad_token_id": 0}
CONFIGS = {
    "gemma2": Gemma2Config(**GROUPED, head_dim=32),
    "gemma3": Gemma3TextConfig(**GROUPED, head_dim=32),
    "phi3": Phi3Config(**GROUPED),
    "olmo2": Olmo2Config(**GROUPED),
    "starcoder2": Starcoder2Config(**GROUPED),
    "gpt_neox": GPTNeoXConfig(**SIZES),
}
# In their default sizes: BERT-base, T5-small and ViT-base.
OTHERS = {
    "encoder": (BertConfig(), AutoModelForMaskedLM),
    "encoder-decoder": (T5Config(), AutoModelForSeq2SeqLM),
    "vision": (ViTConfig(), AutoModelForImageClassification),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_parameters_and_flops_are_those_of_the_module(kind: str, tmp_path: Path) -> None:
    CONFIGS[kind].save_pretrained(tmp_path)
    found = external_model(tmp_path / "config.json")
    built = AutoModelForCausalLM.from_config(CONFIGS[kind])
    assert found.num_parameters == sum(one.numel() for one in built.parameters())
    assert num_parameters(found.model) == pytest.approx(found.num_parameters, rel=0.01)
    assert found.linear_flops_per_token == pytest.approx(2 * num_matmul_parameters(found.model), rel=0.02)
    # More than the input of a block in 16 bits, and less than a hundred of them.
    assert 8 < found.saved_bytes_per_token / (2 * SIZES["hidden_size"]) < 100
    assert found.tp_degrees[0] == 1


def test_plan_prices_it_and_prints_the_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    CONFIGS["olmo2"].save_pretrained(tmp_path)
    arguments = ["plan", str(tmp_path), "--on", "h100:8", "--seq", "512", "--batch-tokens", "65536"]
    assert command(arguments) == 0
    out = capsys.readouterr().out
    assert "Olmo2ForCausalLM" in out and "meshwright.fit(model, dataset, loss, dp_replicate=8" in out
    assert command([*arguments, "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    assert best["fits"]
    assert command([*arguments, "pp=2"]) == 2
    assert command([*arguments, "-o", str(tmp_path / "run.yaml")]) == 2
    assert "meshwright.fit" in capsys.readouterr().err


@pytest.mark.parametrize("kind", OTHERS)
def test_encoders_and_vision_transformers_are_traced(kind: str, tmp_path: Path) -> None:
    config, auto = OTHERS[kind]
    config.save_pretrained(tmp_path)
    found = external_model(tmp_path)
    with torch.device("meta"):
        built = auto.from_config(config)
    assert found.kind == kind
    assert found.num_parameters == sum(one.numel() for one in built.parameters())
    assert num_parameters(found.model) == pytest.approx(found.num_parameters, rel=0.02)
    assert found.linear_flops_per_token == pytest.approx(2 * num_matmul_parameters(found.model), rel=0.02)
    assert found.model.num_layers == 12
    assert 8 < found.saved_bytes_per_token / (2 * found.model.width) < 100
    assert found.fixed_length == (197 if kind == "vision" else None)
    assert found.tp_degrees == (1,)


def test_routed_experts_are_priced_as_such(tmp_path: Path) -> None:
    routed = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    config = Qwen2MoeConfig(**GROUPED, **routed, shared_expert_intermediate_size=256)
    config.save_pretrained(tmp_path)
    found = external_model(tmp_path)
    assert found.num_parameters == sum(
        one.numel() for one in AutoModelForCausalLM.from_config(config).parameters()
    )
    assert num_parameters(found.model) == pytest.approx(found.num_parameters, rel=0.01)


def test_python_plans_and_predicts_it(tmp_path: Path) -> None:
    """The plan's own layout, asked of `predict`, takes as long and needs as much memory."""
    CONFIGS["gemma2"].save_pretrained(tmp_path)
    found = meshwright.plan(tmp_path, on="h100:8", seq=512, batch_tokens=65536)
    assert found.external is not None and found.external.name == "Gemma2ForCausalLM"
    assert found.call is not None and found.call.startswith("meshwright.fit(model, dataset, loss, ")
    assert found.gains == []
    with pytest.raises(SpecError, match="no run file"):
        found.save(tmp_path / "run.yaml")
    run = found.run
    overrides = [
        f"parallel.{name}={getattr(run.parallel, name)}" for name in ("dp_replicate", "dp_shard", "zero")
    ]
    overrides += [f"data.{name}={getattr(run.data, name)}" for name in ("sequence_length", "batch_sequences")]
    overrides += [f"data.microbatch_sequences={run.data.microbatch_sequences}"]
    overrides += [f"memory.recompute={run.memory.recompute}"]
    predicted = meshwright.predict(tmp_path, on="h100:8", overrides=overrides)
    assert predicted.step_seconds == pytest.approx(found.step_seconds)
    assert predicted.device_bytes == pytest.approx(found.best.device_bytes)
    assert "Step time by item" in predicted._repr_html_()


def test_predict_prints_the_call_and_refuses_what_fit_cannot_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    OTHERS["vision"][0].save_pretrained(tmp_path)
    layout = ["parallel.dp_replicate=8", "data.batch_sequences=4096", "data.microbatch_sequences=512"]
    arguments = ["predict", str(tmp_path), "--on", "h100:8", *layout]
    assert command(arguments) == 0
    out = capsys.readouterr().out
    assert "a sequence is one image of 197 tokens" in out
    assert "dp_replicate=8, batch_samples=4096, microbatch_samples=512" in out
    assert command([*arguments, "parallel.pp=2"]) == 2
    assert "pp=1" in capsys.readouterr().err
    assert command([*arguments, "data.sequence_length=64"]) == 2
    assert "197 tokens" in capsys.readouterr().err
    assert command(["plan", str(tmp_path), "--on", "h100:8", "--seq", "64"]) == 2


def test_what_has_no_equal_blocks_is_refused_with_the_open_door(tmp_path: Path) -> None:
    ResNetConfig().save_pretrained(tmp_path)
    with pytest.raises(SpecError) as caught:
        external_model(tmp_path)
    assert "meshwright.fit" in caught.value.hint
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_model"}))
    with pytest.raises(SpecError, match="transformers cannot read it") as caught:
        external_model(tmp_path)
    assert "meshwright.fit" in caught.value.hint
