"""The changes of a run that are most worth trying after a profile, each with its gain and its override.

A gain is a share of the step. Its basis is `measured` where it follows from times of the trace, `predicted`
where the planner prices the changed run on this device, and `bound` where the trace only says how much there
is to gain at most. A predicted gain is never larger than what the trace has to gain.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from meshwright.errors import MeshwrightError
from meshwright.hardware.catalogue import Cluster
from meshwright.hardware.machine import Machine
from meshwright.observe.profile.kernel_classes import COPY, ELEMENTWISE, MATMUL, NORM
from meshwright.observe.profile.rank_profile import RankProfile
from meshwright.plan.explain.microbatch import advise_local_microbatch, advise_microbatch, with_microbatch
from meshwright.plan.explain.prices import predicted_with, saved_share, with_change
from meshwright.plan.predict import Prediction, predict_run
from meshwright.plan.search.allow import NUMERICS_CHANGES
from meshwright.spec.advice import TILE
from meshwright.spec.check import check
from meshwright.spec.run import RunSpec

Basis = Literal["measured", "predicted", "bound"]
MOST_CHANGES = 3
LEAST_GAIN = 0.01
# Share of the gaps between kernels that a CUDA graph closes.
_GRAPH_SHARE = 0.9


@dataclass(frozen=True)
class Change:
    """Overrides of a run, and how much shorter a step is expected to be with them."""

    settings: tuple[tuple[str, Any], ...]
    gain: float
    low: float
    high: float
    basis: Basis
    why: str
    changes_numerics: bool = False

    @property
    def overrides(self) -> str:
        """The words to add to the command line."""
        return " ".join(f"{key}={_text(value)}" for key, value in self.settings)


@dataclass(frozen=True)
class Situation:
    """What the advisors look at."""

    run: RunSpec
    profile: RankProfile
    cluster: Cluster | None
    """None where the device is not in the catalogue, and on a CPU."""
    machine: Machine | None = None

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return self.profile.step_seconds


def best_changes(situation: Situation) -> list[Change]:
    """At most three changes with a gain of at least one per cent, the largest first."""
    found = [change for advisor in ADVISORS for change in advisor(situation) if change.gain >= LEAST_GAIN]
    best: list[Change] = []
    for change in sorted(found, key=lambda one: -one.gain):
        keys = {key for key, _ in change.settings}
        if not any(keys & {key for key, _ in other.settings} for other in best):
            best.append(change)
    return best[:MOST_CHANGES]


def aligned_dims(at: Situation) -> Iterator[Change]:
    """Pad the widths and the vocabulary whose matmuls miss the tensor cores' full rate."""
    settings = padded_settings(at.run)
    by_keys: dict[tuple[str, ...], list[Any]] = {}
    for missed in at.profile.missed:
        known = {settings[dim][0]: settings[dim][1] for dim in missed.dims if dim in settings}
        if known:
            by_keys.setdefault(tuple(sorted(known)), []).append(missed)
    values = dict(settings.values())
    for keys in list(by_keys):
        every = [one for part, found in by_keys.items() if set(part) <= set(keys) for one in found]
        change = tuple((key, values[key]) for key in keys)
        if not _is_valid(at.run, change):
            continue
        worst = max(every, key=lambda one: one.gain_seconds)
        row = worst.row
        why = (
            f"the matmul {row.shape.text} in {row.shape.dtype} runs at "
            f"{row.flops_per_second / 1e12:.0f} TFLOP/s: {worst.why}"
        )
        low, high = (
            sum(getattr(one, name) for one in every) / at.step for name in ("low_seconds", "high_seconds")
        )
        yield Change(change, (low + high) / 2, low, high, "measured", why)


def padded_settings(run: RunSpec) -> dict[int, tuple[str, int]]:
    """Dim of a rank's matmul -> the key that sets it and the next value that fills tiles."""
    model, parallel = run.model, run.parallel
    found: dict[int, tuple[str, int]] = {}
    for key, value, degree, parts in (
        ("model.mlp.width", model.mlp.width, parallel.tp, (1, 2)),
        *((("model.moe.width", model.moe.width, parallel.etp, (1, 2)),) if model.moe else ()),
        ("model.width", model.width, 1, (1,)),
        ("model.vocab_size", model.vocab_size, parallel.tp, (1,)),
    ):
        padded = -(-value // (TILE * degree)) * TILE * degree
        if padded != value:
            found |= {part * value // degree: (key, padded) for part in parts}
    return found


def faster_precision(at: Situation) -> Iterator[Change]:
    """fp32 matmuls as TF32 or bf16, by the rates of the device."""
    run, cluster = at.run, at.cluster
    if run.precision.compute not in ("fp32", "tf32") or not at.profile.is_cuda or cluster is None:
        return
    now = cluster.device.peak_flops_per_second.get(run.precision.compute, 0.0)
    share = at.profile.share_of(MATMUL)
    for dtype in ("tf32", "bf16"):
        then = cluster.device.peak_flops_per_second.get(dtype, 0.0)
        if dtype == run.precision.compute or not now or then <= now:
            continue
        gain = share * (1.0 - now / then)
        faster = f"{dtype} is {then / now:.1f} x as fast"
        why = f"matmuls in {run.precision.compute} are {share:.0%} of the step; {faster}"
        change = (("precision.compute", dtype),)
        if _is_valid(run, change):
            yield Change(change, gain, 0.5 * gain, gain, "measured", why, changes_numerics=True)


def compiled_blocks(at: Situation) -> Iterator[Change]:
    """torch.compile fuses what is element-wise, and needs fewer launches."""
    if at.run.compile:
        return
    room = at.profile.share_of(ELEMENTWISE, NORM, COPY) + at.profile.gap_seconds / at.step
    what = "element-wise operators, normalisation, copies and gaps"
    why = f"{what} are {room:.0%} of the step, and compile fuses them"
    yield from _priced_or_bound(at, (("compile", True),), room, why)


def replayed_graphs(at: Situation) -> Iterator[Change]:
    """A CUDA graph launches a micro-batch at once."""
    change = (("cuda_graphs", True),)
    if at.run.cuda_graphs or not at.profile.is_cuda or not _is_valid(at.run, change):
        return
    gain = _GRAPH_SHARE * at.profile.gap_seconds / at.step
    why = (
        f"no kernel runs in {at.profile.gap_seconds / at.step:.0%} of the step: the host launches too slowly"
    )
    yield Change(change, gain, 0.5 * gain, at.profile.gap_seconds / at.step, "measured", why)


def larger_microbatch(at: Situation) -> Iterator[Change]:
    """Fewer, larger micro-batches fill the device and need fewer launches."""
    run = at.run
    try:
        notes = advise_microbatch(run, at.cluster) if at.cluster is not None else []
        if at.cluster is None and at.machine is not None:
            notes = advise_local_microbatch(run, at.machine)
    except MeshwrightError:
        return
    for note in notes:
        key, _, size = note.hint.partition("=")
        change = ((key, int(size)),)
        why = f"{run.accumulation} micro-batches of {run.data.microbatch_sequences}; {size} fit"
        if at.cluster is not None:
            now, then = predict_run(run, at.cluster), predict_run(with_microbatch(run, int(size)), at.cluster)
            yield _predicted(change, now, then, why, limit=1.0)
        else:
            room = at.profile.gap_seconds / at.step + at.profile.share_of("other")
            yield Change(change, room / 2, 0.0, room, "bound", f"{why}, with less time between operators")


def less_recompute(at: Situation) -> Iterator[Change]:
    """Recompute (activation checkpointing) only as much as memory needs."""
    kinds = {"full": ("none", "selective"), "selective": ("none",)}.get(at.run.memory.recompute, ())
    for kind in kinds:
        found = list(
            _fitting(at, (("memory.recompute", kind),), "recompute computes again what fits in memory")
        )
        if found:
            yield from found
            return


def lower_zero_stage(at: Situation) -> Iterator[Change]:
    """A lower ZeRO stage exposes less communication."""
    if at.run.parallel.zero > 1:
        share = at.profile.exposed_seconds / at.step
        why = f"exposed communication is {share:.0%} of the step, and zero=1 gathers parameters once"
        yield from _fitting(at, (("parallel.zero", 1),), why, limit=share)


def cheaper_numerics(at: Situation) -> Iterator[Change]:
    """Other number formats of matmuls, weights and gradients."""
    for change in NUMERICS_CHANGES:
        if change.name not in ("bf16_weights", "fp8") or change.is_set(at.run) or at.cluster is None:
            continue
        if change.name == "fp8" and "fp8" not in at.cluster.device.peak_flops_per_second:
            continue
        limit = at.profile.share_of(MATMUL) if change.name == "fp8" else 1.0
        settings = ((change.key, change.value),)
        for found in _fitting(at, settings, change.meaning, limit=limit):
            yield Change(*(found.settings, found.gain, found.low, found.high, found.basis, found.why), True)


def faster_data(at: Situation) -> Iterator[Change]:
    """Read neighbouring samples together where the step waits for data."""
    share = at.profile.data_seconds / at.step
    if at.run.data.shuffle is True and at.run.data.path is not None:
        block = (("data.shuffle", "{block_samples: 1024, window_blocks: 64}"),)
        why = (
            f"the step waits for data {share:.0%} of its time; a shuffle by blocks reads neighbouring samples"
        )
        yield Change(block, share / 2, 0.0, share, "bound", why)


def _priced_or_bound(
    at: Situation, change: tuple[tuple[str, Any], ...], room: float, why: str
) -> Iterator[Change]:
    """The planner's price of a change, limited by what there is to gain; without a price half of that."""
    found = list(_fitting(at, change, why, limit=room))
    if found:
        yield from found
    elif at.cluster is None and _is_valid(at.run, change):
        yield Change(change, room / 2, 0.0, room, "bound", why)


def _fitting(
    at: Situation, change: tuple[tuple[str, Any], ...], why: str, *, limit: float = 1.0
) -> Iterator[Change]:
    """The planner's price of a change that breaks no rule and fits the device."""
    if at.cluster is None:
        return
    try:
        now = predict_run(at.run, at.cluster)
    except MeshwrightError:
        return
    then = predicted_with(at.run, dict(change), at.cluster)
    if then is not None and then.fits:
        yield _predicted(change, now, then, why, limit=limit)


def _predicted(
    change: tuple[tuple[str, Any], ...], now: Prediction, then: Prediction, why: str, *, limit: float
) -> Change:
    gain = min(limit, saved_share(now, then))
    return Change(change, gain, 0.5 * gain, min(limit, 1.5 * gain), "predicted", why)


def _is_valid(run: RunSpec, change: tuple[tuple[str, Any], ...]) -> bool:
    try:
        return not check(with_change(run, dict(change)))
    except (MeshwrightError, ValueError):
        return False


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


ADVISORS: list[Callable[[Situation], Iterator[Change]]] = [
    aligned_dims,
    faster_precision,
    compiled_blocks,
    replayed_graphs,
    larger_microbatch,
    less_recompute,
    lower_zero_stage,
    cheaper_numerics,
    faster_data,
]
