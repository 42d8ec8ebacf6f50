"""Holds a program between compiling and running: many compile at once, one at a time takes the card's memory.

torch has no public way to compile without running, nor to compile backward together with forward: inductor's
entry is wrapped and AOTAutograd's setting used, both here and nowhere else.
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
    """Inside the block the first compiled graph calls `wait` before it runs; backward is compiled by then."""
    original, is_open = compile_fx.compile_fx, False

    def compile_and_hold(*arguments: Any, **named: Any) -> Callable[..., Any]:
        compiled: Any = original(*arguments, **named)
        if is_open:
            return compiled

        @functools.wraps(compiled)
        def held(*inputs: Any) -> Any:
            nonlocal is_open
            if not is_open:
                is_open = True
                wait()
            return compiled(*inputs)

        return held

    at_once = functorch_config.patch(force_non_lazy_backward_lowering=True)
    with patch.object(compile_fx, "compile_fx", compile_and_hold), at_once:
        yield
