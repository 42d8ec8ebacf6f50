"""Changes of the step that `bench.step_variants` can measure; each patches the product from outside."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch._inductor.config as inductor
from torch import Tensor, nn
from torch.nn import functional

from meshwright.models import decoder
from meshwright.models.layers import mlp
from meshwright.models.layers.fused import fuse_linears
from meshwright.ops.gelu import gelu_by_sigmoid
from meshwright.ops.loss import linear_cross_entropy
from meshwright.parallel import apply
from meshwright.parallel.wgrad_fusion import WgradFusion
from meshwright.spec import RunSpec

Change = Callable[[], AbstractContextManager[Any]]
"""A context in which a variant is built and runs."""


def _fuse_only(kind: type[nn.Module], model: nn.Module, run: RunSpec) -> None:
    """Fused projections in the modules of one kind."""
    del run
    for module in model.modules():
        if isinstance(module, kind):
            fuse_linears(module)  # pyright: ignore[reportArgumentType]


def _tanh_forward(self: mlp.Gelu, x_BSD: Tensor) -> Tensor:
    return self.down(functional.gelu(self.up(x_BSD), approximate=self.approximate))


def _sigmoid_forward(self: mlp.Gelu, x_BSD: Tensor) -> Tensor:
    return self.down(gelu_by_sigmoid(self.up(x_BSD)))


def _chunks(gibibytes: float) -> AbstractContextManager[Any]:
    larger = partial(linear_cross_entropy, chunk_bytes=int(gibibytes * 2**30))
    return patch.object(decoder, "linear_cross_entropy", larger)


@contextmanager
def _blas(name: str) -> Iterator[None]:
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(name)
    yield
    torch.backends.cuda.preferred_blas_library(before)


CHANGES: dict[str, Change] = {
    "base": nullcontext,
    "unfused": lambda: patch.object(apply, "fuse_projections", lambda *_: None),
    "fused_mlp": lambda: patch.object(apply, "fuse_projections", partial(_fuse_only, mlp.SwiGlu)),
    "no_wgrad_fusion": lambda: patch.object(apply, "build_wgrad_fusion", lambda *_: WgradFusion()),
    "tanh_gelu": lambda: patch.object(mlp.Gelu, "forward", _tanh_forward),
    "sigmoid_gelu": lambda: patch.object(mlp.Gelu, "forward", _sigmoid_forward),
    "chunk2": lambda: _chunks(2),
    "chunk4": lambda: _chunks(4),
    "chunk9": lambda: _chunks(9),
    "coordinate_descent": lambda: inductor.patch(coordinate_descent_tuning=True),
    "cublaslt": lambda: _blas("cublaslt"),
    "cublas": lambda: _blas("cublas"),
}


@contextmanager
def combined(names: str) -> Iterator[None]:
    """Inside, the changes named by `change+change` are made."""
    with ExitStack() as stack:
        for name in names.split("+"):
            stack.enter_context(CHANGES[name]())
        yield
