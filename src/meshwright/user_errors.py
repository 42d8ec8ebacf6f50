"""Errors for people who call us from their own scripts: they end at the caller's line, not inside of us."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from meshwright.errors import MeshwrightError

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def errors_end_at_caller(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """The function, whose MeshwrightErrors carry fact, where and hint instead of our own frames."""

    @functools.wraps(function)
    def wrapper(*arguments: _Arguments.args, **keywords: _Arguments.kwargs) -> _Result:
        try:
            return function(*arguments, **keywords)
        except MeshwrightError as error:
            raise error.with_traceback(None) from None

    return wrapper
