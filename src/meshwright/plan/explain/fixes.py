"""Changes with which a run that does not fit would fit on the same devices."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import cast

from meshwright.errors import MeshwrightError
from meshwright.hardware.catalogue import Cluster
from meshwright.plan.search.candidate import candidate_of
from meshwright.plan.search.what_if import Change, Outcome, fitting
from meshwright.spec.adapter import NF4_FORMATS
from meshwright.spec.run import RunSpec
from meshwright.units import show_number

MAX_SHOWN = 4
MAX_TOGETHER = 3
Settings = Mapping[str, object]
"""Values by dotted key that belong together."""


def run_fixes(run: RunSpec, cluster: Cluster) -> list[Outcome]:
    """The fastest single changes with which the run fits; where none is enough, pairs, then triples."""
    single = list(_settings(run))
    for count in range(1, MAX_TOGETHER + 1):
        tried = (_change(run, cluster, chosen) for chosen in combinations(single, count))
        found = list(fitting(change for change in tried if change is not None))
        if found:
            return sorted(found, key=lambda outcome: outcome.step_seconds)[:MAX_SHOWN]
    return []


def fixes_text(found: Sequence[Outcome], cluster: Cluster) -> str:
    """The changes that help, one per line."""
    if not found:
        return (
            "no change of recompute, micro-batch, ZeRO stage or optimizer is enough on "
            f"{show_number(cluster.num_devices, 'device')}: use more of them, `meshwright plan` says how many"
        )
    return "any one of these fits:" + "".join(f"\n  - {outcome.text}" for outcome in found)


def _change(run: RunSpec, cluster: Cluster, chosen: Sequence[Settings]) -> Change | None:
    """The run with these settings; None where they contradict each other."""
    settings = {key: value for each in chosen for key, value in each.items()}
    if len(settings) < sum(map(len, chosen)):
        return None  # two values for one key
    try:
        for key, value in settings.items():
            section, _, field = key.partition(".")
            run = run.with_(**{section: getattr(run, section).with_(**{field: value})})
        changed = candidate_of(run, cluster)
    except (MeshwrightError, ValueError):
        return None
    text = " ".join(f"{key}={_text(value)}" for key, value in settings.items())
    return Change(text, changed.question, changed.layout)


def _text(value: object) -> str:
    """A value as the command line takes it; a tuple is one of offload."""
    return f"[{','.join(cast('tuple[str, ...]', value))}]" if isinstance(value, tuple) else str(value)


def _settings(run: RunSpec) -> Iterator[Settings]:
    """Settings that need fewer bytes per device and leave what the run computes (nearly) unchanged."""
    stronger = {"none": ("selective", "full"), "selective": ("full",), "full": ()}
    for recompute in stronger[run.memory.recompute]:
        yield {"memory.recompute": recompute}
    if run.memory.recompute_every > 1:
        yield {"memory.recompute_every": 1}
    size = run.data.microbatch_sequences
    while size > 1 and size % 2 == 0:
        size //= 2
        yield {"data.microbatch_sequences": size}
    yield from _zero_settings(run)
    if run.parallel.zero >= 2 and run.parallel.grad_reduce == "last_microbatch":
        yield {"parallel.grad_reduce": "each_microbatch"}
    if run.optim.kind == "adamw":
        yield {"optim.kind": "adamw_8bit"}
    yield from _adapter_settings(run)


def _adapter_settings(run: RunSpec) -> Iterator[Settings]:
    """With adapters the frozen weights are most of the state, and activations most of the rest."""
    if run.adapter is None:
        return
    if run.adapter.base not in NF4_FORMATS:
        yield {"adapter.base": "nf4"}
    if not run.memory.offload:
        yield {"memory.offload": ("activations",)}


def _zero_settings(run: RunSpec) -> Iterator[Settings]:
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
