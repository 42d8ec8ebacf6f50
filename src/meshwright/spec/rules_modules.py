"""Rules for modules that are not ours, asked before anything is built.

Those that read only fields that a run and these specs have in common are the run's own rules.
"""

from collections.abc import Callable, Iterator
from typing import TypeVar, cast

from meshwright.errors import SpecError, SpecErrors
from meshwright.spec.modules import FitSpec, LoopSpec, ModuleSpec
from meshwright.spec.rules_memory import offloaded_states_exist, saved_tensors_are_used_once
from meshwright.spec.rules_parallel import (
    schedule_fits_virtual_stages,
    split_backward_reduces_last,
    split_backward_runs_once,
    zero_has_ranks_to_share,
)
from meshwright.spec.rules_run import (
    CONDITIONS,
    averages_forget,
    loss_scale_goes_with_fp16,
    loss_scale_moves_the_right_way,
    schedule_fits_steps,
    tf32_needs_cuda,
    without_effect,
    wsd_has_a_decay,
)
from meshwright.spec.run import RunSpec

Violations = Iterator[SpecError]
AnySpec = TypeVar("AnySpec", bound=ModuleSpec)
SHARED_RULES = [
    zero_has_ranks_to_share,
    schedule_fits_virtual_stages,
    split_backward_runs_once,
    saved_tensors_are_used_once,
    loss_scale_goes_with_fp16,
    loss_scale_moves_the_right_way,
    tf32_needs_cuda,
]
SHARED_FIT_RULES = [
    split_backward_reduces_last,
    schedule_fits_steps,
    wsd_has_a_decay,
    averages_forget,
    offloaded_states_exist,
]
# Their conditions read the model or the tokens of a run; they are refused elsewhere.
_OF_A_RUN = ("parallel.etp", "precision.gradients", "memory.on_oom")


def axes_are_known(spec: ModuleSpec) -> Violations:
    """No module says where its experts are; whether tp, cp and pp can cut it is seen on the module itself."""
    parallel = spec.parallel
    if parallel.ep > 1:
        fact = f"ep={parallel.ep} for a module that is not ours: nobody has said where its experts are"
        hint = "use ep=1, with dp_shard and zero=3 for large modules"
        yield SpecError(fact, where="parallel.ep", hint=hint)
    if parallel.pp > 1 and parallel.cp > 1:
        fact = f"pp={parallel.pp} with cp={parallel.cp} for a module that is not ours"
        yield SpecError(fact, where="parallel.cp", hint="use cp=1, or cp with tp and zero=3")


def module_settings_have_effect(spec: ModuleSpec) -> Violations:
    """A setting that would do nothing, given the others, is refused rather than ignored."""
    parts = type(spec).model_fields
    known = [one for one in CONDITIONS if one.key.split(".")[0] in parts and one.key not in _OF_A_RUN]
    yield from without_effect(cast(RunSpec, spec), known)
    if spec.checkpoint.start_from is not None:
        fact = "checkpoint.start_from reads weights of models of ours only"
        hint = "load the weights into the module before you hand it over"
        yield SpecError(fact, where="checkpoint.start_from", hint=hint)


def offload_knows_its_blocks(spec: ModuleSpec) -> Violations:
    """Offload of parameters knows the blocks of models of ours only."""
    if "parameters" in spec.memory.offload:
        fact = "parameters are offloaded from blocks of our own models only"
        yield SpecError(fact, where="memory.offload", hint="offload optimizer or activations, or use zero=3")


def cuts_are_plain(spec: ModuleSpec) -> Violations:
    """What tp and cp can do besides, in models of ours, they do not where layers are not ours."""
    if spec.parallel.tp > 1 and spec.memory.regather:
        fact = "memory.regather for a module that is not ours: its activations are whole on every tp rank"
        yield SpecError(fact, where="memory.regather", hint="leave it out")
    for axis in ("tp", "cp"):
        degree = getattr(spec.parallel, axis)
        if degree > 1 and spec.compile:
            fact = f"compile with {axis}={degree} for a module that is not ours, whose layers are changed"
            yield SpecError(fact, where="compile", hint=f"use compile=False, or {axis}=1")


def weights_are_fp32(spec: ModuleSpec) -> Violations:
    """16 bits for weights and gradients, and fp8, know the layers of models of ours only."""
    precision = spec.precision
    said = {"weights": precision.weights, "gradients": precision.gradients}
    for name, value in said.items():
        if value != "fp32":
            fact = f"precision.{name}={value} for a module that is not ours"
            yield SpecError(fact, where=f"precision.{name}", hint=f"leave precision.{name} at fp32")
    if precision.fp8 is not None:
        fact = (
            f"fp8={precision.fp8.recipe} for a module that is not ours: nobody has said which layers bear it"
        )
        yield SpecError(fact, where="precision.fp8", hint="use precision.compute=bf16")


def samples_are_cut_evenly(spec: FitSpec) -> Violations:
    """The global batch is a whole number of micro-batches on every data-parallel rank."""
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
            f"schedule={parallel.schedule} needs {parallel.num_stages} micro-batches for as many stages, "
            f"and has {count}"
        )
        smallest = parallel.num_stages * spec.microbatch_samples * parallel.dp
        yield SpecError(fact, where="data.batch_samples", hint=f"use data.batch_samples={smallest} or more")


def noise_scale_weighs_tokens(spec: FitSpec) -> Violations:
    """The noise scale leaves out a part of a batch by loss weights, which models of ours take."""
    if spec.observe.noise_scale is not None:
        fact = "observe.noise_scale for a module that is not ours, whose loss has no weights"
        yield SpecError(fact, where="observe.noise_scale", hint="set observe.noise_scale=null")


def loop_has_one_pass(spec: LoopSpec) -> Violations:
    """A loop of your own calls the module itself, so nothing can pass micro-batches between stages."""
    if spec.parallel.pp > 1:
        fact = f"pp={spec.parallel.pp} in a loop of your own, which calls the whole module"
        yield SpecError(fact, where="parallel.pp", hint="use meshwright.fit, which runs the schedule")
    if spec.parallel.cp > 1:
        fact = f"cp={spec.parallel.cp} in a loop of your own, which calls the module on whole sequences"
        yield SpecError(fact, where="parallel.cp", hint="use meshwright.fit, which cuts batches")


def offloaded_optimizer_is_ours(spec: LoopSpec) -> Violations:
    """States of an optimizer that the loop brings stay where it keeps them."""
    if spec.optim is None and "optimizer" in spec.memory.offload:
        fact = "offload=optimizer for an optimizer that the loop brings"
        yield SpecError(
            fact, where="memory.offload", hint="leave it out, or use an optimizer of ours (optim)"
        )


def limits_are_said_once(spec: LoopSpec) -> Violations:
    """With an update rule of ours, clipping and averaging are part of it."""
    for name in ("max_grad_norm", "ema_decay"):
        if spec.optim is not None and getattr(spec, name) is not None:
            fact = f"{name}={getattr(spec, name):g} beside an optim that has its own"
            yield SpecError(fact, where=name, hint=f"set optim.{name}")


MODULE_RULES = [
    axes_are_known,
    weights_are_fp32,
    offload_knows_its_blocks,
    cuts_are_plain,
    module_settings_have_effect,
]
FIT_RULES = [samples_are_cut_evenly, samples_fill_schedule, noise_scale_weighs_tokens]
LOOP_RULES = [loop_has_one_pass, offloaded_optimizer_is_ours, limits_are_said_once]


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
    """The spec itself, when no rule is broken."""
    violations = check_module(spec)
    if violations:
        raise SpecErrors(violations)
    return spec
