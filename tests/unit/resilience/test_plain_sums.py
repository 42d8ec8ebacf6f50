"""Gradients of DTensors are added as the plain tensors that lie here, to the last bit."""

from unittest.mock import patch

import torch
from tests.support.harness import this_world
from tests.support.tiny_runs import tiny_run
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.mesh import build_mesh
from meshwright.resilience import shortage
from meshwright.resilience.shortage import GuardedProgram, Lookout
from meshwright.spec import ParallelSpec
from meshwright.train.build import build_data, build_training


class _SumsOfDTensors(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_sum = func.overloadpacket in (torch.ops.aten.add, torch.ops.aten.add_)
        self.count += is_sum and isinstance(args[0], DTensor)
        return func(*args, **(kwargs or {}))


def _accumulate(are_plain: bool):
    """Gradients of two steps of four micro-batches, and how many sums of DTensors they took."""
    run = tiny_run("gqa", parallel=ParallelSpec(tp=2), microbatch_sequences=2, batch_sequences=8)
    mesh = build_mesh(run.parallel, this_world())
    training = build_training(run, mesh)
    with patch.object(shortage, "add_plainly", shortage.add_plainly if are_plain else lambda _: []):
        program = GuardedProgram(training.program, Lookout(this_world(), 0, goes_on=True))
    batches, found = build_data(run, mesh), []
    with _SumsOfDTensors() as sums:
        for _ in range(2):
            program.accumulate(next(batches).microbatches)
            found.append({one.name: one.shard.grad.clone() for one in program.owned})
            for one in program.owned:
                one.shard.grad = None
    batches.close()
    return sums.count, found


def test_sums_are_the_same_and_none_is_a_dtensors(ranks):
    for (num_plain, plain), (num_usual, usual) in zip(
        ranks.run(_accumulate, 2, True), ranks.run(_accumulate, 2, False), strict=True
    ):
        assert num_plain == 0 < num_usual
        for found, expected in zip(plain, usual, strict=True):
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in expected)
