"""Rules about precision, optimizer and schedule, and about settings without effect."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, cast

from meshwright.errors import SpecError
from meshwright.spec.adapter import is_trained
from meshwright.spec.base import Spec
from meshwright.spec.fp8 import EXPERT_RECIPES, FP8_MULTIPLE, fp8_experts, fp8_layers, fp8_weights
from meshwright.spec.optim import group_of
from meshwright.spec.rules_adapter import parameter_names
from meshwright.spec.run import RunSpec

Violations = Iterator[SpecError]


def loss_scale_needs_fp16(run: RunSpec) -> Violations:
    """`precision.loss_scale` is set exactly when computing in fp16."""
    precision = run.precision
    if precision.compute == "fp16" and precision.loss_scale is None:
        fact = "compute=fp16 without loss_scale: small gradients would underflow"
        yield SpecError(fact, where="precision.loss_scale", hint="add precision.loss_scale={}")
    if precision.compute != "fp16" and precision.loss_scale is not None:
        fact = f"loss_scale with compute={precision.compute} has no effect"
        hint = "set precision.loss_scale=null, or precision.compute=fp16"
        yield SpecError(fact, where="precision.loss_scale", hint=hint)


def loss_scale_moves_the_right_way(run: RunSpec) -> Violations:
    """The loss scale grows by a factor above one and backs off by a factor below one."""
    scale = run.precision.loss_scale
    if scale is not None and scale.growth_factor <= 1:
        fact = f"growth_factor={scale.growth_factor:g} does not grow"
        yield SpecError(fact, where="precision.loss_scale.growth_factor", hint="use more than 1, such as 2")
    if scale is not None and scale.backoff_factor >= 1:
        fact = f"backoff_factor={scale.backoff_factor:g} does not back off"
        yield SpecError(
            fact, where="precision.loss_scale.backoff_factor", hint="use less than 1, such as 0.5"
        )


def bf16_weights_compute_in_bf16(run: RunSpec) -> Violations:
    """Weights in bf16 are used in matmuls without a cast, so matmuls compute in bf16."""
    precision = run.precision
    if precision.weights != "fp32" and precision.compute != "bf16":
        fact = f"weights={precision.weights} with compute={precision.compute}"
        hint = "set precision.compute=bf16, or precision.weights=fp32"
        yield SpecError(fact, where="precision.weights", hint=hint)


def tf32_needs_cuda(run: RunSpec) -> Violations:
    """TF32 is a mode of NVIDIA tensor cores."""
    if run.precision.compute == "tf32" and run.device == "cpu":
        yield SpecError(
            "compute=tf32 on device=cpu", where="precision.compute", hint="use precision.compute=fp32"
        )


def fp8_needs_bf16(run: RunSpec) -> Violations:
    """fp8 linears need compute=bf16 for the other layers; fp64 is for proofs, where fp8 is emulated."""
    precision = run.precision
    if precision.fp8 is not None and precision.compute not in ("bf16", "fp64"):
        fact = f"fp8={precision.fp8.recipe} with compute={precision.compute}"
        yield SpecError(fact, where="precision.fp8", hint="set precision.compute=bf16")


def fp8_has_linears(run: RunSpec) -> Violations:
    """At least one linear or routed expert computes in fp8."""
    fp8, layers = run.precision.fp8, run.model.num_layers
    if fp8 is None:
        return
    if not fp8_layers(run):
        fact = f"bf16_layers_each_end={fp8.bf16_layers_each_end} of {layers} layers leaves no layer in fp8"
        hint = "use precision.fp8.bf16_layers_each_end=0, or precision.fp8=null"
        yield SpecError(fact, where="precision.fp8.bf16_layers_each_end", hint=hint)
    elif not any(fp8_weights(run, layer) or fp8_experts(run, layer) for layer in fp8_layers(run)):
        multiple = FP8_MULTIPLE[fp8.recipe]
        fact = f"fp8={fp8.recipe} finds no linear whose dims on a rank are multiples of {multiple}"
        yield SpecError(fact, where="precision.fp8", hint="use recipe=current, a smaller tp, or fp8=null")


def fp8_experts_have_kernels(run: RunSpec) -> Violations:
    """Experts in fp8 have a recipe with grouped matmuls, layers that are in fp8, and aligned dims."""
    fp8, moe, where = run.precision.fp8, run.model.moe, "precision.fp8.experts"
    if fp8 is None or not fp8.experts or moe is None or not fp8_layers(run):
        return
    if fp8.recipe not in EXPERT_RECIPES:
        fact = f"fp8.experts=true with recipe={fp8.recipe}, which has no grouped matmuls"
        yield SpecError(fact, where=where, hint="use precision.fp8.recipe=current or blockwise")
    elif not any(run.model.is_moe_layer(layer) for layer in fp8_layers(run)):
        fact = f"bf16_layers_each_end={fp8.bf16_layers_each_end} leaves no routed layer in fp8"
        hint = "use a smaller precision.fp8.bf16_layers_each_end, or precision.fp8.experts=false"
        yield SpecError(fact, where=where, hint=hint)
    elif not any(fp8_experts(run, layer) for layer in fp8_layers(run)):
        multiple, widths = FP8_MULTIPLE[fp8.recipe], f"{run.model.width} x {moe.width // run.parallel.etp}"
        fact = f"fp8.experts=true with experts of {widths} on a rank: not multiples of {multiple}"
        yield SpecError(fact, where=where, hint="use recipe=current, etp=1, or precision.fp8.experts=false")


def fp8_divides_tokens(run: RunSpec) -> Violations:
    """The tokens of a micro-batch on a rank, the contracted dim of weight gradients, are a multiple of the
    fp8 block."""
    fp8, data = run.precision.fp8, run.data
    if fp8 is None:
        return
    tokens = data.microbatch_sequences * data.sequence_length // run.parallel.cp
    if tokens % FP8_MULTIPLE[fp8.recipe]:
        fact = f"fp8={fp8.recipe} with {tokens} tokens of a micro-batch on a rank"
        multiple = f"a multiple of {FP8_MULTIPLE[fp8.recipe]}"
        hint = f"choose data.sequence_length and data.microbatch_sequences for {multiple}"
        yield SpecError(fact, where="precision.fp8", hint=hint)


def delayed_scaling_needs_weights_on_device(run: RunSpec) -> Violations:
    """Delayed scaling computes the amax of every weight after its update, so weights are not offloaded."""
    fp8 = run.precision.fp8
    if fp8 is not None and fp8.recipe == "delayed" and "parameters" in run.memory.offload:
        fact = "fp8=delayed with memory.offload=parameters"
        hint = "use precision.fp8.recipe=current or blockwise"
        yield SpecError(fact, where="precision.fp8.recipe", hint=hint)


def cached_fp8_weights_are_unsharded(run: RunSpec) -> Violations:
    """Cached fp8 weights are unsharded and on the device, which would undo ZeRO-3 and offload."""
    fp8, hint = run.precision.fp8, "use precision.fp8.cast_weights=per_microbatch"
    if fp8 is None or fp8.cast_weights != "per_step":
        return
    if run.parallel.zero == 3:
        yield SpecError(
            "fp8.cast_weights=per_step with zero=3", where="precision.fp8.cast_weights", hint=hint
        )
    if "parameters" in run.memory.offload:
        fact = "fp8.cast_weights=per_step with memory.offload=parameters"
        yield SpecError(fact, where="precision.fp8.cast_weights", hint=hint)


def cuda_graphs_hold_a_microbatch(run: RunSpec) -> Violations:
    """A CUDA graph holds kernels at fixed addresses: no collectives, host decisions or copies to the host."""
    if not run.cuda_graphs:
        return
    parallel, memory = run.parallel, run.memory
    degrees = {axis: getattr(parallel, axis) for axis in ("tp", "cp", "pp", "ep")}
    reasons = {
        "device=cpu": run.device == "cpu",
        **{f"{axis}={degree}": degree > 1 for axis, degree in degrees.items()},
        f"zero={parallel.zero}": parallel.zero > 1,
        f"recompute={memory.recompute}": memory.recompute != "none",
        "memory.offload": bool(memory.offload),
        "routed experts": run.model.moe is not None,
        "dropout": run.model.dropout > 0 or run.model.attention.dropout > 0,
        "precision.fp8": run.precision.fp8 is not None,
    }
    for fact in (text for text, holds in reasons.items() if holds):
        hint = "leave cuda_graphs out, or use dp with zero 0 or 1 on CUDA: nothing else has been proved"
        yield SpecError(f"cuda_graphs=true with {fact}", where="cuda_graphs", hint=hint)


def noise_scale_compares_parts(run: RunSpec) -> Violations:
    """The noise scale compares a batch with half of it, so every batch has two micro-batches or ranks."""
    counts = [count * run.parallel.dp for _, _, count in run.each_accumulation()]
    if run.observe.noise_scale is not None and min(counts) == 1:
        fact = (
            "observe.noise_scale with one micro-batch on one data-parallel rank: there is no half to compare"
        )
        hint = "use smaller data.microbatch_sequences, more data-parallel ranks, or observe.noise_scale=null"
        yield SpecError(fact, where="observe.noise_scale", hint=hint)


def schedule_fits_steps(run: RunSpec) -> Violations:
    """Warm-up and the final decay of wsd fit into the number of steps."""
    schedule = run.schedule
    decay = schedule.decay_steps if schedule.kind == "wsd" else 0
    if schedule.warmup_steps + decay > schedule.num_steps:
        parts = f"warmup_steps={schedule.warmup_steps}" + (f" and decay_steps={decay}" if decay else "")
        fact = f"{parts} do not fit into num_steps={schedule.num_steps}"
        yield SpecError(fact, where="schedule.warmup_steps", hint="use fewer, or raise schedule.num_steps")


def wsd_has_a_decay(run: RunSpec) -> Violations:
    """wsd ends with a decay; without one it is the constant schedule."""
    if run.schedule.kind == "wsd" and run.schedule.decay_steps == 0:
        steps = max(1, run.schedule.num_steps // 10)
        hint = f"set schedule.decay_steps, such as {steps}, or schedule.kind=constant"
        yield SpecError("kind=wsd with decay_steps=0", where="schedule.decay_steps", hint=hint)


def decays_are_valid(run: RunSpec) -> Violations:
    """Decays of moving averages are below one, and weight decay is not negative."""
    optim = run.optim
    averages = {name: getattr(optim, name) for name in ("beta1", "beta2", "momentum", "ema_decay")}
    for name, value in averages.items():
        if value is not None and value >= 1:
            fact = f"{name}={value:g} never includes a new value"
            yield SpecError(fact, where=f"optim.{name}", hint="use less than 1")
    if optim.weight_decay < 0:
        fact = f"weight_decay={optim.weight_decay:g} would grow the weights"
        yield SpecError(fact, where="optim.weight_decay", hint="use 0 or more")


def groups_have_parameters(run: RunSpec) -> Violations:
    """Every group of `optim.groups` changes a setting of parameters that no later group matches."""
    if not run.optim.groups:
        return
    names = [name for name in parameter_names(run) if is_trained(name, run.adapter, run.train_only)]
    group_by_name = {name: group_of(name, run.optim.groups) for name in names}
    for index, group in enumerate(run.optim.groups):
        where = f"optim.groups.{index}"
        matched = [name for name in names if fnmatchcase(name, group.pattern)]
        later = sorted({group_by_name[name] for name in matched} - {index, None}, key=str)
        if not matched:
            fact, hint = (
                f"pattern {group.pattern!r} matches no parameter",
                f"names are like {''.join(map(repr, names[1:2]))}",
            )
            yield SpecError(fact, where=f"{where}.pattern", hint=hint)
        elif all(group_by_name[name] != index for name in matched):
            fact = f"every parameter of pattern {group.pattern!r} is matched by the later groups {later}"
            yield SpecError(fact, where=f"{where}.pattern", hint="put the narrower pattern last")
        elif group.lr_factor == 1 and group.weight_decay is None:
            fact = f"the group of {group.pattern!r} changes nothing"
            yield SpecError(fact, where=where, hint="set its lr_factor or weight_decay, or remove it")
        elif group.weight_decay is not None and group.weight_decay < 0:
            fact = f"weight_decay={group.weight_decay:g} would grow the weights"
            yield SpecError(fact, where=f"{where}.weight_decay", hint="use 0 or more")


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


def rollback_has_checkpoints(run: RunSpec) -> Violations:
    """A rollback needs checkpoints during training."""
    if run.resilience.bad_steps.action == "rollback" and run.checkpoint.every_steps is None:
        fact = "bad_steps.action=rollback without checkpoints to go back to"
        hint = "set checkpoint.every_steps, or bad_steps.action=skip"
        yield SpecError(fact, where="resilience.bad_steps.action", hint=hint)


def elastic_ranks_can_change(run: RunSpec) -> Violations:
    """`resilience.elastic` lets the number of ranks change: fewer than the mesh has, or spares."""
    elastic, num_ranks = run.resilience.elastic, run.parallel.num_ranks
    if elastic is None:
        return
    if run.resilience.restart.max_restarts == 0:
        fact = "elastic with restart.max_restarts=0: ranks that are never restarted stay as many as they are"
        hint = "set resilience.restart.max_restarts above 0, or resilience.elastic=null"
        yield SpecError(fact, where="resilience.elastic", hint=hint)
    if elastic.min_ranks > num_ranks:
        fact = f"elastic.min_ranks={elastic.min_ranks} with a mesh of {num_ranks} ranks"
        hint = f"use 1 to {num_ranks}; the mesh in `parallel` is the largest"
        yield SpecError(fact, where="resilience.elastic.min_ranks", hint=hint)


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
    spec = cast(type[Spec], type(holder))
    return getattr(holder, name), spec.model_fields[name].default


RUN_RULES = [
    loss_scale_needs_fp16,
    loss_scale_moves_the_right_way,
    bf16_weights_compute_in_bf16,
    tf32_needs_cuda,
    fp8_needs_bf16,
    fp8_has_linears,
    fp8_experts_have_kernels,
    fp8_divides_tokens,
    delayed_scaling_needs_weights_on_device,
    cached_fp8_weights_are_unsharded,
    cuda_graphs_hold_a_microbatch,
    noise_scale_compares_parts,
    schedule_fits_steps,
    wsd_has_a_decay,
    decays_are_valid,
    groups_have_parameters,
    rollback_has_checkpoints,
    elastic_ranks_can_change,
    settings_have_effect,
]
