"""Rules about training on preference pairs."""

from collections.abc import Iterator

from meshwright.errors import SpecError
from meshwright.spec.run import RunSpec

Violations = Iterator[SpecError]


def pairs_are_packed_whole(run: RunSpec) -> Violations:
    """`preference` reads one packed dataset of pairs, in complete pairs."""
    if run.preference is None:
        return
    data = run.data
    if data.path is None:
        hint = "pack pairs with `meshwright data pack --chat preference`, and set data.path"
        yield SpecError("preference without data.path has no pairs to train on", where="data.path", hint=hint)
    if data.packing != "whole":
        fact = f"preference with data.packing={data.packing} would cut pairs"
        yield SpecError(fact, where="data.packing", hint="set data.packing=whole")
    if data.max_bad_samples:
        fact = f"max_bad_samples={data.max_bad_samples}: a pair has no substitute of the same weight"
        yield SpecError(fact, where="data.max_bad_samples", hint="set data.max_bad_samples=0")


def preference_settings_have_effect(run: RunSpec) -> Violations:
    """Label smoothing is for the sigmoid loss and below 0.5, a margin for SimPO."""
    preference = run.preference
    if preference is None:
        return
    if preference.label_smoothing and preference.loss != "sigmoid":
        fact = f"label_smoothing={preference.label_smoothing:g} has no effect on loss={preference.loss}"
        yield SpecError(fact, where="preference.label_smoothing", hint="set it to 0, or loss=sigmoid")
    elif preference.label_smoothing >= 0.5:
        fact = (
            f"label_smoothing={preference.label_smoothing:g} says that half of the labels or more are wrong"
        )
        yield SpecError(fact, where="preference.label_smoothing", hint="use less than 0.5")
    if preference.margin and preference.loss != "simpo":
        fact = f"margin={preference.margin:g} has no effect on loss={preference.loss}"
        yield SpecError(fact, where="preference.margin", hint="set it to 0, or loss=simpo")
    if preference.reference == "dataset" and not preference.has_reference:
        fact = f"reference=dataset has no effect on loss={preference.loss}, which has no reference"
        yield SpecError(fact, where="preference.reference", hint="leave it out, or use loss=sigmoid or ipo")


def settings_work_with_pairs(run: RunSpec) -> Violations:
    """The noise scale compares tokens, and CUDA graphs need micro-batches with equal numbers of pairs."""
    if run.preference is None:
        return
    if run.observe.noise_scale is not None:
        fact = "observe.noise_scale with preference: the noise of a token is not known from pairs"
        yield SpecError(fact, where="observe.noise_scale", hint="set observe.noise_scale=null")
    if run.cuda_graphs:
        fact = "cuda_graphs=true with preference: the number of pairs differs between micro-batches"
        yield SpecError(fact, where="cuda_graphs", hint="leave cuda_graphs out")


PREFERENCE_RULES = [pairs_are_packed_whole, preference_settings_have_effect, settings_work_with_pairs]
