"""Any run that can be described loads back equal from its own text."""

import string
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Le
from hypothesis import given
from hypothesis import strategies as st
from pydantic.fields import FieldInfo
from tests.support.soak import examples

from meshwright.spec import RunSpec
from meshwright.spec.base import Spec
from meshwright.spec.check import check
from meshwright.spec.text import dump_run, parse_run
from meshwright.spec.violations import spec_of

# Words that YAML readers like to take for something else.
WORDS = st.sampled_from(
    [
        "no",
        "1e4",
        "0x10",
        "null",
        "true",
        "12",
        "1_000",
        "~",
        "a: b",
        "#",
        "é",
        " x ",
        "",
        "-",
        "a/b",
        "x.json",
    ]
)
NAMES = st.text(string.ascii_letters + string.digits, min_size=1, max_size=12)
LARGEST = 2**40
PARTS = st.floats(0.01, 0.99, allow_nan=False)


def specs(kind: type[Spec]) -> st.SearchStrategy[Any]:
    """Specs of a kind with every field drawn at random."""
    fields = {name: values(name, found) for name, found in kind.model_fields.items()}
    return st.fixed_dictionaries(fields).map(kind.model_validate)


def values(name: str, found: FieldInfo) -> st.SearchStrategy[Any]:
    """Values that one field accepts."""
    options = _options(found.annotation)
    absent = [st.none()] if type(None) in options else []
    below = spec_of(found)
    if below is not None and get_origin(found.annotation) is tuple:
        return st.lists(specs(below), max_size=2)
    if get_origin(found.annotation) is tuple:
        item = get_args(found.annotation)[0]
        if get_origin(item) is Annotated:  # numbers, or texts with a pattern
            kinds = {float: PARTS, int: st.integers(1, 2**16)}
            return st.lists(kinds.get(get_args(item)[0], NAMES), max_size=2, unique=True)
        if item is str:
            return st.lists(WORDS, max_size=2)
        words = get_args(item)
        return st.lists(st.sampled_from(words), unique=True)
    limit = min([bound.le for bound in found.metadata if isinstance(bound, Le)], default=LARGEST)
    present = [option for option in options if option is not type(None)]
    plain = [specs(one) if one is below else _plain(name, one, limit) for one in present]
    return st.one_of(*absent, *plain)


NOT_EMPTY = ("name", "destination", "project", "entity", "experiment", "tracking_uri", "node_directory")


def _options(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def _plain(name: str, option: Any, limit: int) -> st.SearchStrategy[Any]:
    if get_origin(option) is Literal:
        return st.sampled_from(get_args(option))
    base = get_args(option)[0] if get_args(option) else option
    if name == "zero":
        return st.integers(0, 3)
    if name in NOT_EMPTY:
        return NAMES
    if name.endswith(("_timeout_seconds", "_grace_seconds")):
        return st.floats(1, 1e6, allow_nan=False)
    if name == "num_layers":  # rules list the parameters of every layer
        return st.integers(1, 60)
    if name in ("hang_factor", "spike_factor", "loss_spike_factor", "straggler_factor"):
        return st.floats(2, 100, allow_nan=False)
    return {
        bool: st.booleans(),
        int: st.integers(1, 3) | st.integers(1, min(limit, LARGEST)),
        float: PARTS,
        str: WORDS | NAMES,
    }[base]


@examples(30)
@given(specs(RunSpec))
def test_dump_then_load_is_the_same_run(run: RunSpec):
    assert parse_run(dump_run(run)).run == run


@examples(30)
@given(specs(RunSpec))
def test_rules_have_an_answer_for_any_run(run: RunSpec):
    """Whatever is described, a rule tells a fact or is silent; it never fails itself."""
    for violation in check(run):
        assert violation.fact and violation.where and violation.hint


@examples(10)
@given(specs(RunSpec), specs(RunSpec))
def test_equal_fingerprints_mean_equal_runs(one: RunSpec, other: RunSpec):
    assert (one.fingerprint() == other.fingerprint()) == (one == other)
    assert parse_run(dump_run(one)).run.fingerprint() == one.fingerprint()
