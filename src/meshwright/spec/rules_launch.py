"""Rules about the links of ranks: settings of NCCL and gloo that have no effect or contradict each other."""

from collections.abc import Iterator
from typing import Any, cast

from meshwright.errors import SpecError
from meshwright.spec.base import Spec
from meshwright.spec.run import RunSpec
from meshwright.spec.violations import show_value

Violations = Iterator[SpecError]
_INFINIBAND = ("hcas", "ib_timeout", "ib_retries")


def changed_fields(spec: Spec) -> list[str]:
    """The fields that are not at their defaults, as `name=value`."""
    return [
        f"{name}={_shown(getattr(spec, name))}"
        for name, field in type(spec).model_fields.items()
        if getattr(spec, name) != field.default
    ]


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(cast(tuple[str, ...], value))}]"
    return show_value(value)


def nccl_settings_have_effect(run: RunSpec) -> Violations:
    """Settings of NCCL need several ranks on GPUs."""
    settings = changed_fields(run.launch.nccl)
    if settings and (run.device == "cpu" or run.parallel.num_ranks == 1):
        why = "device=cpu" if run.device == "cpu" else "one rank"
        fact = f"launch.nccl.{settings[0]} has no effect: NCCL is not used with {why}"
        yield SpecError(fact, where="launch.nccl", hint="remove launch.nccl; gloo's settings are launch.gloo")


def gloo_settings_have_effect(run: RunSpec) -> Violations:
    """Settings of gloo need several ranks."""
    settings = changed_fields(run.launch.gloo)
    if settings and run.parallel.num_ranks == 1:
        fact = f"launch.gloo.{settings[0]} has no effect: one rank connects to no other"
        yield SpecError(fact, where="launch.gloo", hint="remove launch.gloo")


def infiniband_settings_have_effect(run: RunSpec) -> Violations:
    """Settings of InfiniBand need `launch.nccl.infiniband`."""
    nccl = run.launch.nccl
    for name in _INFINIBAND:
        if not nccl.infiniband and getattr(nccl, name):
            fact = f"{name}={_shown(getattr(nccl, name))} has no effect with infiniband=false"
            hint = f"remove {name}, or set launch.nccl.infiniband=true"
            yield SpecError(fact, where=f"launch.nccl.{name}", hint=hint)


def cta_limits_are_in_order(run: RunSpec) -> Violations:
    """The fewest thread blocks of a collective are not more than the most."""
    low, high = run.launch.nccl.min_ctas, run.launch.nccl.max_ctas
    if low is not None and high is not None and low > high:
        hint = f"use at most {high}, or raise launch.nccl.max_ctas"
        yield SpecError(f"min_ctas={low} is above max_ctas={high}", where="launch.nccl.min_ctas", hint=hint)


LAUNCH_RULES = [
    nccl_settings_have_effect,
    gloo_settings_have_effect,
    infiniband_settings_have_effect,
    cta_limits_are_in_order,
]
