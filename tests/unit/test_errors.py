"""Errors keep their three parts, across processes too."""

import pickle

import pytest

from meshwright import errors
from meshwright.errors import MeshwrightError, SpecError, SpecErrors

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and kind is not SpecErrors]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_survives_pickling(kind: type[MeshwrightError]):
    copy = pickle.loads(pickle.dumps(kind("a fact", where="a place", hint="a hint")))
    assert type(copy) is kind
    assert (copy.fact, copy.where, copy.hint) == ("a fact", "a place", "a hint")
    assert str(copy) == "a place: a fact\n  hint: a hint"


def test_several_errors_survive_pickling():
    copy = pickle.loads(pickle.dumps(SpecErrors([SpecError("one", where="a"), SpecError("two", hint="b")])))
    assert [(each.fact, each.where, each.hint) for each in copy.violations] == [
        ("one", "a", ""),
        ("two", "", "b"),
    ]
    assert str(copy) == "a: one\ntwo\n  hint: b"


def test_exit_codes_are_those_of_the_contract():
    codes = {kind.__name__: kind.exit_code for kind in KINDS}
    assert codes == {
        "MeshwrightError": 2,
        "SpecError": 2,
        "MeshError": 2,
        "DataError": 2,
        "CheckpointError": 2,
        "LaunchError": 2,
        "PlanError": 3,
        "RunError": 4,
        "OutOfMemory": 4,
        "LostRank": 4,
    }
