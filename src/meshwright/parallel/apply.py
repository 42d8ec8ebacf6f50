"""From a RunSpec to the program of this rank: the order of transforms, written once.

1. meta      the stage is built without memory, so no rank ever holds the whole model
2. tp, ep    cut parameters first: everything after sees the local layer
3. cp        replaces the attention core; touches no parameter
4. recompute wraps blocks before they are compiled or sharded, so that both see the wrapped block
5. compile   block by block: one graph for all layers, and collectives of FSDP stay outside
6. ZeRO-3    last, because it takes over the parameters as DTensors of what tp and ep left
7. memory    allocate and fill: every tensor has its own seed, so the layout does not matter
"""

from functools import partial

from torch import nn

from meshwright.mesh import Mesh
from meshwright.models.decoder import Decoder, build_decoder
from meshwright.models.initialise import initialise
from meshwright.parallel.dp import build_reducer, shard_fully
from meshwright.parallel.owned import own
from meshwright.parallel.program import Program, SingleProgram
from meshwright.precision.policy import compute_context, lower_dtype, weight_dtype
from meshwright.spec import RunSpec


def build_program(run: RunSpec, mesh: Mesh) -> Program:
    """The model of this rank at its initial weights, ready to accumulate gradients; all ranks call it."""
    model = build_decoder(run.model, dtype=weight_dtype(run.precision))
    transform(model, run, mesh)
    initialise(model, run.seed, device=mesh.device)
    owned = [own(name, parameter, mesh) for name, parameter in model.named_parameters()]
    return SingleProgram(
        model,
        owned=owned,
        reducer=build_reducer(owned, mesh),
        context=partial(compute_context, run.precision, mesh.device),
        localise=lambda microbatch: microbatch,
    )


def transform(model: Decoder, run: RunSpec, mesh: Mesh) -> None:
    """Steps 2 to 6 on one stage."""
    if run.compile:
        for block in model.blocks.values():
            block.compile()
    if mesh.parallel.zero == 3:
        shard_fully(
            sharding_units(model),
            model,
            mesh,
            experts=[],
            lower=lower_dtype(run.precision),
        )


def sharding_units(model: Decoder) -> list[nn.Module]:
    """Modules gathered one at a time under ZeRO-3. A tied table is used at both ends and stays with the root."""
    ends: list[nn.Module] = []
    if not model.spec.tied_head:
        ends = [end for end in (model.embedding, model.head) if end is not None]
    return [*model.blocks.values(), *ends]
