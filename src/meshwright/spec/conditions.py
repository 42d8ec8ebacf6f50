"""Settings that have an effect only together with others; without it they are refused rather than ignored."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

from meshwright.errors import SpecError
from meshwright.spec.base import Spec
from meshwright.spec.run import RunSpec

Violations = Iterator[SpecError]


@dataclass(frozen=True)
class Condition:
    """A setting, the condition under which it has an effect, and that condition as text."""

    key: str
    has_effect: Callable[[RunSpec], bool]
    text: str


def _scaling(run: RunSpec) -> str:
    rope = run.model.rope
    return rope.scaling.kind if rope is not None and rope.scaling is not None else ""


# The optimizers with Adam's second moment for all or some parameters.
ADAM_KINDS = ("adamw", "adamw_8bit", "lamb", "muon")


def _has_groups(run: RunSpec) -> bool:
    return run.model.moe is not None and run.model.moe.num_groups > 1


def _accumulates_shards(run: RunSpec) -> bool:
    return run.parallel.zero >= 2 and run.accumulation > 1


def _has_striped_rows(run: RunSpec) -> bool:
    is_gathered = run.parallel.cp > 1 and run.parallel.cp_kind == "gather"
    return is_gathered and run.data.documents == "separate"


def has_watched_ranks(run: RunSpec) -> bool:
    """Ranks are watched by the process that started them; one rank alone has none, unless it is restarted."""
    resilience = run.resilience
    is_restarted = resilience.restart.single_rank or resilience.elastic is not None
    return run.parallel.num_ranks > 1 or is_restarted or run.memory.on_oom == "halve_microbatch"


CONDITIONS: list[Condition] = [
    Condition("parallel.cp_kind", lambda run: run.parallel.cp > 1, "cp > 1"),
    Condition(
        "parallel.cp_inner", lambda run: run.parallel.cp_kind == "hierarchical", "cp_kind=hierarchical"
    ),
    Condition("parallel.cp_stripes", _has_striped_rows, "cp_kind=gather, cp > 1 and documents=separate"),
    Condition("parallel.schedule", lambda run: run.parallel.pp > 1, "pp > 1"),
    Condition("parallel.virtual_stages", lambda run: run.parallel.pp > 1, "pp > 1"),
    Condition(
        "parallel.grad_reduce", _accumulates_shards, "zero is 2 or 3 with several micro-batches per step"
    ),
    Condition("parallel.ep_overlap", lambda run: run.parallel.ep > 1, "ep > 1"),
    Condition("parallel.etp", lambda run: run.model.moe is not None, "the model has experts"),
    Condition("memory.regather_tp_inputs", lambda run: run.parallel.tp > 1, "tp > 1"),
    Condition("data.curriculum", lambda run: bool(run.data.blend), "data.blend is set"),
    Condition("memory.on_oom", lambda run: run.data.microbatch_sequences > 1, "microbatch_sequences > 1"),
    Condition("memory.recompute_every", lambda run: run.memory.recompute != "none", "recompute is on"),
    Condition(
        "precision.fp8.history_steps",
        lambda run: run.precision.fp8 is not None and run.precision.fp8.recipe == "delayed",
        "fp8.recipe=delayed",
    ),
    Condition("precision.fp8.experts", lambda run: run.model.moe is not None, "the model has experts"),
    Condition(
        "precision.fp8.min_gradient_cosine",
        lambda run: run.precision.fp8 is not None and run.precision.fp8.compare_every_steps is not None,
        "fp8.compare_every_steps is set",
    ),
    *(
        Condition(
            f"optim.{name}", lambda run: run.optim.kind in ADAM_KINDS, "optim.kind is adamw*, lamb or muon"
        )
        for name in ("beta2", "eps")
    ),
    Condition(
        "precision.gradients", lambda run: run.precision.weights != "fp32", "precision.weights is bf16_*"
    ),
    Condition("optim.state", lambda run: run.optim.kind == "adamw", "optim.kind=adamw"),
    Condition("optim.momentum", lambda run: run.optim.kind == "muon", "optim.kind=muon"),
    Condition("optim.trust_coefficient", lambda run: run.optim.kind == "lars", "optim.kind=lars"),
    Condition("optim.weight_decay_on", lambda run: run.optim.weight_decay != 0, "weight_decay is not 0"),
    *(
        Condition(f"resilience.{name}", has_watched_ranks, "there are several ranks")
        for name in (
            *("step_timeout_seconds", "start_timeout_seconds", "save_timeout_seconds"),
            *("evaluate_timeout_seconds", "hang_factor", "restart.max_restarts"),
        )
    ),
    *(
        Condition(
            f"resilience.restart.{name}",
            lambda run: has_watched_ranks(run) and run.resilience.restart.max_restarts > 0,
            "there are several ranks and max_restarts > 0",
        )
        for name in ("max_cycles_without_progress", "backoff_seconds", "max_backoff_seconds")
    ),
    Condition(
        "resilience.straggler_factor", lambda run: run.parallel.num_ranks > 1, "there are several ranks"
    ),
    Condition(
        "resilience.restart.single_rank", lambda run: run.parallel.num_ranks == 1, "the run has one rank"
    ),
    Condition(
        "resilience.compare_replicas_every_steps",
        lambda run: run.parallel.dp_replicate > 1,
        "dp_replicate > 1",
    ),
    *(
        Condition(
            f"resilience.bad_steps.{name}",
            lambda run: run.resilience.bad_steps.action != "stop",
            "bad_steps.action is skip or rollback",
        )
        for name in ("spike_factor", "loss_spike_factor", "max_in_a_row")
    ),
    Condition("schedule.decay_steps", lambda run: run.schedule.kind == "wsd", "schedule.kind=wsd"),
    Condition(
        "schedule.min_lr_ratio",
        lambda run: run.schedule.kind in ("cosine", "linear", "wsd"),
        "schedule.kind is cosine, linear or wsd",
    ),
    Condition("model.moe.top_groups", _has_groups, "num_groups > 1"),
    Condition("model.moe.group_score", _has_groups, "num_groups > 1"),
    Condition(
        "model.rope.scaling.original_positions",
        lambda run: _scaling(run) in ("llama3", "yarn"),
        "scaling.kind is llama3 or yarn",
    ),
    *(
        Condition(f"model.rope.scaling.{name}", lambda run: _scaling(run) == "llama3", "scaling.kind=llama3")
        for name in ("low_frequency_factor", "high_frequency_factor")
    ),
    *(
        Condition(f"model.rope.scaling.{name}", lambda run: _scaling(run) == "yarn", "scaling.kind=yarn")
        for name in ("beta_fast", "beta_slow", "mscale", "mscale_all_dims")
    ),
]


def settings_have_effect(run: RunSpec) -> Violations:
    """A setting that has no effect, given the others, is refused rather than ignored."""
    yield from without_effect(run, CONDITIONS)


def without_effect(run: RunSpec, conditions: list[Condition]) -> Violations:
    """Settings whose condition does not hold."""
    for condition in conditions:
        value, default = _value_and_default(run, condition.key)
        if value != default and not condition.has_effect(run):
            fact = f"{condition.key}={value} has no effect unless {condition.text}"
            yield SpecError(fact, where=condition.key, hint=f"leave it at its default, {default}")


def _value_and_default(run: RunSpec, key: str) -> tuple[Any, Any]:
    """The value at a dotted key and its default; both None where the spec that holds it is absent."""
    *parents, name = key.split(".")
    holder: Any = run
    for parent in parents:
        holder = getattr(holder, parent)
        if holder is None:
            return None, None
    return getattr(holder, name), _default(cast(type[Spec], type(holder)), name)


@cache
def _default(spec: type[Spec], name: str) -> Any:
    return spec.model_fields[name].default
