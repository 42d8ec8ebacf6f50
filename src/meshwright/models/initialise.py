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
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.models.decoder import Decoder
from meshwright.models.layers.linear import Linear
from meshwright.models.layers.moe import PROJECTIONS, Experts
from meshwright.models.layers.token_rows import TokenRows
from meshwright.ops.nf4 import quantise_nf4
from meshwright.ops.nf4_nested import NestedTable, nest_absmax
from meshwright.ops.sharded import local_slices
from meshwright.precision.fp8.stored import Fp8Scale, encode_stored, stored_scale, weight_amax
from meshwright.spec import ModelSpec
from meshwright.spec.adapter import adapter_parameters
from meshwright.spec.parameters import Parameter, parameters

TILE = 1024
Tile = tuple[slice, ...]
# QkvProjections into the residual stream; each layer adds two of them.
_INTO_RESIDUAL = ("attention.output.weight", "mlp.down.weight", "mlp.experts.down", "mlp.shared.down.weight")
_EMBEDDING_A = "embedding.tokens.adapter.lora_A"


@torch.no_grad()
def initialise(
    model: Decoder, seed: int, *, device: torch.device | str = "cpu", leaves_frozen: bool = False
) -> None:
    """Allocate a model that is on the meta device on `device`, and initialise every parameter and buffer.

    A model that has memory already is filled in place. With `leaves_frozen` frozen parameters get memory but
    no values: they are loaded afterwards. Does not communicate.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        model.to_empty(device=device)
    listed = [*parameters(model.spec), *adapter_parameters(model.spec, model.adapter)]
    described = {parameter.name: parameter for parameter in listed}
    packed, stored = packed_weights(model), [] if leaves_frozen else stored_weights(model)
    nested = nested_weights(model)
    scales = {
        scale: stored_scale(_amax([described[name] for name in names], model.spec, scale.experts, seed))
        for scale, names in stored
    }
    reset_buffers(model)
    for scale, value in scales.items():
        scale.value.copy_(value)
    in_fp8 = {name: scale for scale, names in stored for name in names}
    for name, tensor in model.named_parameters():
        if leaves_frozen and not tensor.requires_grad:
            continue
        if name in nested:
            fill_nested(tensor, packed[name], nested[name], model.spec, described[name], seed)
        elif name in packed:
            fill_packed(tensor, packed[name], model.spec, described[name], seed)
        elif name in in_fp8:
            fill_stored(tensor, in_fp8[name], model.spec, described[name], seed)
        elif name in described:  # the absmax of packed weights is filled with them
            fill_shard(tensor, model.spec, described[name], seed)


def reset_buffers(model: nn.Module) -> None:
    """Zero all buffers (balance bias, load and loss records), and set the ids of trained tokens."""
    for buffer in model.buffers():
        buffer.zero_()
    for module in model.modules():
        if isinstance(module, TokenRows):
            module.set_ids()


def fill_shard(tensor: Tensor, spec: ModelSpec, parameter: Parameter, seed: int) -> None:
    """Fill this rank's shard of a parameter: ones for norms and magnitudes, zeros for biases, lora_B and rows
    of single tokens, a uniform distribution for lora_A (as peft), else a normal one."""
    target = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if parameter.kind in ("norm", "bias", "lora_B", "magnitude", "token_rows"):
        target.fill_(float(parameter.kind in ("norm", "magnitude")))
        return
    draw_into(target, local_slices(tensor), spec, parameter, seed)


def packed_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """The absmax of each weight in NF4, by the name of the weight."""
    named: dict[str, nn.Parameter] = dict(model.named_parameters())
    return {name.removesuffix("_absmax"): one for name, one in named.items() if name.endswith("_absmax")}


def nested_weights(model: nn.Module) -> dict[str, NestedTable]:
    """The table of each weight in nested NF4, by the name of the weight."""
    found: dict[str, NestedTable | None] = {}
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            found[f"{name}.weight"] = module.weight_nested
        elif isinstance(module, Experts):
            found |= {f"{name}.{own}": module.nested_of(own) for own in PROJECTIONS}
    return {name: nested for name, nested in found.items() if nested is not None}


def fill_nested(
    packed: Tensor, absmax: Tensor, nested: NestedTable, spec: ModelSpec, parameter: Parameter, seed: int
) -> None:
    """Fill this rank's shard of a weight in nested NF4, and its table: full matrices are drawn for it."""
    experts = nested.experts if parameter.kind == "expert" else None
    bytes_, bits = quantise_nf4(_drawn(spec, parameter, experts, seed))
    codes, table = nest_absmax(bits.view(torch.float32))
    nested.value.copy_(table)
    fill(packed, bytes_, first=nested.first_expert)
    fill(absmax, codes, first=nested.first_expert)


def fill_packed(packed: Tensor, absmax: Tensor, spec: ModelSpec, parameter: Parameter, seed: int) -> None:
    """Fill this rank's shard of a weight in NF4: drawn as any other, then quantised."""
    held = unpacked_slices(local_slices(packed))
    value = torch.empty([part.stop - part.start for part in held])
    draw_into(value, held, spec, parameter, seed)
    for target, part in zip((packed, absmax), quantise_nf4(value), strict=True):
        (target.to_local() if isinstance(target, DTensor) else target).copy_(part)


def stored_weights(model: nn.Module) -> list[tuple[Fp8Scale, list[str]]]:
    """The scales of weights stored in fp8, each with the names of its weights."""
    found: dict[Fp8Scale, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, Linear) and module.weight_scale is not None:
            found.setdefault(module.weight_scale, []).append(f"{name}.weight")
        if isinstance(module, Experts) and module.scales is not None:
            for own in PROJECTIONS:
                scale = module.scale_of(own)
                assert scale is not None
                found[scale] = [f"{name}.{own}"]
    return list(found.items())


def _amax(drawn: Sequence[Parameter], spec: ModelSpec, experts: slice | None, seed: int) -> Tensor:
    """The largest magnitude of full weights, or of each expert; they are drawn for it, and freed."""
    return torch.stack([weight_amax(_drawn(spec, one, experts, seed)) for one in drawn]).amax(0)


def _drawn(spec: ModelSpec, parameter: Parameter, experts: slice | None, seed: int) -> Tensor:
    """A full weight, or these of its stacked experts."""
    held = [slice(0, size) for size in parameter.shape]
    held[0] = held[0] if experts is None else experts
    value = torch.empty([part.stop - part.start for part in held])
    draw_into(value, held, spec, parameter, seed)
    return value


def fill_stored(stored: Tensor, scale: Fp8Scale, spec: ModelSpec, parameter: Parameter, seed: int) -> None:
    """Fill this rank's shard of a weight in fp8: drawn as any other, then cast."""
    held = local_slices(stored)
    value = torch.empty([part.stop - part.start for part in held])
    draw_into(value, held, spec, parameter, seed)
    own = scale.value[scale.index(held[0])].to(value.device)
    (stored.to_local() if isinstance(stored, DTensor) else stored).copy_(encode_stored(value, own))


def unpacked_slices(held: Sequence[slice]) -> tuple[slice, ...]:
    """The slices of a weight of which a packed shard holds these: two weights are one byte."""
    *rows, columns = held
    return (*rows, slice(2 * columns.start, 2 * columns.stop))


def draw_into(
    target: Tensor, held: Sequence[slice], spec: ModelSpec, parameter: Parameter, seed: int
) -> None:
    """Draw the box of a random parameter that a shard holds."""
    for tile in tiles(parameter.shape, held):
        value = torch.empty([part.stop - part.start for part in tile], dtype=torch.float32, device="cpu")
        generator = torch.Generator().manual_seed(tile_seed(seed, parameter.name, tile))
        if parameter.name == _EMBEDDING_A:
            value.normal_(generator=generator)  # as in peft
        elif parameter.kind == "lora_A":
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


def fill(parameter: Tensor, full: Tensor, *, first: int = 0) -> None:
    """Copy a full tensor into a parameter that may be sharded: each rank takes its shard.

    `first` is the first row, or expert, of the parameter that `full` has.
    """
    target = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    rows, *others = local_slices(parameter) or (...,)
    target.copy_(full[(_shifted(rows, first) if isinstance(rows, slice) else rows, *others)])


def seed_of(seed: int, name: str) -> int:
    """The seed of one tensor, from the run's seed and the tensor's name: 63 bits."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
