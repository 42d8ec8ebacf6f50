"""Compiled blocks in a trace: torch's compiler up to its kernels, then a model of their bytes.

Everything up to the two graphs of a block is torch's own: Dynamo, AOTAutograd, the decompositions and passes
of its default compiler, and the partitioner that chooses what is saved for backward. Only code generation is
left out: the graphs' kernels are worked out by `fusion` and run on tensors without numbers. torch has no
public entrance there, so what is private is in this file: its default backend with another inner compiler,
and the passes that run just before kernels are made. Both are looked up when they are needed, because torch
loads its compiler only then.
"""

import contextlib
import dataclasses
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch._functorch import config as functorch_config
from torch._guards import detect_fake_mode
from torch._inductor import config as inductor_config
from torch.fx import GraphModule

from meshwright.parallel import apply
from meshwright.rehearse.fusion import Kernel
from meshwright.rehearse.kernel_replay import Boxed, replayed
from meshwright.spec import MemorySpec


@dataclasses.dataclass
class Compiler:
    """Counts the graphs that it compiled: none means that the trace is one of an uncompiled run."""

    num_graphs: int = 0
    watch: Callable[[Kernel], None] | None = None
    """Called before each kernel of a graph runs."""

    def __call__(self, module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """A backend of `torch.compile`."""
        default: Any = lookup_backend("inductor")
        # Neither processes to make kernels in nor a store for what was compiled are needed.
        with functorch_config.patch(enable_autograd_cache=False), inductor_config.patch(compile_threads=1):
            return default(module, inputs, inner_compile=self._inner)

    def _inner(self, module: GraphModule, inputs: Sequence[Any], **_: Any) -> Boxed:
        inductor: Any = torch._inductor
        with inductor.virtualized.V.set_fake_mode(detect_fake_mode(inputs)):
            inductor.fx_passes.post_grad.post_grad_passes(module, is_inference=False)
        self.num_graphs += 1
        return replayed(module, self._seen)

    def _seen(self, kernel: Kernel) -> None:
        if self.watch is not None:
            self.watch(kernel)

    def compile_blocks(self, blocks: Iterable[nn.Module], memory: MemorySpec) -> None:
        """In the place of `memory.compiled.compile_blocks`. Hooks stay outside of what is compiled."""
        del memory
        for block in blocks:
            block.forward = torch.compile(block.forward, backend=self)


@contextlib.contextmanager
def compiling(*, is_wanted: bool) -> Iterator[Compiler]:
    """Inside, programs are built with blocks that this compiler compiles, if any are."""
    compiler = Compiler()
    if not is_wanted:
        yield compiler
        return
    # Code compiled before, and by another compiler, counts against the number of forms that torch allows.
    torch.compiler.reset()
    try:
        with patch.object(apply, "compile_blocks", compiler.compile_blocks), _quiet():
            yield compiler
    finally:
        torch.compiler.reset()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What torch's compiler says of our code belongs to a run of it, not to a rehearsal."""
    disabled = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\.")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(disabled)
