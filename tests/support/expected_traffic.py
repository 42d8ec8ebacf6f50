"""What each rank of a layout must send and hold, by formula from the spec and the placement table alone."""

import math
from collections import Counter
from collections.abc import Iterator
from itertools import product

from tests.support.recorded_traffic import Named

from meshwright.spec import RunSpec
from meshwright.spec.parallel import MESH_ORDER
from meshwright.spec.parameters import parameters
from meshwright.spec.placement import is_routed_expert, tp_dim
from meshwright.spec.stages import stage_layers, stages_of_rank

ELEMENT = 8  # bytes: everything here is float64 or int64
Shapes = dict[str, tuple[int, ...]]


def expected_traffic(run: RunSpec, rank: int) -> Named:
    """What one rank sends in one step of a dense model; `hierarchical` cp is left to the tests of cp."""
    pp_rank, shapes = place(run, rank)["pp"], held_shapes(run, place(run, rank)["pp"])
    total: Named = Counter()
    _add(total, run, "all_reduce", MESH_ORDER, ELEMENT)  # the gradient norm
    for part in (_state(run, shapes), _tensor(run, pp_rank), _context(run, pp_rank), _pipeline(run, rank)):
        total.update(part)
    return total


def place(run: RunSpec, rank: int) -> dict[str, int]:
    """Where a rank stands on each axis."""
    found = {}
    for axis in reversed(MESH_ORDER):
        rank, found[axis] = divmod(rank, getattr(run.parallel, axis))
    return found


def _add(total: Named, run: RunSpec, kind: str, axes: tuple[str, ...], size: int, count: int = 1) -> None:
    """Nothing where the axes have one rank."""
    named = [axis for axis in MESH_ORDER if axis in axes and getattr(run.parallel, axis) > 1]
    if named and count:
        total[kind, "+".join(named), size] += count


# --- parameters, as tp and ep leave them ---


def stages_here(run: RunSpec, pp_rank: int) -> list[int]:
    """The stages of one pipeline rank."""
    return stages_of_rank(run.parallel, pp_rank)


def held_shapes(run: RunSpec, pp_rank: int) -> Shapes:
    """The local shape of every parameter that a rank computes with; a tied table may be there twice."""
    found: Shapes = {}
    for stage in stages_here(run, pp_rank):
        for parameter in parameters(run.model):
            if _is_in_stage(run, parameter.name, stage):
                found[f"{stage}:{parameter.name}"] = _local_shape(run, parameter.name, parameter.shape)
    return found


def _is_in_stage(run: RunSpec, name: str, stage: int) -> bool:
    last = run.parallel.num_stages - 1
    if name.startswith("blocks."):
        return int(name.split(".")[1]) in stage_layers(run.model, run.parallel.num_stages)[stage]
    if name == "embedding.tokens.weight" and run.model.tied_head:
        return stage in (0, last)
    return stage == (0 if name.startswith("embedding.") else last)


def _local_shape(run: RunSpec, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    local, dim = list(shape), tp_dim(name, run.parallel)
    if dim is not None:
        local[dim] //= run.parallel.tp
    if is_routed_expert(name):
        local[0] //= run.parallel.ep
    return tuple(local)


def _shards(run: RunSpec, name: str) -> int:
    parallel = run.parallel
    if not parallel.zero:
        return 1
    return parallel.dp_shard * parallel.cp // (parallel.ep if is_routed_expert(name) else 1)


def padded_elements(run: RunSpec, name: str, shape: tuple[int, ...]) -> int:
    """Elements of one shard when rows are split into equal chunks, with padding."""
    return -(-shape[0] // _shards(run, name)) * math.prod(shape[1:])


def _is_partial(run: RunSpec, name: str) -> bool:
    return run.parallel.tp > 1 and tp_dim(name.split(":")[1], run.parallel) is None


# --- state: the ZeRO stages ---


def _state(run: RunSpec, shapes: Shapes) -> Named:
    return _fully_sharded(run, shapes) if run.parallel.zero == 3 else _bucketed(run, shapes)


def _bucketed(run: RunSpec, shapes: Shapes) -> Named:
    """tp-sharded parameters share a bucket; replicated ones have another, whose gradients tp sums as well."""
    total: Named = Counter()
    shard, shards = ("dp_shard", "cp"), _shards(run, "")
    num_scatters = _num_scatters(run) if run.parallel.zero == 2 else 1
    is_apart = (
        run.parallel.zero == 2 and run.parallel.grad_reduce == "each_microbatch"
    )  # a stage has buckets of its own
    stages = {name.split(":")[0] for name in shapes} if is_apart else {""}
    for partial, stage in product((False, True), sorted(stages)):
        here = [name for name in shapes if not is_apart or name.split(":")[0] == stage]
        members = [name for name in here if _is_partial(run, name) == partial]
        chunk = ELEMENT * sum(padded_elements(run, name, shapes[name]) for name in members)
        if not members:
            continue
        if run.parallel.zero == 0:
            _add(total, run, "all_reduce", ("dp_replicate", *shard), chunk)
        else:
            _add(total, run, "reduce_scatter", shard, chunk * shards, num_scatters)
            _add(total, run, "all_reduce", ("dp_replicate",), chunk)
            _add(total, run, "all_gather", shard, chunk * shards)
        if partial:
            _add(total, run, "all_reduce", ("tp",), chunk)
    return total


def _num_scatters(run: RunSpec) -> int:
    """Of gradients in a step, with stages 2 and 3."""
    return run.accumulation if run.parallel.grad_reduce == "each_microbatch" else 1


def _fully_sharded(run: RunSpec, shapes: Shapes) -> Named:
    """Unit by unit: gathered forward and backward, scattered backward; a pipeline does each once a step."""
    total: Named = Counter()
    shards = _shards(run, "")
    num_gathers = 1 if run.parallel.pp > 1 else 2 * run.accumulation
    for members in _units(run, shapes):
        chunk = ELEMENT * sum(padded_elements(run, name, shapes[name]) for name in members)
        _add(total, run, "all_gather", ("dp_shard", "cp"), chunk * shards, num_gathers)
        _add(total, run, "reduce_scatter", ("dp_shard", "cp"), chunk * shards, _num_scatters(run))
        _add(total, run, "all_reduce", ("dp_replicate",), chunk)
    for name, shape in shapes.items():
        if _is_partial(run, name):
            _add(total, run, "all_reduce", ("tp",), ELEMENT * math.prod(shape), _num_scatters(run))
    return total


def _units(run: RunSpec, shapes: Shapes) -> Iterator[list[str]]:
    """Blocks, the ends when they are not tied, and the rest of each stage."""
    units: dict[str, list[str]] = {}
    for name in shapes:
        stage, path = name.split(":")
        parts = path.split(".")
        is_end = parts[0] in ("embedding", "head") and not run.model.tied_head
        unit = ".".join(parts[:2]) if parts[0] == "blocks" else parts[0] if is_end else "root"
        units.setdefault(f"{stage}:{unit}", []).append(name)
    yield from units.values()


# --- activations ---


def _layers_here(run: RunSpec, pp_rank: int) -> int:
    layers = stage_layers(run.model, run.parallel.num_stages)
    return sum(len(layers[stage]) for stage in stages_here(run, pp_rank))


def _hidden_bytes(run: RunSpec) -> int:
    """x[B, S_cp, D] of one micro-batch."""
    return (
        run.data.microbatch_sequences
        * run.data.sequence_length
        // run.parallel.cp
        * run.model.width
        * ELEMENT
    )


def _tensor(run: RunSpec, pp_rank: int) -> Named:
    """The gather or scatter at each tp boundary, its transpose in backward, and the sharded loss."""
    total: Named = Counter()
    stages, last = stages_here(run, pp_rank), run.parallel.num_stages - 1
    boundaries = 4 * _layers_here(run, pp_rank) + (0 in stages) + (last in stages)
    for kind in ("all_gather", "reduce_scatter"):
        regathers = (
            2 * _layers_here(run, pp_rank) if kind == "all_gather" and run.memory.regather_tp_inputs else 0
        )
        _add(total, run, kind, ("tp",), _hidden_bytes(run), (boundaries + regathers) * run.accumulation)
    if last in stages:
        per_number = _hidden_bytes(run) // run.model.width
        _add(total, run, "all_reduce", ("tp",), per_number, run.accumulation)
        _add(total, run, "all_reduce", ("tp",), 2 * per_number, run.accumulation)
    return total


def _context(run: RunSpec, pp_rank: int) -> Named:
    """Keys and values (or heads) of every layer."""
    total: Named = Counter()
    attention, parallel = run.model.attention, run.parallel
    count = _layers_here(run, pp_rank) * run.accumulation
    rows = run.data.microbatch_sequences * run.data.sequence_length
    keys = (
        rows
        * attention.num_kv_heads
        // parallel.tp
        * (attention.head_width + attention.value_width)
        * ELEMENT
    )
    if parallel.cp_kind == "gather":
        _add(total, run, "all_gather", ("cp",), keys, count)
        _add(total, run, "reduce_scatter", ("cp",), keys, count)
    elif parallel.cp_kind == "ring":
        for kind in ("send", "recv"):  # forward keys; backward keys and their gradients
            _add(total, run, kind, ("cp",), keys // parallel.cp, 3 * (parallel.cp - 1) * count)
    else:
        heads = rows * attention.num_heads // parallel.tp * ELEMENT
        out = heads * attention.head_width + keys
        _add(total, run, "all_to_all", ("cp",), out // parallel.cp, 2 * count)
        _add(total, run, "all_to_all", ("cp",), heads * attention.value_width // parallel.cp, 2 * count)
    return total


def _pipeline(run: RunSpec, rank: int) -> Named:
    """Hidden states to the next stage's rank, gradients back, and the gradient of a tied embedding."""
    total: Named = Counter()
    parallel, pp_rank = run.parallel, place(run, rank)["pp"]
    rank_of = {stage: place for place in range(parallel.pp) for stage in stages_of_rank(parallel, place)}
    borders = [
        stage + step
        for stage in stages_here(run, pp_rank)
        for step in (-1, 1)
        if rank_of.get(stage + step, pp_rank) != pp_rank
    ]
    for kind in ("send", "recv"):
        _add(total, run, kind, ("pp",), _hidden_bytes(run) // parallel.tp, len(borders) * run.accumulation)
    ends = {rank_of[0], rank_of[parallel.num_stages - 1]}
    if run.model.tied_head and len(ends) > 1 and pp_rank in ends:
        total["all_reduce", "pp" if parallel.pp == 2 else "pp_ends", _table_shard_bytes(run, rank)] += 1
    return total


def _table_shard_bytes(run: RunSpec, rank: int) -> int:
    """This rank's rows of the token table: the last chunk may be short."""
    name = "embedding.tokens.weight"
    num_rows, width = _local_shape(run, name, (run.model.vocab_size, run.model.width))
    chunk = -(-num_rows // _shards(run, name))
    where = place(run, rank)
    index = where["dp_shard"] * run.parallel.cp + where["cp"] if run.parallel.zero else 0
    return ELEMENT * width * max(0, min(chunk, num_rows - index * chunk))


# --- what is held ---


def _shard_bytes(run: RunSpec, name: str, shape: tuple[int, ...]) -> int:
    return ELEMENT * padded_elements(run, name, shape)


def expected_parameter_bytes(run: RunSpec, pp_rank: int) -> int:
    """Whole parameters up to ZeRO-2, a chunk of each after."""
    shapes = held_shapes(run, pp_rank)
    if run.parallel.zero == 3:
        return _all_shard_bytes(run, shapes)
    return ELEMENT * sum(math.prod(shape) for shape in shapes.values())


def gradient_bytes(run: RunSpec, pp_rank: int) -> tuple[int, int]:
    """(least, most) at the update: full gradients with ZeRO-0, a shard of each with every other stage.

    They differ only for a table with both ends on one rank: each end computes with its own copy, and the
    second gradient may still be there after it was added to the first.
    """
    shapes = held_shapes(run, pp_rank)
    by_name = {name.split(":")[1]: shape for name, shape in shapes.items()}
    return _all_shard_bytes(run, by_name), _all_shard_bytes(run, shapes)


def _all_shard_bytes(run: RunSpec, shapes: Shapes) -> int:
    return sum(_shard_bytes(run, name, shape) for name, shape in shapes.items())


def most_optimizer_bytes(run: RunSpec, pp_rank: int, num_states: int) -> int:
    """The states of full chunks; the last ranks may hold less."""
    return num_states * gradient_bytes(run, pp_rank)[0]
