"""The figures of a deep rank with many micro-batches, extrapolated from truncated traces.

All layers of a kind save and communicate the same, and the micro-batches in the middle of a step are alike.
So each figure is linear in the number of layers and of micro-batches, and two traces along each give it
exactly. The peak may fall into another phase in the full step than in a truncated one (a maximum of linear
functions is not linear), so each phase is extrapolated by itself and the peak is taken afterwards. A phase
is identified by its position from both ends: the first block, the last but one, the second micro-batch.
"""

import dataclasses
import itertools

from meshwright.rehearse.categories import peak_at, peaks_by_phase
from meshwright.rehearse.phases import Phase
from meshwright.rehearse.trace import Trace
from meshwright.spec import ModelSpec, RunSpec
from meshwright.spec.stages import stage_layers, stages_of_rank

# Layers of a kind that stay in each stage of the shortest trace.
MIN_LAYERS = 2
# Layers times micro-batches of a rank below which the full step is traced.
MIN_WORK = 24
# Layers of a stage beyond which fragmentation hardly grows; a trace of 32 layers takes seconds.
MAX_DEEP_LAYERS = 30

Key = tuple[str, str, str]
"""Kind of phase, position of its module, position of its micro-batch."""


@dataclasses.dataclass(frozen=True)
class Truncation:
    """What a trace leaves out of the full step."""

    layers: int = 0
    """Layers left out of every stage."""
    microbatches: int = 0


@dataclasses.dataclass(frozen=True)
class Shortening:
    """The largest truncation of a rank's step from which the full step can be extrapolated."""

    num_layers: int = 0
    """Layers of every stage that can be left out."""
    layer_step: int = 1
    """Layers by which two traces differ: the period of recompute."""
    num_microbatches: int = 0
    """Micro-batches that can be left out."""
    microbatch_step: int = 1
    edge_microbatches: int = 1
    """Micro-batches at either end of a step that differ from those in the middle."""

    def truncations(self) -> list[tuple[Truncation, float]]:
        """The traces to make and the weight of each: f(0) = f(r) + r (f(r - 1) - f(r)) along both."""
        along_microbatches = _weights(self.num_microbatches, self.microbatch_step)
        return [
            (Truncation(layers, microbatches), one * other)
            for (layers, one), (microbatches, other) in itertools.product(
                self.along_layers(), along_microbatches
            )
        ]

    def deep(self) -> Truncation:
        """Few micro-batches and up to MAX_DEEP_LAYERS layers more: the trace that shows fragmentation."""
        left_out = max(0, self.num_layers - MAX_DEEP_LAYERS)
        return Truncation(-(-left_out // self.layer_step) * self.layer_step, self.num_microbatches)

    def along_layers(self) -> list[tuple[int, float]]:
        """Numbers of layers to leave out, and the weight of each."""
        return _weights(self.num_layers, self.layer_step)


def _weights(removed: int, step: int) -> list[tuple[int, float]]:
    if removed < 2 * step:
        return [(0, 1.0)]
    ratio = removed // step
    return [(ratio * step, 1.0 - ratio), ((ratio - 1) * step, float(ratio))]


def shortening_of(run: RunSpec, pp_rank: int) -> Shortening:
    """What can be left out of the traces of a rank; nothing where the full step is short."""
    parallel = run.parallel
    layers = stage_layers(run.model, parallel.num_stages)
    mine = [layers[index] for index in stages_of_rank(parallel, pp_rank)]
    period = run.memory.recompute_every if run.memory.recompute != "none" else 1
    removable = min(_tail(run.model, held) for held in mine) - max(MIN_LAYERS, period)
    # A pipeline fills with one round of micro-batches, or two with interleaved stages, and drains likewise.
    round_ = parallel.pp
    edge = round_ * min(2, parallel.virtual_stages)
    spare = run.accumulation - 2 * edge
    if sum(map(len, mine)) * run.accumulation < MIN_WORK:
        return Shortening()
    return Shortening(
        max(0, removable) // period * period, period, max(0, spare) // round_ * round_, round_, edge
    )


def _tail(model: ModelSpec, layers: range) -> int:
    """Number of layers at the end of a stage that are of one kind (dense or MoE)."""
    last = model.is_moe_layer(layers[-1])
    return len(list(itertools.takewhile(lambda layer: model.is_moe_layer(layer) == last, reversed(layers))))


def truncated(run: RunSpec, truncation: Truncation) -> RunSpec:
    """The run with fewer micro-batches; the trace leaves out layers itself."""
    microbatches = run.accumulation - truncation.microbatches
    sequences = microbatches * run.data.microbatch_sequences * run.parallel.dp
    return run.with_(data=run.data.with_(batch_sequences=sequences))


@dataclasses.dataclass(frozen=True)
class StepFigures:
    """Figures of the full step of a rank."""

    allocated_bytes: float
    """Bytes at the peak."""
    items: dict[str, float]
    phase: Phase
    """The phase of the peak."""
    traffic: dict[tuple[str, str], tuple[float, float]]
    """Count and bytes of collectives by axis and kind."""
    flops: float
    host_bytes: float


def extrapolated(traces: list[tuple[Trace, float]], shortening: Shortening) -> StepFigures:
    """The figures of the full step: weighted sums over truncated traces."""
    truncation, _ = shortening.truncations()[-1]
    tables = [_by_key(trace, shortening.edge_microbatches) for trace, _ in traces]
    weights = [weight for _, weight in traces]
    common = set.intersection(*(set(table) for table in tables))
    totals = {key: _sum(weights, [table[key][0] for table in tables]) for key in common}
    best = max(totals, key=lambda key: (totals[key], key))
    peaks = [peak_at(trace, table[best][1]) for (trace, _), table in zip(traces, tables, strict=True)]
    names = dict.fromkeys(name for peak in peaks for name in peak.items)
    kinds = dict.fromkeys(kind for trace, _ in traces for kind in trace.traffic)
    return StepFigures(
        allocated_bytes=totals[best],
        items={name: _sum(weights, [peak.items.get(name, 0) for peak in peaks]) for name in names},
        phase=_in_full_step(peaks[-1].phase, best, truncation),
        traffic={
            kind: (
                _sum(weights, [getattr(trace.traffic.get(kind), "count", 0) for trace, _ in traces]),
                _sum(weights, [getattr(trace.traffic.get(kind), "num_bytes", 0) for trace, _ in traces]),
            )
            for kind in kinds
        },
        flops=_sum(weights, [trace.flops for trace, _ in traces]),
        host_bytes=_sum(weights, [trace.host_bytes for trace, _ in traces]),
    )


def _in_full_step(phase: Phase, key: Key, truncation: Truncation) -> Phase:
    """A phase of a truncated step, numbered as in the full one: positions from the end move."""
    part, microbatch = phase.part, phase.microbatch
    if "/-" in key[1]:
        prefix, number = _split_number(part)
        part = f"{prefix}.{number + truncation.layers}"
    if key[2].startswith("-") and microbatch is not None:
        microbatch += truncation.microbatches
    return dataclasses.replace(phase, part=part, microbatch=microbatch)


def _sum(weights: list[float], values: list[int]) -> float:
    return sum(weight * value for weight, value in zip(weights, values, strict=True))


def _by_key(trace: Trace, edge: int) -> dict[Key, tuple[int, int]]:
    """Peak bytes of each phase and the event that reaches them, under every position the phase has."""
    found: dict[Key, tuple[int, int]] = {}
    last = max((phase.microbatch or 0 for phase in trace.phases), default=0)
    blocks = sorted({phase.part for phase in trace.phases if "blocks." in phase.part}, key=_split_number)
    for number, value in peaks_by_phase(trace).items():
        phase = trace.phases[number]
        for part, microbatch in itertools.product(
            _part_positions(phase.part, blocks), _microbatch_positions(phase.microbatch, last, edge)
        ):
            key = (phase.kind, part, microbatch)
            found[key] = max(found.get(key, (0, 0)), value)
    return found


def _split_number(part: str) -> tuple[str, int]:
    """`after blocks.3` -> (`after blocks`, 3)."""
    prefix, _, number = part.rpartition(".")
    return prefix, int(number)


def _part_positions(part: str, blocks: list[str]) -> list[str]:
    if "blocks." not in part:
        return [part]
    prefix, number = _split_number(part)
    numbers = [_split_number(block)[1] for block in blocks if _split_number(block)[0] == prefix]
    stages = _consecutive(numbers)
    stage = next(stage for stage in stages if number in stage)
    return [f"{prefix}/{stages.index(stage)}/{name}" for name in _positions(stage.index(number), len(stage))]


def _consecutive(numbers: list[int]) -> list[range]:
    """Ranges of consecutive block numbers: one for each stage of the rank."""
    found: list[range] = []
    for number in numbers:
        if found and found[-1].stop == number:
            found[-1] = range(found[-1].start, number + 1)
        else:
            found.append(range(number, number + 1))
    return found


def _microbatch_positions(microbatch: int | None, last: int, edge: int) -> list[str]:
    return [""] if microbatch is None else _positions(microbatch, last + 1, edge)


def _positions(index: int, count: int, edge: int = 1) -> list[str]:
    """The position from the beginning and from the end; at the ends only the nearer one.

    The `edge` ones at either end differ from the others (no gradients exist before the first micro-batch, the
    last one reduces them, a pipeline fills and drains). In a truncated step a position from the far end would
    mistake one of them for one from the middle.
    """
    from_begin = [str(index)] if index < count - edge or count == 1 else []
    from_end = [str(index - count)] if index >= edge or count == 1 else []
    return from_begin + from_end
