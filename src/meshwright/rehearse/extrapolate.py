"""The figures of a deep rank with many micro-batches from traces of a few layers and micro-batches.

Every layer of a kind keeps and sends the same, and from some micro-batch on a step repeats itself. So each
figure is linear in the number of layers and of micro-batches, and two traces give it exactly. The fullest
phase may be another one in the whole step than in a short one (the maximum of straight lines is not
straight), so every phase is extended for itself and the fullest is chosen afterwards. PhaseTracker are told
apart by their place from both ends: the first block, the last but one, the second micro-batch.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from unittest.mock import patch

from meshwright.parallel.pp import stages as runtime_stages
from meshwright.rehearse.categories import peak_at, peaks_by_phase
from meshwright.rehearse.phases import Phase
from meshwright.rehearse.trace import Trace
from meshwright.spec import ModelSpec, RunSpec
from meshwright.spec.stages import stage_layers, stages_of_rank

# Layers of a kind that stay in each stage of the shortest trace, and the work below which nothing is cut.
LEAST_LAYERS = 2
WORTH_CUTTING = 24

Key = tuple[str, str, str]


# Layers of a stage beyond which the allocator's holes no longer grow by much: 32 of 80 take seconds.
DEEP = 30


@dataclasses.dataclass(frozen=True)
class Cut:
    """How much shorter a trace is than the step: layers of every stage, and micro-batches."""

    layers: int = 0
    microbatches: int = 0


@dataclasses.dataclass(frozen=True)
class Shortening:
    """The largest cuts after which a step is still like the whole, and how far apart two of them lie."""

    num_layers: int = 0
    layer_step: int = 1
    num_microbatches: int = 0
    microbatch_step: int = 1
    microbatch_border: int = 1
    """Micro-batches at either end of a step that are unlike those between."""

    def cuts(self) -> list[tuple[Cut, float]]:
        """Traces to make and the weight of each: f(0) = f(r) + r (f(r - 1) - f(r)) along both."""
        along_microbatches = _weights(self.num_microbatches, self.microbatch_step)
        return [
            (Cut(layers, microbatches), one * other)
            for (layers, one), (microbatches, other) in itertools.product(
                self.along_layers(), along_microbatches
            )
        ]

    def deep(self) -> Cut:
        """Few micro-batches but, up to DEEP of them, all layers: how full the allocator's segments lie."""
        kept_out = max(0, self.num_layers - DEEP)
        return Cut(-(-kept_out // self.layer_step) * self.layer_step, self.num_microbatches)

    def along_layers(self) -> list[tuple[int, float]]:
        """Layers left out and the weight of each choice."""
        return _weights(self.num_layers, self.layer_step)


def _weights(removed: int, step: int) -> list[tuple[int, float]]:
    if removed < 2 * step:
        return [(0, 1.0)]
    ratio = removed // step
    return [(ratio * step, 1.0 - ratio), ((ratio - 1) * step, float(ratio))]


def shortening_of(run: RunSpec, pp_rank: int) -> Shortening:
    """What may be left out of the trace of a rank; nothing where the whole is short."""
    parallel = run.parallel
    layers = stage_layers(run.model, parallel.num_stages)
    mine = [layers[index] for index in stages_of_rank(parallel, pp_rank)]
    period = run.memory.recompute_every if run.memory.recompute != "none" else 1
    removable = min(_tail(run.model, held) for held in mine) - max(LEAST_LAYERS, period)
    # A pipeline fills with one round of micro-batches, or two where stages take turns, and empties likewise.
    round_ = parallel.pp
    border = round_ * min(2, parallel.virtual_stages)
    spare = run.accumulation - 2 * border
    if sum(map(len, mine)) * run.accumulation < WORTH_CUTTING:
        return Shortening()
    return Shortening(
        max(0, removable) // period * period, period, max(0, spare) // round_ * round_, round_, border
    )


def _tail(model: ModelSpec, layers: range) -> int:
    """Layers at the end of a stage that are of one kind."""
    last = model.is_moe_layer(layers[-1])
    return len(list(itertools.takewhile(lambda layer: model.is_moe_layer(layer) == last, reversed(layers))))


def shortened(run: RunSpec, cut: Cut) -> RunSpec:
    """The run with fewer micro-batches; layers are left out by `without_layers`."""
    microbatches = run.accumulation - cut.microbatches
    sequences = microbatches * run.data.microbatch_sequences * run.parallel.dp
    return run.with_(data=run.data.with_(batch_sequences=sequences))


@contextlib.contextmanager
def without_layers(count: int) -> Iterator[None]:
    """Inside, every stage is built without its last `count` layers."""

    def fewer(model: ModelSpec, num_stages: int) -> list[range]:
        # Other ranks' stages may be shorter than what this one can spare; they are never built here.
        return [held[: max(1, len(held) - count)] for held in stage_layers(model, num_stages)]

    with patch.object(runtime_stages, "stage_layers", fewer):
        yield


@dataclasses.dataclass(frozen=True)
class Whole:
    """Figures of the whole step."""

    allocated_bytes: float
    items: dict[str, float]
    phase: Phase
    traffic: dict[tuple[str, str], tuple[float, float]]
    """Count and bytes by axis and kind."""
    flops: float
    host_bytes: float


def extended(traces: list[tuple[Trace, float]], shortening: Shortening) -> Whole:
    """Weighted sums of the traces' figures."""
    cut, _ = shortening.cuts()[-1]
    tables = [_by_key(trace, shortening.microbatch_border) for trace, _ in traces]
    weights = [weight for _, weight in traces]
    common = set.intersection(*(set(table) for table in tables))
    totals = {key: _sum(weights, [table[key][0] for table in tables]) for key in common}
    best = max(totals, key=lambda key: (totals[key], key))
    peaks = [peak_at(trace, table[best][1]) for (trace, _), table in zip(traces, tables, strict=True)]
    names = dict.fromkeys(name for peak in peaks for name in peak.items)
    kinds = dict.fromkeys(kind for trace, _ in traces for kind in trace.traffic)
    return Whole(
        allocated_bytes=totals[best],
        items={name: _sum(weights, [peak.items.get(name, 0) for peak in peaks]) for name in names},
        phase=_in_the_whole(peaks[-1].phase, best, cut),
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


def _in_the_whole(phase: Phase, key: Key, cut: Cut) -> Phase:
    """The phase of a shorter step as the whole one counts: places from the end move by what was left out."""
    part, microbatch = phase.part, phase.microbatch
    if "/-" in key[1]:
        words, number = _number(part)
        part = f"{words}.{number + cut.layers}"
    if key[2].startswith("-") and microbatch is not None:
        microbatch += cut.microbatches
    return dataclasses.replace(phase, part=part, microbatch=microbatch)


def _sum(weights: list[float], values: list[int]) -> float:
    return sum(weight * value for weight, value in zip(weights, values, strict=True))


def _by_key(trace: Trace, border: int) -> dict[Key, tuple[int, int]]:
    """Largest bytes of each phase, under every name it has."""
    found: dict[Key, tuple[int, int]] = {}
    last = max((phase.microbatch or 0 for phase in trace.phases), default=0)
    blocks = sorted({phase.part for phase in trace.phases if "blocks." in phase.part}, key=_number)
    for number, value in peaks_by_phase(trace).items():
        phase = trace.phases[number]
        for part, microbatch in itertools.product(
            _part_names(phase.part, blocks), _microbatch_names(phase.microbatch, last, border)
        ):
            key = (phase.kind, part, microbatch)
            found[key] = max(found.get(key, (0, 0)), value)
    return found


def _number(part: str) -> tuple[str, int]:
    words, _, number = part.rpartition(".")
    return words, int(number)


def _part_names(part: str, blocks: list[str]) -> list[str]:
    if "blocks." not in part:
        return [part]
    words, number = _number(part)
    mine = [_number(block)[1] for block in blocks if _number(block)[0] == words]
    runs = _runs(mine)
    run = next(run for run in runs if number in run)
    place, which = run.index(number), runs.index(run)
    return [f"{words}/{which}/{name}" for name in _places(place, len(run))]


def _runs(numbers: list[int]) -> list[range]:
    """Consecutive numbers together: one run for each stage of the rank."""
    found: list[range] = []
    for number in numbers:
        if found and found[-1].stop == number:
            found[-1] = range(found[-1].start, number + 1)
        else:
            found.append(range(number, number + 1))
    return found


def _microbatch_names(microbatch: int | None, last: int, border: int) -> list[str]:
    return [""] if microbatch is None else _places(microbatch, last + 1, border)


def _places(index: int, count: int, border: int = 1) -> list[str]:
    """From both ends; the first ones have no place from the end and the last none from the beginning.

    Those are like no others (no gradients before the first micro-batch, a reduction in the last, a pipeline
    that fills and empties), and in a short step one between them would share its name with one of them.
    """
    from_begin = [str(index)] if index < count - border or count == 1 else []
    from_end = [str(index - count)] if index >= border or count == 1 else []
    return from_begin + from_end
