"""Initial weights that do not depend on the layout: every tile of a tensor has a seed of its own.

A parameter consists of tiles of at most 1024 x 1024 elements over its last two dims. A tile is drawn on the
CPU in float32, from a generator seeded by the run's seed, the parameter's name and the tile's place. Each
rank draws the tiles that its shard touches. So any mesh, stage split, device or dtype starts from the same
weights, and no rank draws or holds a full tensor of which it keeps a shard.
"""

import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.models.decoder import Decoder
from meshwright.ops.sharded import local_slices
from meshwright.spec import ModelSpec
from meshwright.spec.adapter import adapter_parameters
from meshwright.spec.parameters import Parameter, parameters

TILE = 1024
Tile = tuple[slice, ...]
# QkvProjections into the residual stream; each layer adds two of them.
_INTO_RESIDUAL = ("attention.output.weight", "mlp.down.weight", "mlp.experts.down", "mlp.shared.down.weight")


@torch.no_grad()
def initialise(model: Decoder, seed: int, *, device: torch.device | str = "cpu") -> None:
    """Allocate a model that is on the meta device on `device`, and initialise every parameter and buffer.

    A model that has memory already is filled in place. Does not communicate.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        model.to_empty(device=device)
    listed = [*parameters(model.spec), *adapter_parameters(model.spec, model.adapter)]
    described = {parameter.name: parameter for parameter in listed}
    for name, tensor in model.named_parameters():
        fill_shard(tensor, model.spec, described[name], seed)
    for buffer in model.buffers():
        buffer.zero_()  # balance bias, load and loss records


def fill_shard(tensor: Tensor, spec: ModelSpec, parameter: Parameter, seed: int) -> None:
    """Fill this rank's shard of a parameter: ones for norms and magnitudes, zeros for biases and lora_B, a
    uniform distribution for lora_A (as peft), else a normal one."""
    target = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if parameter.kind in ("norm", "bias", "lora_B", "magnitude"):
        target.fill_(float(parameter.kind in ("norm", "magnitude")))
        return
    held = local_slices(tensor)
    for tile in tiles(parameter.shape, held):
        value = torch.empty([part.stop - part.start for part in tile], dtype=torch.float32, device="cpu")
        generator = torch.Generator().manual_seed(tile_seed(seed, parameter.name, tile))
        if parameter.kind == "lora_A":
            bound = parameter.shape[-1] ** -0.5  # of the full input width, however it is sharded
            value.uniform_(-bound, bound, generator=generator)
        else:
            value.normal_(0.0, initial_std(spec, parameter), generator=generator)
        inside = [_overlap(part, kept) for part, kept in zip(tile, held, strict=True)]
        source = tuple(_shifted(part, each.start) for part, each in zip(inside, tile, strict=True))
        place = tuple(_shifted(part, kept.start) for part, kept in zip(inside, held, strict=True))
        target[place].copy_(value[source])


def tiles(shape: Sequence[int], held: Sequence[slice]) -> Iterator[Tile]:
    """The tiles of a full tensor that overlap a shard: of one index in all dims but the last two."""
    sizes = [1] * (len(shape) - 2) + [TILE] * min(2, len(shape))
    starts = [
        range(kept.start // size * size, kept.stop, size) if kept.stop > kept.start else range(0)
        for kept, size in zip(held, sizes, strict=True)
    ]
    for corner in itertools.product(*starts):
        yield tuple(
            slice(start, min(start + size, full))
            for start, size, full in zip(corner, sizes, shape, strict=True)
        )


def tile_seed(seed: int, name: str, tile: Tile) -> int:
    """The seed of one tile; that of the first one is the tensor's."""
    corner = [part.start for part in tile]
    return seed_of(seed, f"{name}/{corner}" if any(corner) else name)


def _overlap(one: slice, other: slice) -> slice:
    return slice(max(one.start, other.start), min(one.stop, other.stop))


def _shifted(part: slice, start: int) -> slice:
    return slice(part.start - start, part.stop - start)


def initial_std(spec: ModelSpec, parameter: Parameter) -> float:
    """Standard deviation of a random tensor."""
    into_residual = parameter.name.endswith(_INTO_RESIDUAL)
    scaled = into_residual and spec.scaled_residual_init
    return spec.init_std / math.sqrt(2 * spec.num_layers) if scaled else spec.init_std


def fill(parameter: Tensor, full: Tensor) -> None:
    """Copy a full tensor into a parameter that may be sharded: each rank takes its shard."""
    target = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    target.copy_(full[local_slices(parameter)])


def seed_of(seed: int, name: str) -> int:
    """The seed of one tensor, from the run's seed and the tensor's name: 63 bits."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
