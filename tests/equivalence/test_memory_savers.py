"""Recompute, offload, regather and the choice of when to reduce change bytes, not numbers, on any mesh."""

import gc
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from tests.support.equivalence import (
    RTOL,
    all_tensor_bytes,
    assert_same_training,
    assert_traffic,
    run_case,
    run_cases,
    this_world,
    worst_errors,
)
from tests.support.expected_traffic import ELEMENT, held_shapes, padded_elements
from tests.support.oracle import reference
from tests.support.run_directories import attempt, last_checkpoint, read_tensors
from tests.support.runs import MODELS, MORE_OPTIMIZERS, OPTIMIZERS, few_microbatches, tiny_run
from tests.support.soak import soak
from torch import Tensor, nn

from meshwright.mesh import build_mesh
from meshwright.spec import MemorySpec, ParallelSpec, RunSpec
from meshwright.spec.check import check
from meshwright.train.build import build_data, build_training

LAYOUTS = {
    "single": ParallelSpec(),
    "dp": ParallelSpec(dp_replicate=2),
    "zero_3": ParallelSpec(dp_shard=2, zero=3),
    "tp": ParallelSpec(tp=2),
    "pp": ParallelSpec(pp=2),
    "zero_3_tp": ParallelSpec(dp_shard=2, zero=3, tp=2),
}
RECOMPUTE = ("none", "selective", "full")
OFFLOAD = ("", "optimizer", "activations", "parameters", "optimizer,activations")
KINDS = (*OPTIMIZERS, *MORE_OPTIMIZERS)


def wide(names: Iterable[str], second: Sequence[str]) -> list[Any]:
    """The names as cases; those of `second` are tried in `make soak` only."""
    return [soak(name) if name in second else name for name in names]


def _run(layout: str, kind: str, recompute: str, offload: str) -> RunSpec:
    """With ZeRO-3 the optimizer lives where the parameters do."""
    if offload == "parameters" and LAYOUTS[layout].zero:
        offload = "optimizer,parameters"
    memory = MemorySpec(recompute=recompute, offload=offload)
    parallel = LAYOUTS[layout]
    sequences = few_microbatches(parallel)
    return tiny_run("tied", parallel=parallel, optim=kind, memory=memory, microbatch_sequences=sequences)


def _covering() -> dict[str, list[tuple[str, str, str]]]:
    """For each layout every recompute; offloads alternate so that each meets every recompute; so do kinds.

    The full product is in `make soak`.
    """
    return {
        layout: [
            (KINDS[(3 * row + column) % len(KINDS)], recompute, OFFLOAD[(row + 2 * column) % 5])
            for column, recompute in enumerate(RECOMPUTE)
        ]
        for row, layout in enumerate(LAYOUTS)
    }


def test_every_pair_of_choices_is_covered():
    rows = [(layout, *choice) for layout, choices in _covering().items() for choice in choices]
    assert {(layout, recompute) for layout, _, recompute, _ in rows} == set(product(LAYOUTS, RECOMPUTE))
    assert {(recompute, offload) for _, _, recompute, offload in rows} == set(product(RECOMPUTE, OFFLOAD))
    assert {kind for _, kind, _, _ in rows} == set(KINDS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pairs_equal_one_device(ranks, layout):
    _prove(ranks, [_run(layout, *choice) for choice in _covering()[layout]])


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_choices_equal_one_device(ranks, layout, kind):
    _prove(ranks, [_run(layout, kind, *choice) for choice in product(RECOMPUTE, OFFLOAD)])


def _prove(ranks, runs: list[RunSpec]) -> None:
    for run, results in zip(runs, run_cases(ranks, runs), strict=True):
        assert_same_training(results, reference(run))


@pytest.mark.parametrize("layout", wide(LAYOUTS, ("zero_3", "tp")))
def test_offload_is_bitwise_with_dropout(ranks, layout):
    """Nothing is reordered, so nothing may differ; with recompute on one device, and in a pipeline."""
    parallel = LAYOUTS[layout]
    everything = "optimizer,parameters,activations"
    model = MODELS["gqa"].with_(dropout=0.1, num_layers=4)
    policies = ("none", "full") if layout in ("single", "pp") else ("none",)
    pairs = [(recompute, offload) for recompute in policies for offload in ("", everything)]
    runs = [
        tiny_run(
            model,
            parallel=parallel,
            optim="adamw",
            memory=MemorySpec(recompute=recompute, offload=offload),
            microbatch_sequences=few_microbatches(parallel),
        )
        for recompute, offload in pairs
    ]
    every = run_cases(ranks, runs, num_steps=2)
    for plain, moved in zip(every[::2], every[1::2], strict=True):
        for here, there in zip(plain, moved, strict=True):
            assert here.losses == there.losses
            assert here.grad_norms == there.grad_norms
            for kind in ("weights", "optimizer"):
                ours, theirs = getattr(here, kind), getattr(there, kind)
                assert ours.keys() == theirs.keys()
                assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [("adamw", "single", "zero_3_tp"), ("adamw_8bit", "zero_3", "pp"), soak("adafactor", "tp", "single")],
)
def test_an_offloaded_state_is_saved_and_restored(ranks, tmp_path, kind, before, after):
    """Saved from the host of one mesh, read into the host of another; the end is that of one device."""
    run = tiny_run("gqa", optim=kind, microbatch_sequences=2)
    for layout, stop in ((before, 2), (after, None)):
        here = run.with_(parallel=LAYOUTS[layout], memory=MemorySpec(offload="optimizer,parameters"))
        attempt(ranks, here, tmp_path, stop_after=stop)
    expected = reference(run, num_steps=run.schedule.num_steps)
    tensors = read_tensors(last_checkpoint(tmp_path))
    for part, known in (("model.", expected.weights), ("optim.", expected.optimizer)):
        found = {name.removeprefix(part): value for name, value in tensors.items() if name.startswith(part)}
        assert max(worst_errors(found, known).values()) <= RTOL


# --- gathered inputs under tp ---


@pytest.mark.parametrize(
    ("model", "parallel"),
    [
        ("tied", ParallelSpec(tp=2)),
        soak("gpt", ParallelSpec(tp=2, pp=2)),
        ("mla", ParallelSpec(tp=2, dp_shard=2, zero=3)),
        soak("gqa", ParallelSpec(tp=2, cp=2)),
    ],
    ids=("tied", "gpt_pp", "mla_zero_3", "gqa_cp"),
)
def test_regathered_inputs_equal_kept_ones(ranks, model, parallel):
    run = tiny_run(
        model,
        parallel=parallel,
        memory=MemorySpec(regather_tp_inputs=True),
        microbatch_sequences=few_microbatches(parallel),
    )
    results = run_case(ranks, run, records_traffic=True)
    assert_same_training(results, reference(run))
    assert_traffic(results, run)


def _saved_bytes(runs: list[RunSpec]) -> list[int]:
    """What autograd keeps of one micro-batch, without parameters, storage by storage."""
    found = []
    for run in runs:
        training = build_training(run, build_mesh(run.parallel, this_world()))
        batches = build_data(run, build_mesh(run.parallel, this_world()))
        storages: dict[int, int] = {}

        def keep(tensor: torch.Tensor, storages: dict[int, int] = storages) -> torch.Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        microbatch = next(batches).microbatches[:1]
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            training.program.accumulate(microbatch)
        batches.close()
        found.append(sum(storages.values()))
    return found


def test_regather_keeps_a_part_of_each_gathered_input(ranks):
    """Two inputs of B S D elements a block, of which this rank's half stays, because the norm keeps it."""
    run = tiny_run("gqa", parallel=ParallelSpec(tp=2))
    runs = [run, run.with_(memory=MemorySpec(regather_tp_inputs=True))]
    kept, dropped = ranks.run(_saved_bytes, 2, runs)[0]
    full = run.data.sequence_length * run.model.width * ELEMENT
    assert kept - dropped == 2 * run.model.num_layers * full // 2


# --- when gradients are reduced ---


REDUCE = {
    "zero_2": ParallelSpec(dp_shard=2, zero=2, grad_reduce="last_microbatch"),
    "zero_3": ParallelSpec(dp_shard=2, zero=3, grad_reduce="last_microbatch"),
    "zero_3_tp": ParallelSpec(dp_shard=2, zero=3, tp=2, grad_reduce="last_microbatch"),
    "hybrid_zero_3": ParallelSpec(dp_replicate=2, dp_shard=2, zero=3, grad_reduce="last_microbatch"),
    "zero_2_cp": ParallelSpec(cp=2, zero=2, grad_reduce="last_microbatch"),
    "zero_2_pp": ParallelSpec(pp=2, dp_shard=2, zero=2, grad_reduce="last_microbatch"),
    "zero_3_pp": ParallelSpec(pp=2, dp_shard=2, zero=3, grad_reduce="last_microbatch"),
}
INTERLEAVED = {"schedule": "interleaved_1f1b", "virtual_stages": 2}
EACH = {
    "zero_2_pp": ParallelSpec(pp=2, dp_shard=2, zero=2),
    "zero_3_pp": ParallelSpec(pp=2, dp_shard=2, zero=3),
    "zero_2_interleaved": ParallelSpec(pp=2, dp_shard=2, zero=2, **INTERLEAVED),
    "zero_3_interleaved": ParallelSpec(pp=2, dp_shard=2, zero=3, **INTERLEAVED),
}
WIDE_EACH = {
    "zero_3_gpipe": ParallelSpec(pp=2, dp_shard=2, zero=3, schedule="gpipe"),
    "zero_2_looped": ParallelSpec(pp=2, dp_shard=2, zero=2, schedule="looped_bfs", virtual_stages=2),
    "zero_3_tp": ParallelSpec(pp=2, dp_shard=2, zero=3, tp=2),
    "hybrid_zero_2": ParallelSpec(pp=2, dp_replicate=2, dp_shard=2, zero=2),
    "hybrid_zero_3": ParallelSpec(pp=2, dp_replicate=2, dp_shard=2, zero=3, **INTERLEAVED),
}


@pytest.mark.parametrize("layout", wide(REDUCE, ("zero_2", "hybrid_zero_3", "zero_2_pp")))
def test_reducing_last_equals_one_device(ranks, layout):
    parallel = REDUCE[layout]
    run = tiny_run("tied", parallel=parallel, microbatch_sequences=few_microbatches(parallel))
    results = run_case(ranks, run, records_traffic=True)
    assert_same_training(results, reference(run))
    assert_traffic(results, run)


def _with_layers(parallel: ParallelSpec) -> RunSpec:
    """One layer more than stages."""
    return tiny_run(MODELS["tied"].with_(num_layers=parallel.num_stages + 1), parallel=parallel)


@pytest.mark.parametrize("layout", wide(EACH | WIDE_EACH, ("zero_3_pp", "zero_2_interleaved", *WIDE_EACH)))
def test_a_pipeline_that_reduces_each_equals_one_device(ranks, layout):
    run = _with_layers((EACH | WIDE_EACH)[layout])
    results = run_case(ranks, run, records_traffic=True)
    assert_same_training(results, reference(run))
    assert_traffic(results, run)


def _bytes_with_gradients() -> int:
    """Of all tensors. A gradient becomes an object of Python's, and countable, when it is asked for."""
    gc.collect()
    gradients = [one.grad for one in gc.get_objects() if isinstance(one, nn.Parameter)]
    return all_tensor_bytes() + 0 * len(gradients)


def _held_between_microbatches(runs: list[RunSpec]) -> list[int]:
    """Bytes of tensors that the first of two micro-batches leaves behind."""
    found = []
    for run in runs:
        mesh = build_mesh(run.parallel, this_world())
        training, batches = build_training(run, mesh), build_data(run, mesh)
        held: list[int] = []
        reducer = training.program._reducer
        entered = reducer.microbatch

        def measured(*, is_last: bool, held: list[int] = held, entered=entered):
            if is_last:
                held.append(_bytes_with_gradients())
            return entered(is_last=is_last)

        reducer.microbatch = measured
        microbatches = next(batches).microbatches[:2]
        batches.close()  # no batch is prefetched between the two counts
        before = _bytes_with_gradients()
        training.program.accumulate(microbatches)
        found.append(held[0] - before)
    return found


@pytest.mark.parametrize("zero", [2, 3])
def test_reducing_last_keeps_full_gradients(ranks, zero):
    parallel = ParallelSpec(dp_shard=2, zero=zero)
    run = tiny_run("gqa", parallel=parallel)
    runs = [run, run.with_(parallel=parallel.with_(grad_reduce="last_microbatch"))]
    each, last = ranks.run(_held_between_microbatches, 2, runs)[0]
    shapes = held_shapes(run, 0)
    full = sum(torch.Size(shape).numel() for shape in shapes.values())
    shard = sum(padded_elements(run, name, shape) for name, shape in shapes.items())
    assert last - each == ELEMENT * (full - shard)


def _held_in_a_pipeline(runs: list[RunSpec]) -> list[int]:
    """Bytes of tensors where the last micro-batch's backward begins on this rank's stage."""
    found = []
    for run in runs:
        mesh = build_mesh(run.parallel, this_world())
        training, batches = build_training(run, mesh), build_data(run, mesh)
        held: list[int] = []

        def look(_module: nn.Module, _inputs: object, output: Tensor, held: list[int] = held) -> None:
            output.register_hook(lambda _: held.append(_bytes_with_gradients()))

        training.program.stages[0].register_forward_hook(look)
        before = _bytes_with_gradients()
        training.program.accumulate(next(batches).microbatches)
        batches.close()
        found.append(held[-1] - before)
    return found


@pytest.mark.parametrize("zero", [2, 3])
def test_a_pipeline_that_reduces_each_keeps_shards(ranks, zero):
    """The first stage, whose later micro-batches are still in flight."""
    parallel = ParallelSpec(pp=2, dp_shard=2, zero=zero)
    run = tiny_run("gqa", parallel=parallel)
    runs = [run, run.with_(parallel=parallel.with_(grad_reduce="last_microbatch"))]
    each, last = ranks.run(_held_in_a_pipeline, 4, runs)[0]
    shapes = held_shapes(run, 0)
    full = sum(torch.Size(shape).numel() for shape in shapes.values())
    shard = sum(padded_elements(run, name, shape) for name, shape in shapes.items())
    assert last - each == ELEMENT * (full - shard)


def test_the_layouts_here_are_valid():
    for parallel in (REDUCE | EACH | WIDE_EACH).values():
        assert not check(_with_layers(parallel))
