"""The types of keywords are those of the specs, field by field."""

import types
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest

from meshwright.spec import keywords, nested_settings
from meshwright.spec.base import Spec
from meshwright.spec.memory import Offloaded
from meshwright.spec.modules import FitSpec, LoopSpec
from meshwright.spec.precision import Fp8Recipe
from meshwright.spec.settings import nested_keys
from meshwright.spec.violations import spec_of

# Forms that a field takes besides the type of its spec.
SHORT_FORMS: dict[str, Any] = {"fp8": Fp8Recipe, "offload": Offloaded}


def settings_of(spec: type[Spec]) -> Any:
    """The TypedDict of a spec."""
    module = keywords if spec in (FitSpec, LoopSpec) else nested_settings
    return getattr(module, f"{spec.__name__.removesuffix('Spec')}Settings")


def keyword_type(annotation: Any) -> Any:
    """What a keyword takes for a field: the plain type, a spec or its TypedDict, a sequence for a tuple."""
    if get_origin(annotation) is Annotated:
        return keyword_type(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return Union[tuple(keyword_type(option) for option in get_args(annotation))]  # noqa: UP007
    if get_origin(annotation) is tuple:
        return Sequence[keyword_type(get_args(annotation)[0])]
    if isinstance(annotation, type) and issubclass(annotation, Spec):
        return annotation | settings_of(annotation)
    return annotation


def types_of(spec: type[Spec]) -> dict[str, Any]:
    """The type of each field as a keyword."""
    found = {name: keyword_type(field.annotation) for name, field in spec.model_fields.items()}
    return {name: kind | SHORT_FORMS[name] if name in SHORT_FORMS else kind for name, kind in found.items()}


def same(one: Any, other: Any) -> bool:
    """Equal types, whatever the order of the members of a union."""
    if get_origin(one) in (Union, types.UnionType):
        return set(map(repr, get_args(one))) == set(map(repr, get_args(other)))
    return repr(one) == repr(other) if get_origin(one) is not Literal else one == other


def differences(settings: Any, expected: dict[str, Any]) -> list[str]:
    """Lines that a TypedDict should have, and lines that it should not have."""
    hints = get_type_hints(settings)
    missing = [f"+ {name}: {kind}" for name, kind in expected.items() if not same(hints.get(name), kind)]
    return missing + [f"- {name}" for name in hints if name not in expected]


def nested_specs(spec: type[Spec]) -> list[type[Spec]]:
    below = [found for field in spec.model_fields.values() if (found := spec_of(field))]
    return [one for found in below for one in (found, *nested_specs(found))]


NESTED = {spec.__name__: spec for root in (FitSpec, LoopSpec) for spec in nested_specs(root)}


@pytest.mark.parametrize("name", NESTED)
def test_a_nested_spec(name: str):
    assert differences(settings_of(NESTED[name]), types_of(NESTED[name])) == []


@pytest.mark.parametrize("spec", [FitSpec, LoopSpec])
def test_a_function(spec: type[Spec]):
    """Its own fields, and those of nested specs whose name is unique."""
    expected = types_of(spec)
    for name, keys in nested_keys(spec).items():
        if name not in expected and len(keys) == 1:
            owner = spec
            for part in keys[0].split(".")[:-1]:
                owner = spec_of(owner.model_fields[part]) or owner
            expected[name] = types_of(owner)[name]
    assert differences(settings_of(spec), expected) == []


def test_only_an_item_of_a_list_must_be_complete():
    """A required field of any other spec may be a keyword of its own, or in a file."""
    required = {name for spec in NESTED.values() for name in settings_of(spec).__required_keys__}
    assert required == {"pattern"}
