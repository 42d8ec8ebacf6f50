"""Rules about recompute, offload and regather, and what they can be combined with."""

from collections.abc import Iterator

from meshwright.errors import SpecError
from meshwright.spec.adapter import EMBEDDING, is_trained
from meshwright.spec.rules_parallel import SPLIT_BACKWARD
from meshwright.spec.run import RunSpec

Violations = Iterator[SpecError]


def offloaded_states_exist(run: RunSpec) -> Violations:
    """Offload of the optimizer needs an optimizer with states of the size of the parameters."""
    if "optimizer" in run.memory.offload and run.optim.is_stateless:
        fact = f"optim.kind={run.optim.kind} with beta1=0 has no state to offload"
        yield SpecError(fact, where="memory.offload", hint="remove optimizer from it")


def offloaded_parameters_fit_zero(run: RunSpec) -> Violations:
    """Offload of parameters needs zero=0, or zero=3 with the optimizer offloaded too and no pipeline."""
    if "parameters" not in run.memory.offload:
        return
    where, zero = "memory.offload", run.parallel.zero
    if zero in (1, 2):
        fact = f"zero={zero} gathers all parameters after the update, so all would be on the device at once"
        yield SpecError(fact, where=where, hint="use parallel.zero=3, or zero=0")
    if zero == 3 and "optimizer" not in run.memory.offload:
        fact = "with zero=3 shards and gradients are on the host, so optimizer states must be there too"
        yield SpecError(fact, where=where, hint="set memory.offload=optimizer,parameters")
    if zero == 3 and run.parallel.pp > 1:
        fact = f"pp={run.parallel.pp} with zero=3 keeps gathered parameters on the device for the full step"
        yield SpecError(fact, where=where, hint="remove parameters from it, or use pp=1")
    if zero == 0 and run.optim.ema_decay is not None:
        fact = "the average of the weights (optim.ema_decay) reads all of them after every step"
        yield SpecError(fact, where=where, hint="set optim.ema_decay=null, or remove parameters from it")


def offloaded_embedding_is_only_read(run: RunSpec) -> Violations:
    """A token table in host memory is read by row: it is frozen, not the head's, and not sharded."""
    if "embedding" not in run.memory.offload:
        return
    reasons = {
        "a tied head, which multiplies by the full table": run.model.tied_head,
        "a table that is trained": is_trained(EMBEDDING, run.adapter, run.train_only),
        f"tp={run.parallel.tp}, which shards the table": run.parallel.tp > 1,
        "zero=3, which shards the table": run.parallel.zero == 3,
    }
    for reason, is_so in reasons.items():
        if is_so:
            fact = f"offload of embedding with {reason}"
            yield SpecError(fact, where="memory.offload", hint="remove embedding from it")


def saved_tensors_are_used_once(run: RunSpec) -> Violations:
    """Split-backward schedules read saved tensors twice, so these can be neither offloaded nor regathered."""
    kind, memory = run.parallel.schedule, run.memory
    if run.parallel.pp == 1 or kind not in SPLIT_BACKWARD:
        return
    hint = "use parallel.schedule=interleaved_1f1b or 1f1b"
    for what in ("parameters", "activations"):
        if what in memory.offload:
            fact = f"schedule={kind} splits the backward: {what} would be copied from the host twice"
            yield SpecError(fact, where="memory.offload", hint=hint)
    if memory.regather_tp_inputs:
        fact = f"schedule={kind} splits the backward: inputs would be gathered again for each part"
        yield SpecError(fact, where="memory.regather_tp_inputs", hint=hint)


def regather_frees_saved_inputs(run: RunSpec) -> Violations:
    """Regather frees inputs that autograd saves, which it does not with recompute, fp8 or compile."""
    if not run.memory.regather_tp_inputs:
        return
    if run.memory.recompute != "none":
        fact = f"recompute={run.memory.recompute} already gathers the inputs again"
        yield SpecError(fact, where="memory.regather_tp_inputs", hint="set memory.regather_tp_inputs=false")
    if run.precision.fp8 is not None:
        fact = "fp8 matmuls save their inputs in fp8"
        yield SpecError(fact, where="memory.regather_tp_inputs", hint="set memory.regather_tp_inputs=false")
    if run.compile:
        fact = "in a compiled block the compiler chooses the saved tensors"
        hint = "set memory.regather_tp_inputs=false, or compile=false"
        yield SpecError(fact, where="memory.regather_tp_inputs", hint=hint)


MEMORY_RULES = [
    offloaded_states_exist,
    offloaded_parameters_fit_zero,
    offloaded_embedding_is_only_read,
    saved_tensors_are_used_once,
    regather_frees_saved_inputs,
]
