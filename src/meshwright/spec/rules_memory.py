"""Rules about what trades seconds for bytes, and what it goes together with."""

from collections.abc import Iterator

from meshwright.errors import SpecError
from meshwright.spec.rules_parallel import SPLIT_BACKWARD
from meshwright.spec.run import RunSpec

Violations = Iterator[SpecError]


def offloaded_states_exist(run: RunSpec) -> Violations:
    """Offload of the optimizer needs an optimizer with states of the size of the parameters."""
    if "optimizer" in run.memory.offload and run.optim.keeps_nothing:
        fact = f"optim.kind={run.optim.kind} with beta1=0 keeps no state that offload could move"
        yield SpecError(fact, where="memory.offload", hint="leave optimizer out of it")


def offloaded_parameters_come_alone(run: RunSpec) -> Violations:
    """Offload of parameters goes with zero=0, or with zero=3, the optimizer there too, and no pipeline."""
    if "parameters" not in run.memory.offload:
        return
    where, zero = "memory.offload", run.parallel.zero
    if zero in (1, 2):
        fact = (
            f"zero={zero} gathers all parameters after the update, so they would lie on the device together"
        )
        yield SpecError(fact, where=where, hint="use parallel.zero=3, or zero=0")
    if zero == 3 and "optimizer" not in run.memory.offload:
        fact = "with zero=3 shards and gradients are on the host, so the update and its states are there too"
        yield SpecError(fact, where=where, hint="set memory.offload=optimizer,parameters")
    if zero == 3 and run.parallel.pp > 1:
        fact = f"pp={run.parallel.pp} with zero=3 keeps gathered parameters on the device for the whole step"
        yield SpecError(fact, where=where, hint="leave parameters out of it, or use pp=1")
    if zero == 0 and run.optim.ema_decay is not None:
        fact = "the average of the weights (optim.ema_decay) reads all of them after every step"
        yield SpecError(fact, where=where, hint="set optim.ema_decay=null, or leave parameters out of it")


def saved_tensors_are_used_once(run: RunSpec) -> Violations:
    """Split-backward schedules ask twice for what a block saved, so it can neither move nor be regathered."""
    kind, memory = run.parallel.schedule, run.memory
    if run.parallel.pp == 1 or kind not in SPLIT_BACKWARD:
        return
    hint = "use parallel.schedule=interleaved_1f1b or 1f1b"
    for what in ("parameters", "activations"):
        if what in memory.offload:
            fact = f"schedule={kind} splits the backward: {what} would come from the host twice"
            yield SpecError(fact, where="memory.offload", hint=hint)
    if memory.regather:
        fact = f"schedule={kind} splits the backward: inputs would be gathered once more for each part"
        yield SpecError(fact, where="memory.regather", hint=hint)


def regather_has_something_to_drop(run: RunSpec) -> Violations:
    """regather drops what autograd would keep: not where recompute or the compiler decides what is kept."""
    if not run.memory.regather:
        return
    if run.memory.recompute != "none":
        fact = f"recompute={run.memory.recompute} gathers the inputs again anyway"
        yield SpecError(fact, where="memory.regather", hint="set memory.regather=false")
    if run.precision.fp8 is not None:
        fact = "fp8 products keep their inputs in their own format"
        yield SpecError(fact, where="memory.regather", hint="set memory.regather=false")
    if run.compile:
        fact = "a compiled block keeps what the compiler chooses"
        yield SpecError(fact, where="memory.regather", hint="set memory.regather=false, or compile=false")


MEMORY_RULES = [
    offloaded_states_exist,
    offloaded_parameters_come_alone,
    saved_tensors_are_used_once,
    regather_has_something_to_drop,
]
