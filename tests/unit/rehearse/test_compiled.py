"""Compiled blocks in a trace: they save what torch saves, and their peak is what an H200 measured."""

import functools
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
from bench.our_runtime import RESULTS, measured_run
from tests.unit.rehearse.test_trace import MODEL, small_run
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from meshwright.memory.recompute import apply_recompute
from meshwright.models.decoder import build_decoder
from meshwright.models.layers.rope import rope_tables
from meshwright.parallel import apply
from meshwright.rehearse import compiled as compiled_blocks
from meshwright.rehearse.compiled import Compiler
from meshwright.rehearse.rank_report import TRACED_UNCOMPILED, RankReport, rehearse_rank
from meshwright.spec import MemorySpec, PrecisionSpec, RunSpec

# Measured on an H200: without recompute, with full recompute, and a model with biases and LayerNorm.
# The last number: rows x vocabulary x 2 bytes of a second chunk of logits at the peak, which is freed today.
MEASURED = {
    "1b": ("llama-3.2-1b", 4, "none", 4096 * 128256 * 2),
    "1b_full": ("llama-3.2-1b", 4, "full", 0),
    "124m": ("gpt2-124m", 32, "none", 8192 * 50304 * 2),
}


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def saved_bytes(backend, recompute: str, mode: AbstractContextManager) -> list[int]:
    """Bytes of the storages that a compiled block saves for backward, without its weights and inputs."""
    (block,) = build_decoder(MODEL, layers=range(1)).blocks.values()
    apply_recompute([block], MemorySpec(recompute=recompute))
    with mode:
        return _saved_bytes(block.to_empty(device="cpu"), torch.compile(block.forward, backend=backend))


def _saved_bytes(block: nn.Module, forward: Callable[..., Tensor]) -> list[int]:
    x_BSD = torch.zeros((2, 128, 128), requires_grad=True)
    positions_BS = torch.zeros((2, 128), dtype=torch.int64)
    rope = rope_tables(MODEL.rope, positions_BS, width=32, dtype=torch.float32)
    known = {one.untyped_storage()._cdata for one in (*block.parameters(), x_BSD, *rope[:2])}
    saved: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        out_BSD = forward(
            x_BSD, rope=rope, positions_BS=positions_BS, documents=None, sequence_weights_B=None
        )
    out_BSD.sum().backward()
    assert x_BSD.grad is not None and x_BSD.grad.shape == x_BSD.shape
    of_generator = (8, torch.get_rng_state().nbytes, 0)  # counters; its state, which CUDA has on the host
    return sorted(size for size in saved.values() if size not in of_generator)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_block_saves_what_torch_saves(recompute):
    real = saved_bytes("aot_eager_decomp_partition", recompute, nullcontext())
    torch.compiler.reset()
    traced = saved_bytes(Compiler(), recompute, FakeTensorMode(allow_non_fake_inputs=True))
    assert traced == real
    assert (len(real) == 0) == (recompute == "full")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.soak] * (name == "1b")) for name in MEASURED]
)
def test_compiled_runs_have_the_peak_that_an_h200_measured(name, monkeypatch):
    # They were measured before projections were fused.
    monkeypatch.setattr(apply, "fuse_projections", lambda *_: None)
    monkeypatch.setattr(apply, "pack_fused_weights", lambda *_: None)
    family, sequences, recompute, freed_bytes = MEASURED[name]
    rows = json.loads((Path(RESULTS) / "runtime_h200_2026-11-15.json").read_text())
    (row,) = (
        row
        for row in rows
        if row["compile"]
        and (row["family"], row["microbatch_sequences"], row["recompute"]) == (family, sequences, recompute)
    )
    run = measured_run(row)
    run = run.with_(device="cuda", data=run.data.with_(documents="joined"))
    report = rehearse_rank(run, 0)
    assert report.form == "compiled"
    # 0.02% is the largest difference of the five compiled rows; the workspaces' 64 MiB are rounded.
    assert report.allocated_bytes == pytest.approx(row["allocated_bytes"] - freed_bytes, rel=1e-3)


def compiled_run(parallel: dict, **how):
    return small_run(parallel, num_layers=2, compute="bf16", **how).with_(compile=True)


@functools.cache
def uncompiled_report(run: RunSpec) -> RankReport:
    return rehearse_rank(run.with_(compile=False), 0, num_steps=1)


@pytest.mark.soak
def test_truncated_traces_of_compiled_blocks_give_the_full_step_exactly():
    run = compiled_run({})
    run = run.with_(model=run.model.with_(num_layers=12))
    short, whole = rehearse_rank(run, 0), rehearse_rank(run, 0, extrapolate=False, num_steps=1)
    assert short.num_traces > 1 == whole.num_traces
    assert (short.items, short.peak_phase) == (whole.items, whole.peak_phase)


def test_collectives_inside_a_compiled_block_are_counted():
    run = compiled_run({"tp": 2})
    compiled, plain = rehearse_rank(run, 0, num_steps=1), uncompiled_report(run)
    assert compiled.form == "compiled"
    assert compiled.collectives == plain.collectives
    assert compiled.flops == plain.flops
    assert compiled.allocated_bytes < plain.allocated_bytes


def test_fused_projections_have_the_flops_of_the_matmuls_they_replace():
    run = compiled_run({})
    assert rehearse_rank(run, 0, num_steps=1).flops == uncompiled_report(run).flops


def test_full_recompute_of_a_compiled_block_saves_its_input_alone():
    """It does not save outputs of our own matmuls and activations either, which torch 2.11 would prefer."""
    run = compiled_run({}, recompute="full")
    run = run.with_(data=run.data.with_(batch_sequences=32, microbatch_sequences=32))
    compiled, plain = rehearse_rank(run, 0, num_steps=1), uncompiled_report(run)
    extra = compiled.items["activations"] - plain.items["activations"]
    # The rope tables are half a MiB more; the output of one matmul of a block would be 2 MiB.
    assert extra <= 2 * 32 * 128 * 16 * 4


def test_what_cannot_be_compiled_is_traced_uncompiled_with_the_reason(monkeypatch):
    def fail(*_: object) -> None:
        raise RuntimeError("no kernels for this graph")

    monkeypatch.setattr(compiled_blocks, "replay_graph", fail)
    run = compiled_run({})
    report = rehearse_rank(run, 0, num_steps=1)
    assert report.form.startswith(TRACED_UNCOMPILED)
    assert "no kernels for this graph" in report.form
    assert report.items == uncompiled_report(run).items


def test_a_compiler_that_skips_every_block_is_no_compiled_trace(monkeypatch):
    monkeypatch.setattr(Compiler, "compile_blocks", functools.partialmethod(lambda *_: None))
    assert "skipped every block" in rehearse_rank(compiled_run({}), 0, num_steps=1).form


def test_separate_documents_with_full_recompute_are_compiled():
    """torch 2.13 passes over an autograd function that gets one tensor twice: offsets of queries and keys."""
    run = compiled_run({}, recompute="full")
    run = run.with_(data=run.data.with_(documents="separate"), precision=PrecisionSpec(compute="bf16"))
    assert rehearse_rank(run, 0, num_steps=1).form == "compiled"
