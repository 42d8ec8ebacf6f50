"""Against the real peft: training, its folders in both directions, and merged weights."""

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.equivalence import worst_errors
from tests.support.merged_decoder import initial_adapters
from tests.support.oracle import IGNORED, Sequences, reference, reference_rate
from tests.support.runs import tiny_run
from tests.support.shrunk_families import TINY_FAMILIES, shrunk_family
from torch import Tensor, nn

from meshwright.adapters.merge import MergedTensors
from meshwright.adapters.peft_names import peft_matrices
from meshwright.adapters.peft_read import PeftReader
from meshwright.adapters.peft_write import write_peft
from meshwright.errors import CheckpointError
from meshwright.models.decoder import Decoder, build_decoder
from meshwright.models.hf_weights import save_folder
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
    "dense": LORA.with_(targets=("blocks.0.mlp.*", "blocks.*.mlp.shared.up", "query")),
    "ranks": LORA.with_(ranks=[{"pattern": "down_proj", "rank": 5, "alpha": 2}]),
    "ends": LORA.with_(targets=("q_proj", "embed_tokens", "lm_head")),
    "tokens": LORA.with_(targets=("q_proj",), tokens=(9, 3, 12)),
    "modules": LORA.with_(targets=("q_proj",)),
}
TRAINED = {"modules": ("embedding.tokens.weight", "head.weight", "*norm.weight")}
FAMILIES = {
    "llama-3.1-8b": ["lora", "rslora", "dora", "some", "ranks", "ends", "tokens", "modules"],
    "llama-3.2-1b": ["ends", "tokens", "modules"],
    "qwen2.5-7b": ["lora"],
    "qwen3-30b-a3b": ["lora", "rslora"],
    "mixtral-8x7b": ["lora"],
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
    if case[1] != "ranks":  # ranks are padded to the largest one in the folder
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


KINDS = ["lora", "rslora", "dora"]


@pytest.mark.parametrize("kind", KINDS)
def test_three_steps_equal_peft(tmp_path: Path, kind: str) -> None:
    """Losses, gradients and weights; `test_adapters.py` proves that every mesh equals the same reference."""
    run = tiny_run("gqa").with_(adapter=LORA.with_(kind=kind))
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
    config = peft.LoraConfig(r=3, lora_alpha=8, target_modules="all-linear", **kinds)
    model = peft.get_peft_model(base, config, autocast_adapter_dtype=False)
    named = _by_our_names(model, run)
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
