"""Against the real peft: training, its folders in both directions, and merged weights."""

import json
import shutil
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.dropped_decoder import keys_of_tokens, mask_of, mix
from tests.support.equivalence import worst_errors
from tests.support.merged_decoder import initial_adapters
from tests.support.oracle import IGNORED, Sequences, reference, reference_rate
from tests.support.runs import tiny_run
from tests.support.shrunk_families import TINY_FAMILIES, shrunk_family
from torch import Tensor, nn

from meshwright.adapters.merge import MergedTensors
from meshwright.adapters.peft_config import CONFIG_FILE, read_peft_config
from meshwright.adapters.peft_folder import WEIGHTS_FILE
from meshwright.adapters.peft_names import peft_matrices
from meshwright.adapters.peft_read import PeftReader
from meshwright.adapters.peft_write import write_peft
from meshwright.errors import CheckpointError
from meshwright.models.decoder import Decoder, build_decoder
from meshwright.models.hf_weights import HuggingFaceReader, save_folder
from meshwright.models.initialise import initialise
from meshwright.spec import AdapterSpec, ModelSpec, RunSpec
from meshwright.spec.adapter import adapter_parameters

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")  # those of peft and transformers are not ours
LORA = AdapterSpec(rank=3, alpha=8)
TOLERANCE = 1e-5


def hf_folder(model: ModelSpec, folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Write random weights of a model as a Hugging Face folder; returns them under our names."""
    decoder = build_decoder(model, dtype=dtype)
    initialise(decoder, 3)
    state = {name: tensor.detach() for name, tensor in decoder.state_dict().items()}
    save_folder(state, model, folder, dtype=dtype)
    return state


def random_adapters(model: ModelSpec, adapter: AdapterSpec) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        one.name: torch.randn(one.shape, generator=generator) * 0.2 + (one.kind == "magnitude")
        for one in adapter_parameters(model, adapter)
    }


def logits_of(model: ModelSpec, state: Any, tokens: Tensor) -> Tensor:
    decoder = build_decoder(model)
    decoder.to_empty(device="cpu")
    with torch.no_grad():
        for buffer in decoder.buffers():
            buffer.zero_()
        for name, tensor in decoder.state_dict().items():
            tensor.copy_(state[name])
        return decoder.eval()(tokens, positions_BS=torch.arange(tokens.shape[1])[None])


ADAPTERS = {
    "lora": LORA,
    "rslora": LORA.with_(kind="rslora"),
    "dora": LORA.with_(kind="dora"),
    "some": LORA.with_(targets=("q_proj", "blocks.1.mlp.*")),
    # peft takes these names for those of routed experts, unless they are named as parameters.
    "dense": LORA.with_(targets=("blocks.0.mlp.*", "blocks.*.mlp.shared.up", "query"), dropout=0.1),
    # peft refuses dropout on parameters, as which it opens routed experts, and targets named as parameters.
    "dropout": LORA.with_(dropout=0.1),
    "ranks": LORA.with_(ranks=[{"pattern": "down_proj", "rank": 5, "alpha": 2}]),
    "scaled": LORA.with_(
        kind="rslora", targets=("q_proj", "embed_tokens"), ranks=[{"pattern": "embed_tokens", "rank": 2}]
    ),
    "ends": LORA.with_(targets=("q_proj", "embed_tokens", "lm_head")),
    "tokens": LORA.with_(targets=("q_proj",), tokens=(9, 3, 12)),
    "modules": LORA.with_(targets=("q_proj",)),
}
TRAINED = {"modules": ("embedding.tokens.weight", "head.weight", "*norm.weight")}
FAMILIES = {
    "llama-3.1-8b": ["lora", "rslora", "dora", "some", "ranks", "scaled", "ends", "tokens", "modules"],
    "llama-3.2-1b": ["ends", "tokens", "modules"],
    "qwen2.5-7b": ["lora"],
    "qwen3-30b-a3b": ["lora", "rslora", "ranks"],
    "mixtral-8x7b": ["lora", "dropout"],
    "deepseek-v2-lite": ["lora", "dense"],
}


@pytest.mark.parametrize("case", [(family, kind) for family, kinds in FAMILIES.items() for kind in kinds])
def test_peft_opens_our_folder_and_we_open_it_again(tmp_path: Path, case: tuple[str, str]) -> None:
    model, adapter = shrunk_family(case[0]), ADAPTERS[case[1]]
    state, adapters = hf_folder(model, tmp_path / "base"), random_adapters(model, adapter)
    trained = [name for name in state if any(fnmatchcase(name, one) for one in TRAINED.get(case[1], ()))]
    adapters |= {name: state[name] + 0.2 * torch.randn(state[name].shape) for name in trained}
    merged = MergedTensors(state, adapters, model, adapter)
    write_peft(tmp_path / "adapter", model, adapter, adapters, base=str(tmp_path / "base"), merged=merged)
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    tokens = torch.arange(16)[None] % model.vocab_size
    with torch.no_grad():
        expected = theirs(tokens).logits
    ours = logits_of(merged.model, merged, tokens)
    assert (ours - expected).abs().max() < TOLERANCE * expected.abs().max()
    assert (ours - logits_of(model, state, tokens)).abs().max() > 1e-3
    reader = PeftReader(
        tmp_path / "adapter",
        model,
        adapter,
        trained=trained,
        read_base_rows=lambda name, ids: state[name][ids],
    )
    assert set(reader.names()) >= set(adapters)
    for name, tensor in adapters.items():
        index = tuple(slice(0, size) for size in tensor.shape)
        torch.testing.assert_close(reader.read_slice(name, index).float(), tensor)


@pytest.mark.parametrize("family", [one for one in TINY_FAMILIES if not one.startswith(("gpt2", "megatron"))])
def test_peft_loads_every_tensor(tmp_path: Path, family: str) -> None:
    """peft only warns, or says nothing, where a tensor finds no module, or a module no tensor."""
    model = shrunk_family(family)
    hf_folder(model, tmp_path / "base")
    adapters = random_adapters(model, LORA)
    write_peft(tmp_path / "adapter", model, LORA, adapters, base=None)
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    loaded = {name: p for name, p in theirs.named_parameters() if "lora_" in name}
    assert all(p.any(dim=-1).all() for name, p in loaded.items() if "lora_A" in name)
    # Fused experts have block-diagonal factors, so elements are counted, not shapes.
    expected = sum(int(one.count_nonzero()) for one in adapters.values())
    assert sum(int(p.count_nonzero()) for p in loaded.values()) == expected


def test_we_open_what_peft_saved(tmp_path: Path) -> None:
    """Targets by name, another alpha by pattern, rslora: the scale of B follows."""
    model = shrunk_family("llama-3.1-8b")
    state = hf_folder(model, tmp_path / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    config = peft.LoraConfig(
        r=3, lora_alpha=6, target_modules=["q_proj", "up_proj"], use_rslora=True, alpha_pattern={"up_proj": 9}
    )
    theirs = peft.get_peft_model(base, config)
    for name, parameter in theirs.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.2)
    theirs.save_pretrained(tmp_path / "adapter")
    tokens = torch.arange(16)[None] % model.vocab_size
    with torch.no_grad():
        expected = theirs.eval()(tokens).logits
    adapter = LORA.with_(targets=("q_proj", "up_proj"))
    reader = PeftReader(tmp_path / "adapter", model, adapter)
    adapters = {
        one.name: reader.read_slice(one.name, tuple(slice(0, size) for size in one.shape))
        for pair in peft_matrices(model, adapter, where="")
        for one in pair.matrix.parameters
    }
    ours = logits_of(model, MergedTensors(state, adapters, model, adapter), tokens)
    assert (ours - expected).abs().max() < TOLERANCE * expected.abs().max()


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"targets": ("q_proj",)}, "the adapter has also base_model.model.model.layers.0.mlp.down_proj"),
        ({"rank": 4}, "lora_A.weight has shape 3 x 32, and 4 x 32 in this run"),
        ({"kind": "dora"}, "the adapter is of kind lora"),
    ],
)
def test_a_folder_of_other_adapters_is_refused(tmp_path: Path, changes: Any, fact: str) -> None:
    model = shrunk_family("llama-3.1-8b")
    write_peft(tmp_path / "adapter", model, LORA, random_adapters(model, LORA), base=None)
    with pytest.raises(CheckpointError) as caught:
        PeftReader(tmp_path / "adapter", model, LORA.with_(**changes))
    assert fact in caught.value.fact
    assert caught.value.hint


def edited_folder(model: ModelSpec, folder: Path, changes: dict[str, Any]) -> Path:
    """Our folder with other values in its adapter_config.json."""
    write_peft(folder, model, LORA, random_adapters(model, LORA), base=None)
    config = json.loads((folder / CONFIG_FILE).read_text()) | changes
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"bias": "lora_only"}, "bias is 'lora_only'"),
        ({"lora_bias": True}, "lora_bias is set"),
        ({"alora_invocation_tokens": [3]}, "alora_invocation_tokens is set"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication is set"),
        ({"use_qalora": True}, "use_qalora is set"),
        ({"kasa_config": {}, "arrow_config": {"top_k": 1}}, "arrow_config is set"),
        (
            {"init_lora_weights": "pissa_niter_4"},
            "init_lora_weights is 'pissa_niter_4': peft changed the base",
        ),
        ({"init_lora_weights": "olora"}, "init_lora_weights is 'olora': peft changed the base"),
    ],
)
def test_another_kind_of_adapter_is_refused(tmp_path: Path, changes: dict[str, Any], fact: str) -> None:
    """The tensors have the same names and shapes, and would compute something else here."""
    model = shrunk_family("llama-3.1-8b")
    with pytest.raises(CheckpointError) as caught:
        PeftReader(edited_folder(model, tmp_path / "adapter", changes), model, LORA)
    assert caught.value.fact.startswith(fact)
    assert "peft" in caught.value.hint


@pytest.mark.parametrize("start", [True, False, "gaussian", "eva", "orthogonal"])
def test_another_start_of_the_factors_is_no_matter(tmp_path: Path, start: object) -> None:
    model = shrunk_family("llama-3.1-8b")
    PeftReader(edited_folder(model, tmp_path / "adapter", {"init_lora_weights": start}), model, LORA)


@pytest.mark.parametrize(
    "changes",
    [
        {"r": "3"},
        {"r": 64},
        {"rank_pattern": {"q_proj": 4}},
        {"lora_alpha": True},
        {"lora_alpha": float("nan")},
        {"lora_alpha": 10**400},
        {"alpha_pattern": [3]},
        {"alpha_pattern": {"(": 3}},
        {"alpha_pattern": {"q_proj": "3"}},
        {"modules_to_save": 5},
        {"modules_to_save": "lm_head"},
        {"trainable_token_indices": 5},
        {"trainable_token_indices": {"embed_tokens": "5"}},
    ],
)
def test_a_damaged_config_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = shrunk_family("llama-3.1-8b")
    name = next(iter(changes)).replace("rank_pattern", "r")
    with pytest.raises(CheckpointError, match=f"damaged: {name} "):
        PeftReader(edited_folder(model, tmp_path / "adapter", changes), model, LORA)


def test_a_config_that_cannot_be_read_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("meshwright.adapters.peft_config.read_json_file", denied)
    with pytest.raises(CheckpointError, match="the file cannot be read: Permission denied"):
        read_peft_config(tmp_path)


def rewritten(folder: Path, change: Callable[[str, Tensor], dict[str, Tensor]]) -> Path:
    """A folder whose tensors are changed one by one."""
    file = folder / WEIGHTS_FILE
    parts = [change(key, value) for key, value in load_file(file).items()]
    save_file({key: value for part in parts for key, value in part.items()}, file)
    return folder


def test_a_file_may_name_its_adapter_in_the_keys(tmp_path: Path) -> None:
    model, adapters = shrunk_family("llama-3.1-8b"), random_adapters(shrunk_family("llama-3.1-8b"), LORA)
    write_peft(tmp_path / "one", model, LORA, adapters, base=None)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    rewritten(tmp_path / "one", lambda key, value: {key.replace(".weight", ".mine.weight"): value})
    name, tensor = next(iter(adapters.items()))
    index = tuple(slice(0, size) for size in tensor.shape)
    torch.testing.assert_close(PeftReader(tmp_path / "one", model, LORA).read_slice(name, index), tensor)
    both = rewritten(
        tmp_path / "two",
        lambda key, value: {key: value, key.replace(".weight", ".mine.weight"): value.clone()},
    )
    with pytest.raises(CheckpointError, match="several adapters"):
        PeftReader(both, model, LORA)


def test_factors_of_integers_are_refused(tmp_path: Path) -> None:
    model = shrunk_family("llama-3.1-8b")
    folder = edited_folder(model, tmp_path / "adapter", {})
    rewritten(folder, lambda key, value: {key: value.int()})
    with pytest.raises(CheckpointError, match="has dtype I32"):
        PeftReader(folder, model, LORA)


def peft_model(model: ModelSpec, folder: Path, **settings: Any) -> Any:
    """A model of peft beside random weights, whose trained parameters are random."""
    hf_folder(model, folder / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    theirs = peft.get_peft_model(base, peft.LoraConfig(r=3, lora_alpha=8, **settings))
    with torch.no_grad():
        for parameter in (one for one in theirs.parameters() if one.requires_grad):
            parameter.add_(0.2 * torch.randn_like(parameter))
    theirs.save_pretrained(folder / "adapter")
    return theirs.eval()


def merged_logits(
    model: ModelSpec, adapter: AdapterSpec, folder: Path, tokens: Tensor, *, trained: tuple[str, ...] = ()
) -> Tensor:
    """The logits of a base with the adapters of a folder; other parameters are as at the start."""
    state = HuggingFaceReader(folder / "base")
    base = {name: state.read(name) for name in state.names()}
    reader = PeftReader(
        folder / "adapter", model, adapter, trained=trained, read_base_rows=lambda name, ids: base[name][ids]
    )
    adapters = {one.name: torch.zeros(one.shape) for one in adapter_parameters(model, adapter)}
    for name in reader.names():
        shape = adapters[name].shape if name in adapters else base[name].shape
        adapters[name] = reader.read_slice(name, tuple(slice(0, size) for size in shape))
    merged = MergedTensors(base, adapters, model, adapter)
    return logits_of(merged.model, merged, tokens)


@pytest.mark.parametrize(
    "ids",
    [
        {"embed_tokens": [12, 9, 3], "lm_head": [3, 12, 9]},
        [12, 3, 9],  # peft trains the rows of the embedding alone
        {"lm_head": [9, 3, 12]},
    ],
)
def test_rows_of_tokens_in_any_order_and_of_one_table(tmp_path: Path, ids: Any) -> None:
    model = shrunk_family("llama-3.1-8b")
    theirs = peft_model(model, tmp_path, target_modules=["q_proj"], trainable_token_indices=ids)
    tokens = torch.arange(16)[None] % model.vocab_size
    with torch.no_grad():
        expected = theirs(tokens).logits
    adapter = LORA.with_(targets=("q_proj",), tokens=(3, 9, 12))
    ours = merged_logits(model, adapter, tmp_path, tokens)
    assert (ours - expected).abs().max() < TOLERANCE * expected.abs().max()


def test_rows_of_new_tokens_that_peft_trained(tmp_path: Path) -> None:
    """peft also saves a table that was resized, with the frozen rows."""
    model = shrunk_family("llama-3.1-8b")
    hf_folder(model, tmp_path / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    base.resize_token_embeddings(model.vocab_size + 2)
    ids = [model.vocab_size, model.vocab_size + 1]
    rows = {"embed_tokens": ids, "lm_head": ids}
    config = peft.LoraConfig(r=3, lora_alpha=8, target_modules=["q_proj"], trainable_token_indices=rows)
    peft.get_peft_model(base, config).save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    larger = model.with_(vocab_size=model.vocab_size + 2)
    adapter = LORA.with_(targets=("q_proj",), tokens=tuple(ids))
    reader = PeftReader(
        tmp_path / "adapter", larger, adapter, read_base_rows=lambda _, rows: torch.zeros(len(rows), 32)
    )
    name = "head.token_rows.change"
    found = reader.read_slice(name, (slice(0, 2), slice(0, 32)))
    torch.testing.assert_close(found, base.get_output_embeddings().weight[ids].detach())


@pytest.mark.parametrize("modules", [["embed_tokens"], ["embed_tokens", "lm_head"]])
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_tied_table_that_peft_trained(tmp_path: Path, modules: list[str], is_tied: bool) -> None:
    """Without ensure_weight_tying peft trains a table of its own, and leaves the other one as it was."""
    model = shrunk_family("llama-3.2-1b")
    settings = {"target_modules": ["q_proj"], "modules_to_save": modules, "ensure_weight_tying": is_tied}
    theirs = peft_model(model, tmp_path, **settings)
    tokens = torch.arange(16)[None] % model.vocab_size
    adapter, trained = LORA.with_(targets=("q_proj",)), ("embedding.tokens.weight",)
    if not is_tied:
        with pytest.raises(CheckpointError, match="trained apart"):
            merged_logits(model, adapter, tmp_path, tokens, trained=trained)
        return
    with torch.no_grad():
        expected = theirs(tokens).logits
    ours = merged_logits(model, adapter, tmp_path, tokens, trained=trained)
    assert (ours - expected).abs().max() < TOLERANCE * expected.abs().max()


KINDS = ["lora", "rslora", "dora"]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("kind", KINDS)
def test_three_steps_equal_peft(tmp_path: Path, kind: str, dropout: float) -> None:
    """Losses, gradients and weights; `test_adapters.py` and `test_adapter_dropout.py` prove that every mesh
    equals the same reference. peft's own dropout modules are replaced by ones with our masks."""
    run = tiny_run("gqa").with_(adapter=LORA.with_(kind=kind, dropout=dropout))
    run = run.with_(data=run.data.with_(documents="joined"))
    losses, gradients, weights = train_with_peft(run, tmp_path)
    expected = reference(run)
    # transformers computes norms and rope in float32, whatever the dtype of the model.
    assert losses == pytest.approx(expected.losses, rel=1e-7)
    for step, found in enumerate(gradients):
        assert max(worst_errors(found, expected.gradients[step]).values()) < TOLERANCE
    trained = {name: tensor for name, tensor in expected.weights.items() if ".adapter." in name}
    assert max(worst_errors(weights, trained).values()) < TOLERANCE


def train_with_peft(run: RunSpec, folder: Path) -> tuple[list[float], list[Any], dict[str, Tensor]]:
    """Three steps of torch's SGD on the adapters of a peft model, in float64."""
    assert run.adapter is not None
    hf_folder(run.model, folder / "base", torch.float64)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float64)
    kinds = {"use_rslora": run.adapter.kind == "rslora", "use_dora": run.adapter.kind == "dora"}
    config = peft.LoraConfig(
        r=3, lora_alpha=8, target_modules="all-linear", lora_dropout=run.adapter.dropout, **kinds
    )
    model = peft.get_peft_model(base, config, autocast_adapter_dtype=False).train()
    named = _by_our_names(model, run)
    dropouts = _with_our_masks(model, run) if run.adapter.dropout else []
    initial = initial_adapters(run)
    with torch.no_grad():
        for name, parameter in named.items():
            if not name.endswith("magnitude"):
                parameter.copy_(initial[name])
    sequences, optim = Sequences(run), run.optim
    groups = [{"params": [p], "weight_decay": optim.weight_decay * (p.ndim > 1)} for p in named.values()]
    optimizer = torch.optim.SGD(groups, lr=optim.lr, momentum=optim.beta1)
    losses, gradients = [], []
    for step in range(3):
        rows = sequences.rows(sequences.batch_ids(run, step))
        for dropout in dropouts:
            dropout.step = step
        logits = model(rows["tokens"]).logits
        targets = rows["targets"].flatten()
        total = nn.functional.cross_entropy(
            logits.flatten(0, 1).double(), targets, ignore_index=IGNORED, reduction="sum"
        )
        loss = total / int((targets != IGNORED).sum())
        loss.backward()
        nn.utils.clip_grad_norm_(named.values(), optim.max_grad_norm or torch.inf)
        for group in optimizer.param_groups:
            group["lr"] = reference_rate(run, step)
        gradients.append({name: parameter.grad.clone() for name, parameter in named.items()})
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, gradients, {name: p.detach().clone() for name, p in named.items()}


class OurMask(nn.Module):
    """Replaces an `nn.Dropout` of peft."""

    def __init__(self, run: RunSpec, name: str, layer: int) -> None:
        super().__init__()
        self.run, self.name, self.layer, self.step = run, name, layer, 0

    def forward(self, x: Tensor) -> Tensor:
        assert self.run.adapter is not None
        keys = mix(keys_of_tokens(self.run.seed, self.step, *x.shape[:2]), self.layer)
        return x * mask_of(keys, self.name, x.shape[-1], self.run.adapter.dropout)


def _with_our_masks(model: nn.Module, run: RunSpec) -> list[OurMask]:
    assert run.adapter is not None
    modules, replaced = dict(model.named_modules()), []
    for one in peft_matrices(run.model, run.adapter, where=""):
        weight = one.matrix.weight
        assert weight.layer is not None
        dropouts = modules[one.keys("lora_A")[0].removesuffix(".lora_A.weight")].lora_dropout
        assert isinstance(dropouts, nn.ModuleDict) and isinstance(dropouts["default"], nn.Dropout)
        dropouts["default"] = OurMask(run, weight.name.removeprefix(f"blocks.{weight.layer}."), weight.layer)
        replaced.append(dropouts["default"])
    return replaced


def _by_our_names(model: nn.Module, run: RunSpec) -> dict[str, nn.Parameter]:
    assert run.adapter is not None
    theirs = {
        name.replace(".default", "").replace("lora_magnitude_vector.weight", "lora_magnitude_vector"): p
        for name, p in model.named_parameters()
    }
    return {
        f"{one.matrix.name}.{parameter.kind}": theirs[one.keys(parameter.kind)[0]]
        for one in peft_matrices(run.model, run.adapter, where="")
        for parameter in one.matrix.parameters
    }


def test_the_share_of_changed_weights() -> None:
    """A change far below the spacing of bf16 is lost; one far above it is not."""
    model = shrunk_family("llama-3.1-8b")
    decoder: Decoder = build_decoder(model)
    initialise(decoder, 1)
    state = {name: tensor.detach().bfloat16() for name, tensor in decoder.state_dict().items()}
    adapters = random_adapters(model, LORA)
    large = MergedTensors(state, adapters, model, LORA)
    small = MergedTensors(state, {name: 1e-4 * one for name, one in adapters.items()}, model, LORA)
    assert large.changed_share(torch.bfloat16) > 0.99
    assert small.changed_share(torch.bfloat16) < 0.2
    assert small.changed_share(torch.float32) > 0.5


def test_ranks_that_add_something_are_not_dropped(tmp_path: Path) -> None:
    """A folder whose ranks a writer padded has zeros there; another one is of a higher rank."""
    model, adapter = shrunk_family("llama-3.1-8b"), ADAPTERS["ranks"]
    write_peft(tmp_path / "adapter", model, adapter, random_adapters(model, adapter), base=None)
    rewritten(tmp_path / "adapter", lambda key, value: {key: value + 1e-6 if "lora_B" in key else value})
    with pytest.raises(CheckpointError, match=r"has shape 5 x .*, and .* in this run"):
        PeftReader(tmp_path / "adapter", model, adapter)
