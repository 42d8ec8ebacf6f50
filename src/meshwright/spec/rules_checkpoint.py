"""Rules about checkpoints: settings that select none of them are refused."""

from collections.abc import Iterator

from meshwright.errors import SpecError
from meshwright.spec.run import RunSpec

Violations = Iterator[SpecError]
_OF_INTERVAL = ("asynchronous", "keep_every_steps", "keep_every_epochs", "keep_best")


def checkpoints_have_an_interval(run: RunSpec) -> Violations:
    """Settings about checkpoints during training need `checkpoint.every_steps`."""
    spec = run.checkpoint
    if spec.every_steps is not None:
        return
    for name in _OF_INTERVAL:
        value, default = getattr(spec, name), type(spec).model_fields[name].default
        if value != default:
            fact = f"checkpoint.{name}={value} has no effect: only the final state is saved"
            yield SpecError(fact, where=f"checkpoint.{name}", hint="set checkpoint.every_steps")


def kept_steps_are_saved(run: RunSpec) -> Violations:
    """`checkpoint.keep_every_steps` is a multiple of `checkpoint.every_steps`."""
    every, kept = run.checkpoint.every_steps, run.checkpoint.keep_every_steps
    if every is not None and kept is not None and kept % every:
        fact = f"keep_every_steps={kept}, and checkpoints are saved every {every} steps"
        hint = f"use a multiple of {every}"
        yield SpecError(fact, where="checkpoint.keep_every_steps", hint=hint)


def uploaded_steps_are_saved(run: RunSpec) -> Violations:
    """`checkpoint.upload.interval_steps` is a multiple of `checkpoint.every_steps`."""
    every, upload = run.checkpoint.every_steps, run.checkpoint.upload
    if upload is None or upload.interval_steps is None:
        return
    where = "checkpoint.upload.interval_steps"
    if every is None:
        fact = f"{where}={upload.interval_steps} has no effect: only the final state is saved"
        yield SpecError(fact, where=where, hint="set checkpoint.every_steps")
    elif upload.interval_steps % every:
        fact = f"upload.interval_steps={upload.interval_steps}, and checkpoints are saved every {every} steps"
        yield SpecError(fact, where=where, hint=f"use a multiple of {every}")


def local_checkpoints_are_more_frequent(run: RunSpec) -> Violations:
    """`checkpoint.every_steps` is a multiple of `checkpoint.local.save_every_steps`, at least 2 times."""
    every, local = run.checkpoint.every_steps, run.checkpoint.local
    if local is None:
        return
    where = "checkpoint.local.save_every_steps"
    if every is None:
        fact = "checkpoint.local alone: local checkpoints are lost with their machines"
        yield SpecError(fact, where=where, hint="set checkpoint.every_steps as well")
    elif every % local.save_every_steps or every == local.save_every_steps:
        fact = f"local.save_every_steps={local.save_every_steps}, and checkpoint.every_steps is {every}"
        hint = f"use a smaller number that divides {every}: local checkpoints fill the steps between"
        yield SpecError(fact, where=where, hint=hint)


def best_checkpoints_are_evaluated(run: RunSpec) -> Violations:
    """`checkpoint.keep_best` needs an evaluation at every step that is saved."""
    every, evaluate = run.checkpoint.every_steps, run.observe.evaluate
    if run.checkpoint.keep_best is None or every is None:
        return
    where = "checkpoint.keep_best"
    if evaluate is None:
        fact = "keep_best without evaluations: no checkpoint has an evaluation loss"
        yield SpecError(fact, where=where, hint=f"set observe.evaluate.every_steps={every}")
    elif every % evaluate.every_steps:
        fact = f"keep_best with an evaluation every {evaluate.every_steps} steps and a save every {every}"
        hint = f"let observe.evaluate.every_steps divide {every}: a checkpoint needs a loss of its own step"
        yield SpecError(fact, where=where, hint=hint)


def kept_epochs_are_of_one_dataset(run: RunSpec) -> Violations:
    """`checkpoint.keep_every_epochs` needs one dataset: those of a blend have epochs of their own."""
    if run.checkpoint.keep_every_epochs is not None and run.data.blend:
        fact = "keep_every_epochs with data.blend: each dataset has epochs of its own"
        yield SpecError(fact, where="checkpoint.keep_every_epochs", hint="use checkpoint.keep_every_steps")


CHECKPOINT_RULES = [
    checkpoints_have_an_interval,
    kept_steps_are_saved,
    uploaded_steps_are_saved,
    local_checkpoints_are_more_frequent,
    best_checkpoints_are_evaluated,
    kept_epochs_are_of_one_dataset,
]
