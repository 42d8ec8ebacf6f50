"""Runs with adapters: checkpoints have adapters alone, resume on other meshes, and refuse another base."""

import json
from pathlib import Path

import pytest
import torch
from tests.support.run_directories import assert_same_state, attempt, last_checkpoint, read_tensors
from tests.support.runs import OPTIMIZERS, tiny_run

from meshwright.adapters.merge import rounded_to_nf4
from meshwright.checkpoint.convert import convert_weights
from meshwright.checkpoint.save import MANIFEST
from meshwright.checkpoint.weights import build_model, open_weights
from meshwright.errors import CheckpointError
from meshwright.models.decoder import build_decoder
from meshwright.models.hf_weights import save_folder
from meshwright.models.initialise import initialise
from meshwright.precision.fp8.stored import decode_stored, encode_stored, stored_scale
from meshwright.rehearse.rank_pool import RankFailure
from meshwright.spec import AdapterSpec, CheckpointSpec, ParallelSpec, PrecisionSpec, RunSpec

DORA = AdapterSpec(rank=3, alpha=8, kind="dora")
NUM_STEPS = 6


def base_folder(run: RunSpec, folder: Path, *, seed: int = 5, slope: float = 1.0) -> Path:
    """Random weights of a model; with a slope the last rows of each matrix are that much larger."""
    model = build_decoder(run.model)
    initialise(model, seed)
    with torch.no_grad():
        for weight in (one for one in model.parameters() if one.ndim >= 2):
            weight.mul_(torch.linspace(1.0, slope, weight.shape[-2])[:, None])
            if weight.ndim > 2:  # no two experts have the same scale
                weight.mul_(torch.logspace(0.0, 1.0 - len(weight), len(weight), slope)[:, None, None])
    save_folder({name: one.detach() for name, one in model.state_dict().items()}, run.model, folder)
    return folder


def adapted_run(folder: Path, parallel: ParallelSpec | None = None, **changes: object) -> RunSpec:
    return tiny_run(
        "gqa",
        parallel=parallel,
        optim=OPTIMIZERS["adamw"].with_(ema_decay=0.5),
        precision=PrecisionSpec(),
        adapter=DORA,
        checkpoint=CheckpointSpec(every_steps=2, start_from=str(folder)),
        **changes,
    )


def test_stopped_and_resumed_equals_uninterrupted(ranks, tmp_path):
    run = adapted_run(base_folder(tiny_run("gqa"), tmp_path / "base"), ParallelSpec(dp_shard=2, zero=3))
    attempt(ranks, run, tmp_path / "whole")
    assert attempt(ranks, run, tmp_path / "parts", stop_after=3).step == 3
    assert attempt(ranks, run, tmp_path / "parts").step == NUM_STEPS
    assert_same_state(tmp_path / "parts", tmp_path / "whole")
    names = read_tensors(last_checkpoint(tmp_path / "whole"))
    assert {name.split(".")[0] for name in names} == {"model", "optim", "ema"}
    assert all(".adapter." in name for name in names)


def test_resumes_on_another_mesh(ranks, tmp_path):
    folder = base_folder(tiny_run("gqa"), tmp_path / "base")
    attempt(ranks, adapted_run(folder), tmp_path / "one")
    attempt(ranks, adapted_run(folder, ParallelSpec(tp=2)), tmp_path / "parts", stop_after=3)
    attempt(ranks, adapted_run(folder, ParallelSpec(dp_shard=2, zero=1)), tmp_path / "parts")
    found, expected = (read_tensors(last_checkpoint(tmp_path / name)) for name in ("parts", "one"))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)


def test_resumes_with_the_same_dropout_masks(ranks, tmp_path):
    """Bit for bit on the same mesh; on another one the same masks give the same weights but for rounding."""
    adapter = AdapterSpec(rank=3, alpha=8, dropout=0.2)
    folder = base_folder(tiny_run("gqa"), tmp_path / "base")
    run = adapted_run(folder).with_(adapter=adapter, precision=PrecisionSpec(compute="fp64"))
    attempt(ranks, run, tmp_path / "one")
    for name, parallel in (("same", ParallelSpec()), ("other", ParallelSpec(tp=2))):
        attempt(ranks, run, tmp_path / name, stop_after=3)
        assert attempt(ranks, run.with_(parallel=parallel), tmp_path / name).step == NUM_STEPS
    assert_same_state(tmp_path / "same", tmp_path / "one")
    found, expected = (read_tensors(last_checkpoint(tmp_path / name)) for name in ("other", "one"))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-12)


def test_another_base_is_refused(ranks, tmp_path):
    folder = base_folder(tiny_run("gqa"), tmp_path / "base")
    run = adapted_run(folder)
    attempt(ranks, run, tmp_path / "run", stop_after=2)
    base_folder(run, tmp_path / "other", seed=6)
    moved = run.with_(checkpoint=run.checkpoint.with_(start_from=str(tmp_path / "other")))
    with pytest.raises(RankFailure, match="the adapters were trained on other weights"):
        attempt(ranks, moved, tmp_path / "run")
    folder.rename(tmp_path / "moved")
    same = run.with_(checkpoint=run.checkpoint.with_(start_from=str(tmp_path / "moved")))
    assert attempt(ranks, same, tmp_path / "run").step == NUM_STEPS


def test_what_was_trained_beside_adapters_is_not_left_out(ranks, tmp_path):
    """Adapters were trained beside these norms; beside those of the base they compute something else."""
    folder = base_folder(tiny_run("gqa"), tmp_path / "base")
    attempt(ranks, adapted_run(folder, train_only=("*norm.weight",)), tmp_path / "run")
    run = adapted_run(folder).with_(adapter=DORA.with_(start_from=str(tmp_path / "run")))
    with pytest.raises(RankFailure, match=r"attention_norm\.weight was trained in full there"):
        attempt(ranks, run, tmp_path / "again")
    attempt(ranks, run.with_(train_only=("*norm.weight", "head.weight")), tmp_path / "again")


def test_a_resume_does_not_need_the_adapters_that_the_run_started_from(ranks, tmp_path):
    folder = base_folder(tiny_run("gqa"), tmp_path / "base")
    attempt(ranks, adapted_run(folder), tmp_path / "first")
    run = adapted_run(folder).with_(adapter=DORA.with_(start_from=str(tmp_path / "first")))
    attempt(ranks, run, tmp_path / "whole")
    attempt(ranks, run, tmp_path / "parts", stop_after=3)
    (tmp_path / "first").rename(tmp_path / "gone")
    assert attempt(ranks, run, tmp_path / "parts").step == NUM_STEPS
    assert_same_state(tmp_path / "parts", tmp_path / "whole")


def test_a_base_is_found_from_another_directory(ranks, tmp_path, monkeypatch):
    """A relative path is one of the directory that the run was started in."""
    folder = base_folder(tiny_run("gqa"), tmp_path / "base")
    attempt(ranks, adapted_run(folder), tmp_path / "run")
    manifest_of = last_checkpoint(tmp_path / "run") / MANIFEST
    facts = json.loads(manifest_of.read_text())
    facts["run"]["checkpoint"]["start_from"] = "base"
    manifest_of.write_text(json.dumps(facts))
    (tmp_path / "elsewhere").mkdir()
    for directory in (tmp_path, tmp_path / "elsewhere"):
        monkeypatch.chdir(directory)
        assert open_weights(tmp_path / "run").adapters is not None
    with pytest.raises(CheckpointError, match="has no average"):
        open_weights(tmp_path / "run", averaged=True, merges_adapters=False)
    folder.rename(tmp_path / "gone")
    with pytest.raises(CheckpointError, match="is no longer at") as caught:
        open_weights(tmp_path / "run")
    assert "link" in caught.value.hint


def test_adapters_need_a_base(ranks, tmp_path):
    run = adapted_run(tmp_path).with_(checkpoint=CheckpointSpec())
    with pytest.raises(RankFailure, match="adapters need a trained base"):
        attempt(ranks, run, tmp_path / "run")


def test_weights_of_a_run_are_merged_or_the_base(ranks, tmp_path):
    """What sample and convert open; a peft folder of the run starts another run at the same loss."""
    folder = base_folder(tiny_run("gqa"), tmp_path / "base")
    run = adapted_run(folder)
    attempt(ranks, run, tmp_path / "run")
    tokens, positions = torch.arange(12)[None], torch.arange(12)[None]

    def logits(path: Path, **options: bool) -> torch.Tensor:
        with torch.no_grad():
            return build_model(open_weights(path, **options))(tokens, positions_BS=positions)

    adapted, base = logits(tmp_path / "run"), logits(tmp_path / "run", merges_adapters=False)
    torch.testing.assert_close(base, logits(folder), rtol=0, atol=0)
    assert (adapted - base).abs().max() > 1e-3
    convert_weights(open_weights(tmp_path / "run"), tmp_path / "merged", "huggingface")
    torch.testing.assert_close(logits(tmp_path / "merged"), adapted)
    convert_weights(open_weights(tmp_path / "run"), tmp_path / "peft", "peft")
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert (config["r"], config["use_dora"]) == (3, True)
    second = run.with_(adapter=DORA.with_(start_from=str(tmp_path / "peft")))
    third = run.with_(adapter=DORA.with_(start_from=str(tmp_path / "run")))
    for name, started in (("second", second), ("third", third)):
        attempt(ranks, started.with_(optim=started.optim.with_(lr=1e-30)), tmp_path / name)
        torch.testing.assert_close(logits(tmp_path / name), adapted)
    with pytest.raises(CheckpointError, match="have no adapters"):
        open_weights(folder, merges_adapters=False)


def test_new_tokens_extend_the_vocabulary(ranks, tmp_path):
    """Their rows start as the mean row; all others stay those of the base, on any mesh and in any form."""
    model = tiny_run("tied").model
    small = model.with_(vocab_size=model.vocab_size - 2)
    folder = base_folder(tiny_run("tied").with_(model=small), tmp_path / "base")
    tokens = (5, model.vocab_size - 2, model.vocab_size - 1)
    adapter = AdapterSpec(rank=3, alpha=8, targets=("query",), tokens=tokens)
    run = adapted_run(folder).with_(model=model, adapter=adapter)
    run = run.with_(checkpoint=run.checkpoint.with_(new_tokens=2))
    forgotten = run.with_(model=small, adapter=adapter.with_(tokens=tuple(one - 2 for one in tokens)))
    with pytest.raises((RankFailure, CheckpointError), match="and the weights have all of these rows"):
        attempt(ranks, forgotten, tmp_path / "forgotten")
    attempt(ranks, run, tmp_path / "one")
    attempt(ranks, run.with_(parallel=ParallelSpec(tp=2)), tmp_path / "parts", stop_after=3)
    attempt(ranks, run.with_(parallel=ParallelSpec(dp_shard=2, zero=3)), tmp_path / "parts")
    found, expected = (read_tensors(last_checkpoint(tmp_path / name)) for name in ("parts", "one"))
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)
    base, merged = open_weights(folder).tensors, open_weights(tmp_path / "one").tensors
    name = "embedding.tokens.weight"
    start = torch.cat([base[name], base[name].mean(0).expand(2, -1)])
    is_frozen = torch.tensor([one not in tokens for one in range(model.vocab_size)])
    assert torch.equal(merged[name][is_frozen], start[is_frozen])
    assert (merged[name] - start)[~is_frozen].abs().amax(1).gt(1e-4).all()
    convert_weights(open_weights(tmp_path / "one"), tmp_path / "merged", "huggingface")
    assert open_weights(tmp_path / "merged").model.vocab_size == model.vocab_size
    convert_weights(open_weights(tmp_path / "one"), tmp_path / "peft", "peft")
    again = run.with_(adapter=adapter.with_(start_from=str(tmp_path / "peft")))
    attempt(ranks, again.with_(optim=run.optim.with_(lr=1e-30)), tmp_path / "again")
    torch.testing.assert_close(open_weights(tmp_path / "again").tensors[name], merged[name])


WIDE = {
    "width": 64,
    "attention": {"num_heads": 8, "num_kv_heads": 4, "head_width": 16},
    "mlp": {"width": 128},
}


ROUTED = {"num_experts": 4, "top_k": 2, "width": 384}
"""More than 256 absmax in an expert's matrix."""


@pytest.mark.parametrize("base", [pytest.param("nf4", marks=pytest.mark.soak), "nf4_nested", "fp8"])
def test_experts_are_packed_while_they_are_read(ranks, tmp_path, base):
    """Resumed on other meshes as on one rank; merged, opened and exported as what was trained on."""
    model = tiny_run("gqa").model.with_(**WIDE | {"mlp": {"width": 384}}, moe=ROUTED)
    folder = base_folder(tiny_run(model), tmp_path / "base", slope=6.0)
    adapter = AdapterSpec(rank=3, alpha=8, base=base)
    run = adapted_run(folder).with_(model=model, adapter=adapter, precision=PrecisionSpec(compute="fp64"))
    attempt(ranks, run, tmp_path / "one")
    on_ep = run.with_(parallel=ParallelSpec(dp_shard=4, zero=3, ep=2))
    on_etp = run.with_(parallel=ParallelSpec(dp_shard=2, zero=3, tp=2, etp=2))
    attempt(ranks, on_ep, tmp_path / "two", stop_after=3)
    attempt(ranks, on_etp, tmp_path / "two", stop_after=5)
    attempt(ranks, run.with_(parallel=ParallelSpec(pp=2)), tmp_path / "two")
    found, expected = (read_tensors(last_checkpoint(tmp_path / name)) for name in ("two", "one"))
    for name, tensor in expected.items():  # AdamW divides by roots of squares that may be 1e-10 and less
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-10)
    name = "blocks.1.mlp.experts.down"
    trained, original = open_weights(tmp_path / "one"), open_weights(tmp_path / "one", onto_original=True)
    weight = open_weights(folder).tensors[name]
    rounded = torch.stack([_rounded(matrix, base) for matrix in weight])
    torch.testing.assert_close(trained.tensors[name], rounded + original.tensors[name] - weight)
    assert 1e-3 < (rounded - weight).abs().max() / weight.abs().max() < 0.2
    convert_weights(trained, tmp_path / "merged", "huggingface")
    torch.testing.assert_close(open_weights(tmp_path / "merged").tensors[name], trained.tensors[name])
    convert_weights(trained, tmp_path / "peft", "peft")
    again = run.with_(adapter=adapter.with_(start_from=str(tmp_path / "peft")))
    attempt(ranks, again.with_(optim=run.optim.with_(lr=1e-30)), tmp_path / "again")
    torch.testing.assert_close(open_weights(tmp_path / "again").tensors[name], trained.tensors[name])


def _rounded(matrix: torch.Tensor, base: str) -> torch.Tensor:
    """One expert's matrix as it is trained on, by itself."""
    if base != "fp8":
        return rounded_to_nf4(matrix, is_nested=base == "nf4_nested")
    scale = stored_scale(matrix.abs().amax().float())
    return decode_stored(encode_stored(matrix, scale), scale, matrix.dtype)


@pytest.mark.parametrize("base", ["nf4", "nf4_nested"])
def test_a_base_in_nf4_is_quantised_while_it_is_read(ranks, tmp_path, base):
    """On two ranks as on one; merging takes the weights that were trained on, or those on disk."""
    model = tiny_run("gqa").model.with_(**WIDE)
    folder = base_folder(tiny_run(model), tmp_path / "base")
    run = adapted_run(folder).with_(model=model, adapter=AdapterSpec(rank=3, alpha=8, base=base))
    attempt(ranks, run, tmp_path / "one")
    sharded = run.with_(parallel=ParallelSpec(dp_shard=2, zero=3))
    attempt(ranks, sharded, tmp_path / "two", stop_after=3)
    attempt(ranks, run.with_(parallel=ParallelSpec(tp=2)), tmp_path / "two")
    found, expected = (read_tensors(last_checkpoint(tmp_path / name)) for name in ("two", "one"))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)
    name = "blocks.1.mlp.up.weight"
    trained, original = open_weights(tmp_path / "one"), open_weights(tmp_path / "one", onto_original=True)
    weight = open_weights(folder).tensors[name]
    change = original.tensors[name] - weight
    quantised = rounded_to_nf4(weight, is_nested=base == "nf4_nested")
    torch.testing.assert_close(trained.tensors[name], quantised + change)
    assert (quantised - weight).abs().max() > 1e-3


def test_a_base_in_fp8_is_cast_while_it_is_read(ranks, tmp_path):
    """Every mesh has the same bytes, so a run goes on elsewhere; merging takes the weights trained on."""
    model = tiny_run("gqa").model.with_(**WIDE)
    folder = base_folder(tiny_run(model), tmp_path / "base", slope=6.0)
    adapter = AdapterSpec(rank=3, alpha=8, base="fp8")
    run = adapted_run(folder).with_(model=model, adapter=adapter, precision=PrecisionSpec(compute="fp64"))
    attempt(ranks, run, tmp_path / "one")
    sharded = run.with_(parallel=ParallelSpec(dp_shard=2, zero=3))
    attempt(ranks, sharded, tmp_path / "two", stop_after=3)
    attempt(ranks, run.with_(parallel=ParallelSpec(tp=2)), tmp_path / "two")
    found, expected = (read_tensors(last_checkpoint(tmp_path / name)) for name in ("two", "one"))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-12)
    name = "blocks.1.attention.key.weight"
    trained, original = open_weights(tmp_path / "one"), open_weights(tmp_path / "one", onto_original=True)
    weight = open_weights(folder).tensors[name]
    change = original.tensors[name] - weight
    group = [
        open_weights(folder).tensors[f"blocks.1.attention.{own}.weight"] for own in ("query", "key", "value")
    ]
    scale = stored_scale(torch.stack([one.abs().amax() for one in group]).amax().float())
    rounded = decode_stored(encode_stored(weight, scale), scale, weight.dtype)
    torch.testing.assert_close(trained.tensors[name], rounded + change)
    assert 1e-3 < (rounded - weight).abs().max() / weight.abs().max() < 2**-4
