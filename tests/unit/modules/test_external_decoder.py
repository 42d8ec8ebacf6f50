"""Decoders of transformers outside of our families: traced sizes, and the plan that `fit` can run."""

import json
from pathlib import Path

import pytest
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPTNeoXConfig,
    Olmo2Config,
    Phi3Config,
    Starcoder2Config,
)

from meshwright.cli.main import run as command
from meshwright.errors import SpecError
from meshwright.modules.external_decoder import external_decoder
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
    "phi3": Phi3Config(**GROUPED),
    "olmo2": Olmo2Config(**GROUPED),
    "starcoder2": Starcoder2Config(**GROUPED),
    "gpt_neox": GPTNeoXConfig(**SIZES),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_parameters_and_flops_are_those_of_the_module(kind: str, tmp_path: Path) -> None:
    CONFIGS[kind].save_pretrained(tmp_path)
    found = external_decoder(tmp_path / "config.json")
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


def test_what_is_no_decoder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    with pytest.raises(SpecError, match="no causal decoder") as caught:
        external_decoder(tmp_path)
    assert "meshwright.fit" in caught.value.hint
