"""Fits the time factors of a machine to runs that were measured on it.

The factors are those with which the median run is predicted exactly, so one bad run moves nothing. A run far
from the others is dropped. Communication has a factor of its own where some runs have much of it and others
little; otherwise the two cannot be told apart, and the links keep their rates.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from meshwright.errors import SpecError
from meshwright.hardware.calibration import Calibration
from meshwright.hardware.catalogue import Cluster
from meshwright.plan.predict import Prediction, predict_run
from meshwright.plan.time.step_time import COMMUNICATION
from meshwright.spec.run import RunSpec

# A factor outside of these bounds means another device than was named; a CPU is known only roughly.
MAX_FACTOR, MAX_CPU_FACTOR = 4.0, 100.0
LITTLE_COMMUNICATION, MUCH_COMMUNICATION = 0.05, 0.15
"""Shares of communication in the predicted step."""
MIN_RUNS_FOR_OUTLIERS, OUTLIER_DEVIATIONS, MIN_OUTLIER = 4, 4.0, 0.15
"""A run is dropped this many median deviations away, and at least this far (natural logarithm)."""
ROUNDS, HALVINGS = 3, 20


@dataclass(frozen=True)
class MeasuredRun:
    """One run as it was measured."""

    name: str
    run: RunSpec
    step_seconds: float
    """Median of the steps after warm-up."""


@dataclass(frozen=True)
class FittedRun:
    """Measured and predicted seconds of one run, before and after the fit."""

    name: str
    measured_seconds: float
    before_seconds: float
    after_seconds: float
    is_dropped: bool = False

    @property
    def before_error(self) -> float:
        """Relative error of the prediction without the fit."""
        return self.before_seconds / self.measured_seconds - 1.0

    @property
    def after_error(self) -> float:
        """Relative error of the prediction with the fit."""
        return self.after_seconds / self.measured_seconds - 1.0


@dataclass(frozen=True)
class Fit:
    """The factors, and what they improve."""

    calibration: Calibration
    runs: tuple[FittedRun, ...]
    left_out_error: float | None = None
    """Median error of each run when the factors are fitted to the others; None with fewer than three runs."""
    notes: tuple[str, ...] = field(default_factory=tuple)

    @property
    def before_error(self) -> float:
        """Median absolute error without the fit."""
        return median(abs(each.before_error) for each in self.runs)

    @property
    def after_error(self) -> float:
        """Median absolute error with the fit."""
        return median(abs(each.after_error) for each in self.runs)


def fit(runs: Sequence[MeasuredRun], cluster: Cluster) -> Fit:
    """The factors of this cluster's machine, from at least one run."""
    if not runs:
        raise SpecError("no run was measured", where="--calibrate", hint="name run directories of `train`")
    limit = MAX_CPU_FACTOR if cluster.device.name == "cpu" else MAX_FACTOR
    kept = _without_outliers(runs, cluster)
    calibration, notes = _factors(kept, cluster, limit)
    if len(kept) == 1:
        notes.append("one run is always met exactly; three or more also tell the error of a run left out")
    left_out = None
    if len(kept) >= 3:
        others = [[other for other in kept if other is not each] for each in kept]
        found = [_factors(group, cluster, limit)[0] for group in others]
        pairs = zip(kept, found, strict=True)
        left_out = median(abs(math.exp(_log_ratio(each, cluster, factors)) - 1.0) for each, factors in pairs)
    return Fit(
        calibration,
        tuple(_fitted(each, cluster, calibration, is_dropped=each not in kept) for each in runs),
        left_out,
        tuple(notes),
    )


def _factors(runs: Sequence[MeasuredRun], cluster: Cluster, limit: float) -> tuple[Calibration, list[str]]:
    shares = {each.name: _communication_share(_predict(each, cluster, Calibration())) for each in runs}
    quiet = [each for each in runs if shares[each.name] < LITTLE_COMMUNICATION]
    loud = [each for each in runs if shares[each.name] > MUCH_COMMUNICATION]
    found = Calibration(num_runs=len(runs))
    if not quiet or not loud:
        found = _solved(runs, cluster, found, "compute", limit)
        told = "no run has much communication" if not loud else "every run has communication"
        return found, [f"{told}, so the links keep their rates", *_at_bound(found, limit)]
    for _ in range(ROUNDS):
        found = _solved(quiet, cluster, found, "compute", limit)
        found = _solved(loud, cluster, found, "communication", limit)
    return found, _at_bound(found, limit)


def _solved(
    runs: Sequence[MeasuredRun], cluster: Cluster, start: Calibration, name: str, limit: float
) -> Calibration:
    """The calibration whose factor of this name predicts the median run exactly."""

    def error(log_factor: float) -> float:
        changed = replace(start, **{name: math.exp(log_factor)})
        return median(_log_ratio(each, cluster, changed) for each in runs)

    return replace(start, **{name: math.exp(_root(error, math.log(limit)))})


def _root(error: Callable[[float], float], limit: float) -> float:
    """The zero of a function that falls between -limit and limit, by halving; an end where it has none."""
    low, high = -limit, limit
    if error(low) <= 0:
        return low
    if error(high) >= 0:
        return high
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if error(middle) > 0 else (low, middle)
    return (low + high) / 2


def _at_bound(found: Calibration, limit: float) -> list[str]:
    factors = {"compute": found.compute, "communication": found.communication}
    return [
        f"the factor of {name} is at its bound of {limit:g}: is this the device that the runs used?"
        for name, factor in factors.items()
        if abs(math.log(factor)) > 0.999 * math.log(limit)
    ]


def _without_outliers(runs: Sequence[MeasuredRun], cluster: Cluster) -> list[MeasuredRun]:
    if len(runs) < MIN_RUNS_FOR_OUTLIERS:
        return list(runs)
    ratios = [_log_ratio(each, cluster, Calibration()) for each in runs]
    middle = median(ratios)
    spread = median(abs(ratio - middle) for ratio in ratios)
    most = max(OUTLIER_DEVIATIONS * spread, MIN_OUTLIER)
    return [each for each, ratio in zip(runs, ratios, strict=True) if abs(ratio - middle) <= most]


def _predict(measured: MeasuredRun, cluster: Cluster, calibration: Calibration) -> Prediction:
    ranks = measured.run.parallel.num_ranks
    return predict_run(measured.run, calibration.applied_to(cluster.with_devices(ranks)))


def _log_ratio(measured: MeasuredRun, cluster: Cluster, calibration: Calibration) -> float:
    """Logarithm of measured over predicted seconds; it falls as a factor grows."""
    return math.log(measured.step_seconds / _predict(measured, cluster, calibration).step_seconds)


def _communication_share(prediction: Prediction) -> float:
    exposed = sum(prediction.seconds_by_item.get(name, 0.0) for name in COMMUNICATION)
    return exposed / prediction.step_seconds


def _fitted(
    measured: MeasuredRun, cluster: Cluster, calibration: Calibration, *, is_dropped: bool
) -> FittedRun:
    before = _predict(measured, cluster, Calibration()).step_seconds
    after = _predict(measured, cluster, calibration).step_seconds
    return FittedRun(measured.name, measured.step_seconds, before, after, is_dropped)
