"""The decision for one machine changes with its cores, its memory, its devices and the model."""

import dataclasses

import pytest

from meshwright.errors import PlanError
from meshwright.hardware.machine import Accelerator, Machine
from meshwright.plan.search.local import LocalDecision, decide_local, rank_bytes, step_seconds
from meshwright.spec import RunSpec
from meshwright.spec.text import load_run

GIB = 2**30
TWO_CORES = Machine(cores=2, free_memory_bytes=8 * GIB)
H100 = Accelerator("NVIDIA H100 80GB HBM3", 80 * GIB, (9, 0))
V100 = Accelerator("Tesla V100-SXM2-16GB", 16 * GIB, (7, 0))


@pytest.fixture(scope="module")
def demo() -> RunSpec:
    return load_run("demo")


def on(machine: Machine, **changes: object) -> Machine:
    return dataclasses.replace(machine, **changes)


def test_two_cores_get_two_ranks_in_fp32(demo: RunSpec):
    decision = decide_local(demo, TWO_CORES)
    assert (decision.device, decision.num_ranks, decision.compute) == ("cpu", 2, "fp32")
    assert decision.microbatch_sequences == demo.data.batch_sequences // 2


@pytest.mark.parametrize(("cores", "num_ranks"), [(1, 1), (2, 2), (3, 2), (4, 4), (8, 8)])
def test_ranks_follow_cores_and_divide_the_batch(demo: RunSpec, cores: int, num_ranks: int):
    assert decide_local(demo, on(TWO_CORES, cores=cores, free_memory_bytes=64 * GIB)).num_ranks == num_ranks


def test_many_cores_are_not_all_given_to_ranks(demo: RunSpec):
    """Reducing gradients between many ranks would cost more than the step."""
    big = on(TWO_CORES, cores=128, free_memory_bytes=512 * GIB)
    chosen = decide_local(demo, big).num_ranks
    assert 1 < chosen < demo.data.batch_sequences
    assert step_seconds(demo, big, chosen) < step_seconds(demo, big, demo.data.batch_sequences)


def test_little_memory_takes_fewer_ranks(demo: RunSpec):
    decision = decide_local(demo, on(TWO_CORES, free_memory_bytes=GIB))
    assert decision.num_ranks == 1
    assert "2 x" in decision.reasons["ranks"]


def test_less_memory_takes_a_smaller_microbatch(demo: RunSpec):
    one_sequence = rank_bytes(demo.model, demo.data.sequence_length)
    decision = decide_local(demo, on(TWO_CORES, cores=1, free_memory_bytes=int(one_sequence * 1.1 / 0.8)))
    assert decision.microbatch_sequences < demo.data.batch_sequences
    assert "micro-batches" in decision.reasons["microbatch"]


def test_a_larger_model_changes_the_decision(demo: RunSpec):
    model = demo.model.with_(num_layers=24, width=1536, mlp=demo.model.mlp.with_(width=6144))
    large = demo.with_(model=model)
    assert decide_local(demo, TWO_CORES).num_ranks == 2
    assert decide_local(large, on(TWO_CORES, free_memory_bytes=20 * GIB)).num_ranks == 1


def test_a_model_that_does_not_fit_is_refused(demo: RunSpec):
    with pytest.raises(PlanError, match="parameters need") as caught:
        decide_local(demo, on(TWO_CORES, free_memory_bytes=GIB // 4))
    assert caught.value.exit_code == 3 and caught.value.hint


def test_precision_follows_the_hardware(demo: RunSpec):
    machines = {
        "bf16": [on(TWO_CORES, has_bf16_units=True), on(TWO_CORES, accelerators=(H100,))],
        "fp16": [on(TWO_CORES, accelerators=(V100,)), on(TWO_CORES, accelerators=(H100, V100))],
        "fp32": [TWO_CORES, on(TWO_CORES, accelerators=(Accelerator("P100", 16 * GIB, (6, 0)),))],
    }
    for compute, ones in machines.items():
        assert [decide_local(demo, machine).compute for machine in ones] == [compute] * len(ones)


def test_one_rank_for_each_accelerator(demo: RunSpec):
    four = decide_local(demo, on(TWO_CORES, accelerators=(H100,) * 4))
    assert (four.device, four.num_ranks) == ("cuda", 4)
    assert decide_local(demo, on(TWO_CORES, accelerators=(H100,) * 3)).num_ranks == 2, "3 do not divide 8"


@pytest.mark.parametrize("accelerators", [(), (H100,), (V100, V100)])
def test_overrides_make_a_valid_run(demo: RunSpec, accelerators: tuple[Accelerator, ...]):
    decision: LocalDecision = decide_local(demo, on(TWO_CORES, accelerators=accelerators))
    run = load_run("demo", decision.overrides())
    assert run.parallel.num_ranks == decision.num_ranks
    assert run.accumulation * run.data.microbatch_sequences * decision.num_ranks == run.data.batch_sequences
    assert set(decision.reasons) == {"ranks", "precision", "microbatch"}
