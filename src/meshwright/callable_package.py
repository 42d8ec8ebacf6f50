"""Packages that are also functions: `meshwright.plan(...)` beside `meshwright.plan.search`.

The attribute `meshwright.plan` becomes the sub-package once something imports it. It is therefore callable.
"""

import importlib
import sys
from types import ModuleType
from typing import Any

FUNCTIONS = {
    "meshwright.plan": ("meshwright.api.questions", "plan"),
    "meshwright.train": ("meshwright.api.training", "train"),
}
"""Module and name of the function that a call of each package runs."""


class _CallablePackage(ModuleType):
    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        module, name = FUNCTIONS[self.__name__]
        return getattr(importlib.import_module(module), name)(*arguments, **settings)


def make_callable(package: str) -> None:
    """Make a call of this package run its function of FUNCTIONS."""
    sys.modules[package].__class__ = _CallablePackage
