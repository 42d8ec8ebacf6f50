"""A run that does not fit: what to change in it, on the same devices, and what that would come to."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations

from meshwright.errors import MeshwrightError
from meshwright.hardware.catalogue import Cluster
from meshwright.plan.predict import predict_run
from meshwright.spec.check import check
from meshwright.spec.run import RunSpec
from meshwright.units import show_bytes, show_seconds

MOST_SHOWN = 4
MOST_TOGETHER = 3

Change = Mapping[str, object]
"""Settings that belong together, by dotted key."""


@dataclass(frozen=True)
class Remedy:
    """Settings with which the run fits."""

    settings: Change
    run: RunSpec
    """With these settings."""
    device_bytes: float
    step_seconds: float

    @property
    def words(self) -> str:
        """`memory.recompute=full (61.2 GiB per device, 1.2 s per step)`."""
        need = f"{show_bytes(self.device_bytes)} per device, {show_seconds(self.step_seconds)} per step"
        return f"{' '.join(f'{key}={value}' for key, value in self.settings.items())} ({need})"


def remedies(run: RunSpec, cluster: Cluster) -> list[Remedy]:
    """The fastest single changes that make the run fit; where none does, pairs of changes, then triples."""
    single = list(_changes(run))
    for count in range(1, MOST_TOGETHER + 1):
        tried = (_tried(run, cluster, chosen) for chosen in combinations(single, count))
        fitting = [remedy for remedy in tried if remedy is not None]
        if fitting:
            return sorted(fitting, key=lambda remedy: remedy.step_seconds)[:MOST_SHOWN]
    return []


def remedy_words(found: list[Remedy], cluster: Cluster) -> str:
    """What would help, one change per line."""
    if not found:
        return (
            "no change of recompute, micro-batch, ZeRO stage or optimizer is enough on "
            f"{cluster.num_devices} devices: take more of them, `meshwright plan` says how many"
        )
    return "any one of these fits:" + "".join(f"\n  - {remedy.words}" for remedy in found)


def _tried(run: RunSpec, cluster: Cluster, changes: tuple[Change, ...]) -> Remedy | None:
    settings = {key: value for change in changes for key, value in change.items()}
    if len(settings) < sum(map(len, changes)):
        return None  # two values for one setting
    try:
        changed = _changed(run, settings)
        if check(changed):
            return None
        found = predict_run(changed, cluster)
    except (MeshwrightError, ValueError):
        return None
    if not found.fits:
        return None
    return Remedy(settings, changed, found.fullest.device_bytes, found.step_seconds)


def _changed(run: RunSpec, settings: Change) -> RunSpec:
    for key, value in settings.items():
        section, _, field = key.partition(".")
        run = run.with_(**{section: getattr(run, section).with_(**{field: value})})
    return run


def _changes(run: RunSpec) -> Iterator[Change]:
    """Changes that need fewer bytes per device and leave what the run computes as it is, nearly."""
    stronger = {"none": ("selective", "full"), "selective": ("full",), "full": ()}
    for recompute in stronger[run.memory.recompute]:
        yield {"memory.recompute": recompute}
    size = run.data.microbatch_sequences
    while size > 1 and size % 2 == 0:
        size //= 2
        yield {"data.microbatch_sequences": size}
    yield from _zero_changes(run)
    if run.parallel.zero >= 2 and run.parallel.reduce == "last":
        yield {"parallel.reduce": "each"}
    if run.optim.kind == "adamw":
        yield {"optim.kind": "adamw_8bit"}


def _zero_changes(run: RunSpec) -> Iterator[Change]:
    parallel = run.parallel
    if parallel.dp_shard * parallel.cp > 1:
        for stage in range(parallel.zero + 1, 4):
            yield {"parallel.zero": stage}
    elif parallel.dp_replicate > 1:
        for stage in (1, 2, 3):
            yield {
                "parallel.dp_shard": parallel.dp_replicate,
                "parallel.dp_replicate": 1,
                "parallel.zero": stage,
            }
