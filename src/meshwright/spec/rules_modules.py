"""Rules for user modules, checked before anything is built.

Rules that read only fields which a run and these specs have in common are the run's own rules.
"""

from collections.abc import Callable, Iterator
from typing import TypeVar, cast

from meshwright.errors import SpecError, SpecErrors
from meshwright.spec.conditions import CONDITIONS, without_effect
from meshwright.spec.modules import FitSpec, LoopSpec, ModuleSpec
from meshwright.spec.resilience import ResilienceSpec
from meshwright.spec.rules_checkpoint import (
    best_checkpoints_are_evaluated,
    checkpoints_have_an_interval,
    kept_steps_are_saved,
    uploaded_steps_are_saved,
)
from meshwright.spec.rules_memory import offloaded_states_exist, saved_tensors_are_used_once
from meshwright.spec.rules_parallel import (
    schedule_fits_virtual_stages,
    split_backward_reduces_last,
    split_backward_runs_once,
    zero_needs_sharding_ranks,
)
from meshwright.spec.rules_run import (
    decays_are_valid,
    loss_scale_moves_the_right_way,
    loss_scale_needs_fp16,
    schedule_fits_steps,
    tf32_needs_cuda,
    wsd_has_a_decay,
)
from meshwright.spec.run import RunSpec

Violations = Iterator[SpecError]
AnySpec = TypeVar("AnySpec", bound=ModuleSpec)
SHARED_RULES = [
    zero_needs_sharding_ranks,
    schedule_fits_virtual_stages,
    split_backward_runs_once,
    saved_tensors_are_used_once,
    loss_scale_needs_fp16,
    loss_scale_moves_the_right_way,
    tf32_needs_cuda,
    checkpoints_have_an_interval,
    kept_steps_are_saved,
    uploaded_steps_are_saved,
]
SHARED_FIT_RULES = [
    split_backward_reduces_last,
    schedule_fits_steps,
    wsd_has_a_decay,
    decays_are_valid,
    offloaded_states_exist,
    best_checkpoints_are_evaluated,
]
# Their conditions read the model or the tokens of a run, and other rules refuse them for user modules; or, as
# the timeouts, they are kept when the same script is run on one rank.
_RUN_ONLY = (
    *("parallel.etp", "precision.fp8.experts", "precision.gradients", "memory.on_oom", "data.curriculum"),
)


def axes_are_supported(spec: ModuleSpec) -> Violations:
    """User modules have no ep, and no pp with cp; tp, cp and pp are checked on the module itself."""
    parallel = spec.parallel
    if parallel.ep > 1:
        fact = f"ep={parallel.ep} for a user module: its experts are not known"
        hint = "use ep=1, with dp_shard and zero=3 for large modules"
        yield SpecError(fact, where="parallel.ep", hint=hint)
    if parallel.pp > 1 and parallel.cp > 1:
        fact = f"pp={parallel.pp} with cp={parallel.cp} for a user module"
        yield SpecError(fact, where="parallel.cp", hint="use cp=1, or cp with tp and zero=3")


def _is_run_only(key: str) -> bool:
    return key in _RUN_ONLY or (key.startswith("resilience.") and "bad_steps" not in key)


def module_settings_have_effect(spec: ModuleSpec) -> Violations:
    """A setting that has no effect, given the others, is refused rather than ignored."""
    fields = type(spec).model_fields
    known = [one for one in CONDITIONS if one.key.split(".")[0] in fields and not _is_run_only(one.key)]
    yield from without_effect(cast(RunSpec, spec), known)
    resilience = spec.resilience if isinstance(spec, FitSpec) else ResilienceSpec()
    for name in ("restart", "elastic"):
        if getattr(resilience, name) != getattr(ResilienceSpec(), name):
            fact = f"resilience.{name} is set, and only `meshwright train` restarts ranks"
            hint = "remove it; torchrun --max-restarts restarts a script, which resumes by itself"
            yield SpecError(fact, where=f"resilience.{name}", hint=hint)
    if resilience.data_retries != ResilienceSpec().data_retries:
        fact = "resilience.data_retries is set for a user module, whose batches are read when they are taken"
        yield SpecError(fact, where="resilience.data_retries", hint="remove it")
    if resilience.replay is not None:
        fact = "resilience.replay is set for a user module, whose random numbers and state are not known"
        hint = "set resilience.replay=null; compare_replicas_every_steps finds replicas that differ"
        yield SpecError(fact, where="resilience.replay", hint=hint)
    for name in ("start_from", "new_tokens"):
        if getattr(spec.checkpoint, name):
            fact = f"checkpoint.{name} reads weights of built-in families only"
            hint = "load the weights into the module before you pass it"
            yield SpecError(fact, where=f"checkpoint.{name}", hint=hint)


def parameters_are_not_offloaded(spec: ModuleSpec) -> Violations:
    """Offload of parameters and of the embedding supports built-in families only."""
    for what in ("parameters", "embedding"):
        if what in spec.memory.offload:
            fact = f"offload of {what} supports built-in families only"
            hint = "offload optimizer or activations, or use zero=3"
            yield SpecError(fact, where="memory.offload", hint=hint)


def tp_and_cp_are_plain(spec: ModuleSpec) -> Violations:
    """For user modules tp has no regather, cp has one stripe, and neither can be compiled."""
    if spec.parallel.cp_stripes > 1:
        fact = f"cp_stripes={spec.parallel.cp_stripes} for a user module, whose documents are joined"
        yield SpecError(fact, where="parallel.cp_stripes", hint="leave it out")
    if spec.parallel.tp > 1 and spec.memory.regather_tp_inputs:
        fact = "memory.regather_tp_inputs for a user module: its activations are unsharded on every tp rank"
        yield SpecError(fact, where="memory.regather_tp_inputs", hint="leave it out")
    for axis in ("tp", "cp"):
        degree = getattr(spec.parallel, axis)
        if degree > 1 and spec.compile:
            fact = f"compile with {axis}={degree} for a user module, whose layers are wrapped"
            yield SpecError(fact, where="compile", hint=f"use compile=False, or {axis}=1")


def weights_are_fp32(spec: ModuleSpec) -> Violations:
    """bf16 weights and gradients, and fp8, support built-in families only."""
    precision = spec.precision
    dtypes = {"weights": precision.weights, "gradients": precision.gradients}
    for name, value in dtypes.items():
        if value != "fp32":
            fact = f"precision.{name}={value} for a user module"
            yield SpecError(fact, where=f"precision.{name}", hint=f"leave precision.{name} at fp32")
    if precision.fp8 is not None:
        fact = f"fp8={precision.fp8.recipe} for a user module: which of its layers tolerate fp8 is not known"
        yield SpecError(fact, where="precision.fp8", hint="use precision.compute=bf16")


def samples_are_split_evenly(spec: FitSpec) -> Violations:
    """The global batch is a multiple of one micro-batch on every data-parallel rank."""
    data, dp = spec.data, spec.parallel.dp
    unit = spec.microbatch_samples * dp
    if data.batch_samples % unit:
        below = data.batch_samples // unit * unit
        choices = f"{below} or {below + unit}" if below else f"{unit}"
        fact = (
            f"batch_samples={data.batch_samples} is not a multiple of "
            f"microbatch_samples x dp = {spec.microbatch_samples} x {dp} = {unit}"
        )
        yield SpecError(fact, where="data.batch_samples", hint=f"use data.batch_samples={choices}")


def samples_fill_schedule(spec: FitSpec) -> Violations:
    """1f1b and dualpipev need as many micro-batches as stages."""
    parallel, count = spec.parallel, spec.accumulation
    if parallel.pp > 1 and parallel.schedule in ("1f1b", "dualpipev") and count < parallel.num_stages:
        fact = (
            f"schedule={parallel.schedule} with {parallel.num_stages} stages needs as many micro-batches, "
            f"and has {count}"
        )
        smallest = parallel.num_stages * spec.microbatch_samples * parallel.dp
        yield SpecError(fact, where="data.batch_samples", hint=f"use data.batch_samples={smallest} or more")


def samples_on_device_are_read_by_all(spec: FitSpec) -> Violations:
    """Samples that stay on the device are read once at the start, by each rank."""
    if spec.data.on_device and spec.data.readers == "one":
        fact = "readers=one with on_device: every rank reads all samples at the start"
        yield SpecError(fact, where="data.readers", hint="leave readers out, or on_device")


def noise_scale_needs_loss_weights(spec: FitSpec) -> Violations:
    """The noise scale masks a part of a batch by loss weights, which only built-in families have."""
    if spec.observe.noise_scale is not None:
        fact = "observe.noise_scale for a user module, whose loss has no weights"
        yield SpecError(fact, where="observe.noise_scale", hint="set observe.noise_scale=null")


def histograms_know_the_matmuls(spec: FitSpec) -> Violations:
    """Histograms have one row for each matmul of a block, which only built-in families name."""
    if spec.observe.histograms is not None:
        fact = "observe.histograms for a user module, whose matmuls have no known names"
        yield SpecError(fact, where="observe.histograms", hint="set observe.histograms=null")


def loop_calls_full_module(spec: LoopSpec) -> Violations:
    """A user's own loop calls the full module on full sequences, so it has no pp and no cp."""
    if spec.parallel.pp > 1:
        fact = f"pp={spec.parallel.pp} in a loop of your own, which calls the full module"
        yield SpecError(fact, where="parallel.pp", hint="use meshwright.fit, which runs the schedule")
    if spec.parallel.cp > 1:
        fact = f"cp={spec.parallel.cp} in a loop of your own, which calls the module on full sequences"
        yield SpecError(fact, where="parallel.cp", hint="use meshwright.fit, which shards batches")


def offloaded_optimizer_is_built_in(spec: LoopSpec) -> Violations:
    """Only the states of built-in optimizers (`optim`) can be offloaded."""
    if spec.optim is None and "optimizer" in spec.memory.offload:
        fact = "offload=optimizer with a torch optimizer of the loop"
        yield SpecError(
            fact, where="memory.offload", hint="leave it out, or use a built-in optimizer (optim)"
        )


def loop_has_no_evaluation(spec: LoopSpec) -> Violations:
    """A user's own loop evaluates by itself, so no checkpoint has an evaluation loss."""
    if spec.checkpoint.keep_best is not None:
        fact = "keep_best in a loop of your own, whose checkpoints have no evaluation loss"
        yield SpecError(fact, where="checkpoint.keep_best", hint="use checkpoint.keep_every_steps")


def clipping_and_ema_are_set_once(spec: LoopSpec) -> Violations:
    """With a built-in optimizer, clipping and weight averaging are set in `optim`."""
    for name in ("max_grad_norm", "ema_decay"):
        if spec.optim is not None and getattr(spec, name) is not None:
            fact = f"{name}={getattr(spec, name):g} together with optim, which has its own {name}"
            yield SpecError(fact, where=name, hint=f"set optim.{name}")


MODULE_RULES = [
    axes_are_supported,
    weights_are_fp32,
    parameters_are_not_offloaded,
    tp_and_cp_are_plain,
    module_settings_have_effect,
]
FIT_RULES = [
    samples_are_split_evenly,
    samples_fill_schedule,
    samples_on_device_are_read_by_all,
    noise_scale_needs_loss_weights,
    histograms_know_the_matmuls,
]
LOOP_RULES = [
    loop_calls_full_module,
    offloaded_optimizer_is_built_in,
    loop_has_no_evaluation,
    clipping_and_ema_are_set_once,
]


def check_module(spec: ModuleSpec) -> list[SpecError]:
    """Every violation of every rule; empty when training can start."""
    found = [violation for rule in MODULE_RULES for violation in rule(spec)]
    found += _by_run_rules(SHARED_RULES, spec)
    if isinstance(spec, FitSpec):
        found += _by_run_rules(SHARED_FIT_RULES, spec)
        found += [violation for rule in FIT_RULES for violation in rule(spec)]
    if isinstance(spec, LoopSpec):
        found += [violation for rule in LOOP_RULES for violation in rule(spec)]
    return found


def _by_run_rules(rules: list[Callable[[RunSpec], Violations]], spec: ModuleSpec) -> list[SpecError]:
    return [violation for rule in rules for violation in rule(cast(RunSpec, spec))]


def require_valid_module(spec: AnySpec) -> AnySpec:
    """The spec itself if no rule is broken; SpecErrors otherwise."""
    violations = check_module(spec)
    if violations:
        raise SpecErrors(violations)
    return spec
