"""Optional packages, imported when a format needs them, with a clear text where one is missing."""

import functools
import importlib
import importlib.util
from typing import Any

from meshwright.errors import DataError


def package(module: str, *, extra: str, needed_for: str) -> Any:
    """The imported module; DataError with the command that installs it where it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        fact = f"{needed_for} need the package {module.partition('.')[0]}, which is not installed"
        if not isinstance(error, ModuleNotFoundError):
            fact = f"{needed_for} need the package {module.partition('.')[0]}, which does not import: {error}"
        raise DataError(fact, where=module, hint=f'pip install "meshwright[{extra}]"') from None


@functools.cache
def is_installed(module: str) -> bool:
    """Whether an optional package can be found; it is not imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
