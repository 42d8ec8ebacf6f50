"""Rules about precision, optimizer, schedule and resilience."""

from collections.abc import Iterator
from fnmatch import fnmatchcase

from meshwright.errors import SpecError
from meshwright.spec.adapter import NF4_FORMATS, is_trained
from meshwright.spec.conditions import settings_have_effect
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
    base = None if run.adapter is None else run.adapter.base
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
        f"adapter.base={base}": base in ("fp8", *NF4_FORMATS),
        "observe.histograms, whose hooks a graph does not call": run.observe.histograms is not None,
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


def replay_is_deterministic(run: RunSpec) -> Violations:
    """A replayed step is compared bit for bit, so its kernels always have the same result."""
    if run.resilience.replay is None:
        return
    if not run.deterministic:
        fact = "resilience.replay without deterministic=true: kernels may sum in another order each time"
        hint = "set deterministic=true, or resilience.replay=null"
        yield SpecError(fact, where="resilience.replay", hint=hint)
    if run.cuda_graphs:
        fact = "resilience.replay with cuda_graphs=true, which is not tested"
        yield SpecError(fact, where="resilience.replay", hint="leave cuda_graphs out")


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
    replay_is_deterministic,
    settings_have_effect,
]
