"""Rules about the datasets of a run and its batches."""

from collections.abc import Iterator, Sequence

from meshwright.errors import SpecError
from meshwright.spec.data import MAX_BLEND_PERIOD, BlendPartSpec, exact_shares
from meshwright.spec.run import RunSpec

Violations = Iterator[SpecError]


def one_source_of_data(run: RunSpec) -> Violations:
    """Exactly one of `data.path`, `data.synthetic` and `data.blend` is set."""
    data = run.data
    if data.path is None and data.synthetic is None and not data.blend:
        hint = "set data.path to a packed dataset, data.synthetic={} for a generated corpus, or data.blend"
        yield SpecError("neither data.path, data.synthetic nor data.blend is set", where="data", hint=hint)
    if data.path is not None and data.synthetic is not None:
        fact = f"both data.path={data.path!r} and data.synthetic are set"
        yield SpecError(fact, where="data.synthetic", hint="set data.synthetic=null or data.path=null")
    if data.blend and (data.path is not None or data.synthetic is not None):
        name = "path" if data.path is not None else "synthetic"
        hint = f"set data.{name}=null, and list the dataset in data.blend"
        yield SpecError(f"both data.blend and data.{name} are set", where=f"data.{name}", hint=hint)


def blend_is_valid(run: RunSpec) -> Violations:
    """`data.blend` has two or more datasets, each with one source, and weights of a few digits."""
    data = run.data
    if not data.blend:
        return
    if len(data.blend) == 1:
        fact, hint = "one dataset, whose weight has no effect", "set data.path to it, or list another one"
        yield SpecError(fact, where="data.blend", hint=hint)
    yield from _parts_have_one_source(data.blend)
    yield from _can_be_planned([part.weight for part in data.blend], "data.blend")
    if data.max_epochs is not None:
        fact = f"max_epochs={data.max_epochs} with data.blend: each dataset has epochs of its own"
        hint = "leave data.max_epochs out, and set `repeat` of each dataset to its number of epochs"
        yield SpecError(fact, where="data.max_epochs", hint=hint)


def curriculum_is_in_order(run: RunSpec) -> Violations:
    """The parts of `data.curriculum` are in the order of steps, end before the run, and have all weights."""
    data, begin = run.data, 0
    if not data.blend:
        return
    for index, part in enumerate(data.curriculum):
        where = f"data.curriculum.{index}"
        if part.before_step <= begin:
            fact = f"before_step={part.before_step} after a part that ends at {begin}: this part has no steps"
            yield SpecError(fact, where=f"{where}.before_step", hint="list the parts in order of their steps")
        if part.before_step >= run.schedule.num_steps:
            fact = f"before_step={part.before_step} with num_steps={run.schedule.num_steps}"
            hint = f"use less than {run.schedule.num_steps}, or make these the weights of data.blend"
            yield SpecError(f"{fact}: the blend's own weights are never used", where=where, hint=hint)
        if len(part.weights) != len(data.blend):
            fact = f"{len(part.weights)} weights for {len(data.blend)} datasets"
            hint = "give each dataset a weight; 0 leaves one out"
            yield SpecError(fact, where=f"{where}.weights", hint=hint)
        else:
            yield from _can_be_planned(part.weights, f"{where}.weights")
        begin = part.before_step


def whole_documents_are_separate(run: RunSpec) -> Violations:
    """`packing: whole` is for separate documents: joined ones would attend to each other."""
    if run.data.packing == "whole" and run.data.documents == "joined":
        hint = "use data.documents=separate, or data.packing=cut"
        yield SpecError("packing=whole with documents=joined", where="data.packing", hint=hint)


def batch_ramp_is_in_order(run: RunSpec) -> Violations:
    """The parts of `data.batch_ramp` are in the order of steps, end before the run, and change the batch."""
    data = run.data
    begins = [0, *(part.before_step for part in data.batch_ramp)]
    sizes = [*(part.batch_sequences for part in data.batch_ramp), data.batch_sequences]
    for index, (part, begin) in enumerate(zip(data.batch_ramp, begins, strict=False)):
        where = f"data.batch_ramp.{index}"
        if part.before_step <= begin:
            fact = f"before_step={part.before_step} after a part that ends at {begin}: this part has no steps"
            yield SpecError(fact, where=f"{where}.before_step", hint="list the parts in order of their steps")
        if part.before_step >= run.schedule.num_steps:
            fact = (
                f"before_step={part.before_step} with num_steps={run.schedule.num_steps}: the ramp never ends"
            )
            hint = f"use less than {run.schedule.num_steps}"
            yield SpecError(fact, where=f"{where}.before_step", hint=hint)
        if part.batch_sequences == sizes[index + 1]:
            fact = f"batch_sequences={part.batch_sequences} is the same as in the steps after this part"
            yield SpecError(
                fact, where=f"{where}.batch_sequences", hint="use another size, or remove this part"
            )


def one_kind_of_holdout(run: RunSpec) -> Violations:
    """Sequences are held out at the end or by a hash, not both; pairs only at the end."""
    data = run.data
    if data.holdout is None:
        return
    if data.holdout_sequences:
        fact = f"both holdout_sequences={data.holdout_sequences} and data.holdout are set"
        yield SpecError(fact, where="data.holdout", hint="leave one of them out")
    if run.preference is not None:
        hint = "use data.holdout_sequences, which keeps the last sequences"
        yield SpecError("data.holdout with preference pairs", where="data.holdout", hint=hint)


def data_on_device_is_plain(run: RunSpec) -> Violations:
    """Data on the device has no corrupt samples to replace, and no preference pairs."""
    data = run.data
    if data.on_device_bytes and data.max_bad_samples:
        fact = (
            f"max_bad_samples={data.max_bad_samples} with on_device_bytes: all samples are read at the start"
        )
        hint = "leave max_bad_samples out: a corrupt sample is then named at the start"
        yield SpecError(fact, where="data.max_bad_samples", hint=hint)
    if data.on_device_bytes and run.preference is not None:
        fact = "on_device_bytes with preference pairs, whose reference log-probs are on the host"
        yield SpecError(fact, where="data.on_device_bytes", hint="leave it out")


def evaluation_has_data(run: RunSpec) -> Violations:
    """Evaluation needs held-out sequences."""
    if run.observe.evaluate is not None and not run.data.has_holdout:
        hint = "set data.holdout_sequences or data.holdout, or observe.evaluate=null"
        fact = "observe.evaluate without held-out sequences has nothing to evaluate on"
        yield SpecError(fact, where="data.holdout_sequences", hint=hint)


def _parts_have_one_source(blend: tuple[BlendPartSpec, ...]) -> Violations:
    for index, part in enumerate(blend):
        if (part.path is None) == (part.synthetic is None):
            is_empty = part.path is None
            fact = "neither path nor synthetic is set" if is_empty else "both path and synthetic are set"
            yield SpecError(fact, where=f"data.blend.{index}", hint="set exactly one of them")


def _can_be_planned(weights: Sequence[float], where: str) -> Violations:
    if not any(weights):
        yield SpecError("all weights are 0", where=where, hint="give at least one dataset a weight")
    elif (period := sum(exact_shares(weights))) > MAX_BLEND_PERIOD:
        fact = f"weights {', '.join(f'{one:g}' for one in weights)} repeat after {period} samples only"
        hint = f"round them to a few digits: at most {MAX_BLEND_PERIOD} samples are planned"
        yield SpecError(fact, where=where, hint=hint)


DATA_RULES = [
    one_source_of_data,
    blend_is_valid,
    curriculum_is_in_order,
    whole_documents_are_separate,
    batch_ramp_is_in_order,
    one_kind_of_holdout,
    data_on_device_is_plain,
    evaluation_has_data,
]
