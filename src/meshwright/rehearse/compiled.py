"""Compiled blocks in a trace: torch's compiler up to code generation, then a model of its kernels' memory.

Up to the forward and backward graph of a block everything is torch's own: Dynamo, AOTAutograd, inductor's
decompositions and passes, and the partitioner that chooses what is saved for backward. Code generation is
left out: `fusion` works out the graphs' kernels, and `kernel_replay` runs them on fake tensors. torch has no
public entry point there, so this file uses private ones: inductor's backend with another inner compiler, the
passes that run just before code generation, and Dynamo's callbacks around a compilation. The first two are
looked up on use, because torch loads inductor only then.
"""

import contextlib
import dataclasses
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.callback import callback_handler
from torch._functorch import config as functorch_config
from torch._guards import detect_fake_mode
from torch._inductor import config as inductor_config
from torch.fx import GraphModule

from meshwright.parallel.compile import CompiledPart, compiled_parts
from meshwright.rehearse.fusion import Kernel
from meshwright.rehearse.kernel_replay import Boxed, replay_graph
from meshwright.spec import MemorySpec


@dataclasses.dataclass
class Compiler:
    """A backend of `torch.compile` whose graphs allocate as inductor's kernels would, and compute nothing."""

    num_graphs: int = 0
    """Graphs compiled so far; with 0 the blocks ran uncompiled."""
    watch: Callable[[Kernel], None] | None = None
    """Called with each kernel of a graph before it runs."""

    def __call__(self, module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """The compiled form of a graph that Dynamo captured."""
        default: Any = lookup_backend("inductor")
        # No kernels are generated, so neither compile workers nor a cache are needed.
        with functorch_config.patch(enable_autograd_cache=False), inductor_config.patch(compile_threads=1):
            return default(module, inputs, inner_compile=self._inner)

    def _inner(self, module: GraphModule, inputs: Sequence[Any], **_: Any) -> Boxed:
        inductor: Any = torch._inductor
        with inductor.virtualized.V.set_fake_mode(detect_fake_mode(inputs)):
            inductor.fx_passes.post_grad.post_grad_passes(module, is_inference=False)
        self.num_graphs += 1
        return replay_graph(module, self._see)

    def _see(self, kernel: Kernel) -> None:
        if self.watch is not None:
            self.watch(kernel)

    def compile_blocks(self, blocks: Iterable[nn.Module], memory: MemorySpec) -> None:
        """In the place of `parallel.compile.compile_blocks`; the hooks of phases stay outside the graph."""
        for index, block in enumerate(blocks):
            parts = compiled_parts(block, memory, index) or [CompiledPart(block)]
            for part in parts:  # row counts are assumed here, and equal in every call
                part.compile(torch.compile, backend=self)


@contextlib.contextmanager
def compiled_blocks(*, is_wanted: bool) -> Iterator[Compiler]:
    """A compiler for the blocks of a program that is built and run inside, if compiling is wanted."""
    compiler = Compiler()
    if not is_wanted:
        yield compiler
        return
    # Code compiled earlier in this process counts against torch's recompile limit.
    torch.compiler.reset()
    try:
        with _silenced():
            yield compiler
    finally:
        torch.compiler.reset()


@contextlib.contextmanager
def compilation_excluded(
    paused: Callable[[], contextlib.AbstractContextManager[None]],
) -> Iterator[None]:
    """Inside, torch compiles within the context that `paused` makes: Dynamo runs operators of a block."""
    pauses = contextlib.ExitStack()
    start = callback_handler.register_start_callback(lambda _: pauses.enter_context(paused()))
    end = callback_handler.register_end_callback(lambda _: pauses.close())
    try:
        yield
    finally:
        callback_handler.remove_start_callback(start)
        callback_handler.remove_end_callback(end)


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Inside, warnings of torch's compiler are dropped: a training run prints them, a rehearsal need not."""
    disabled = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\.")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(disabled)
