"""The names that other people's programs may use."""

import inspect

from tests.support.golden_files import assert_golden

import meshwright
from meshwright import errors, spec, units
from meshwright.spec import check, text


def public(module: object, name: str) -> list[str]:
    """`module.name(parameters)` of everything public that the module defines or re-exports."""
    names = getattr(module, "__all__", None) or [each for each in vars(module) if _is_own(module, each)]
    return [f"{name}.{each}{_signature(getattr(module, each))}" for each in sorted(names)]


def _is_own(module: object, name: str) -> bool:
    value = getattr(module, name)
    return not name.startswith("_") and getattr(value, "__module__", None) == getattr(module, "__name__", "")


def _signature(value: object) -> str:
    return str(inspect.signature(value)) if inspect.isfunction(value) else ""


def test_public_names():
    modules = {
        "meshwright": meshwright,
        "meshwright.errors": errors,
        "meshwright.units": units,
        "meshwright.spec": spec,
        "meshwright.spec.check": check,
        "meshwright.spec.text": text,
    }
    lines = [line for name, module in modules.items() for line in public(module, name)]
    assert_golden("public_names.txt", "\n".join(lines) + "\n")
