"""The parameter shards of a rank, and where they lie in the full parameter."""

import pytest
import torch
from tests.support.equivalence import gather_full, this_world
from tests.support.runs import tiny_run

from meshwright.mesh import build_mesh
from meshwright.models.decoder import build_decoder
from meshwright.models.initialise import initialise
from meshwright.parallel.apply import build_program
from meshwright.parallel.shards import chunk_rows, unshard
from meshwright.spec import ParallelSpec


@pytest.mark.parametrize("num_rows", (0, 1, 3, 4, 5, 16, 17))
@pytest.mark.parametrize("num_chunks", (1, 2, 3, 4, 8))
def test_chunks_are_those_of_torch(num_rows, num_chunks):
    rows = torch.arange(num_rows)
    ours = [rows[slice(*chunk_rows(num_rows, num_chunks, index))].tolist() for index in range(num_chunks)]
    theirs = [part.tolist() for part in rows.chunk(num_chunks)] if num_rows else []
    assert ours == theirs + [[]] * (num_chunks - len(theirs))


def _initial(parallel: ParallelSpec, model: str) -> tuple[dict[str, torch.Tensor], float]:
    """Gathered weights of a fresh program, and the sum over ranks of its shares in the norm."""
    run = tiny_run(model, parallel=parallel)
    program = build_program(run, build_mesh(parallel, this_world()))
    full = {one.name: gather_full(one, [one.shard.detach()])[0] for one in program.shards}
    share = sum(one.norm_share * one.shard.numel() for one in program.shards)
    return full, share


@pytest.mark.parametrize("model", ("gqa", "moe_shared"))
@pytest.mark.parametrize(
    "parallel",
    [
        ParallelSpec(dp_shard=4, zero=1),
        ParallelSpec(dp_shard=4, zero=3),
        ParallelSpec(dp_shard=2, zero=1, tp=2),
        ParallelSpec(dp_shard=2, zero=3, tp=2),
        ParallelSpec(dp_replicate=2, cp=2, zero=2),
        ParallelSpec(pp=2, tp=2),
    ],
    ids=lambda parallel: "-".join(f"{k}{v}" for k, v in parallel.model_dump(exclude_defaults=True).items()),
)
def test_initial_weights_do_not_depend_on_the_layout(ranks, parallel, model):
    expected = build_decoder(tiny_run(model).model, dtype=torch.float64)
    initialise(expected, tiny_run(model).seed)
    results = ranks.run(_initial, 4, parallel, model)
    found = {name: tensor for full, _ in results for name, tensor in full.items()}
    named = dict(expected.named_parameters())
    assert set(found) == set(named)
    assert all(torch.equal(found[name], named[name]) for name in named)
    # Every element counts once in the norm, however many ranks hold it.
    num_elements = sum(parameter.numel() for parameter in named.values())
    assert sum(share for _, share in results) == pytest.approx(num_elements)


def _unsharded_twice(parallel: ParallelSpec) -> list[str]:
    """The parameters whose full tensor differs from torch's own."""
    program = build_program(tiny_run("moe", parallel=parallel), build_mesh(parallel, this_world()))
    sharded = {one.name: one.as_global(one.shard) for one in program.shards}
    return [name for name, one in sharded.items() if not torch.equal(unshard(one), one.full_tensor())]


@pytest.mark.parametrize("zero", (1, 3))
def test_unsharded_tensors_are_those_of_torch(ranks, zero):
    """tp and ZeRO shard the same rows, and no axis divides the 35 rows of a tp rank's embedding."""
    assert ranks.run(_unsharded_twice, 4, ParallelSpec(dp_shard=2, zero=zero, tp=2)) == [[]] * 4
