"""Blocks a program between compiling and its first run: many compile at once, one at a time runs.

torch has no public way to compile without running, nor to compile backward together with forward. Inductor's
entry point is wrapped and an AOTAutograd setting is used; both are private and used in this file only.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch._functorch import config as functorch_config
from torch._inductor import compile_fx


@contextmanager
def gate_after_compiling(wait: Callable[[], None]) -> Iterator[None]:
    """Inside, the first compiled graph calls `wait` before it runs; backward is compiled by then."""
    original, is_open = compile_fx.compile_fx, False

    def compile_and_wait(*arguments: Any, **named: Any) -> Callable[..., Any]:
        compiled: Any = original(*arguments, **named)
        if is_open:
            return compiled

        @functools.wraps(compiled)
        def gated(*inputs: Any) -> Any:
            nonlocal is_open
            if not is_open:
                is_open = True
                wait()
            return compiled(*inputs)

        return gated

    eager_backward = functorch_config.patch(force_non_lazy_backward_lowering=True)
    with patch.object(compile_fx, "compile_fx", compile_and_wait), eager_backward:
        yield
