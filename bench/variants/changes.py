"""Changes of the step that `bench/step_variants.py` can measure: each patches the product from outside."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch._inductor.config as inductor
from torch import Tensor, nn
from torch.nn import functional

from meshwright.models import decoder
from meshwright.models.layers import mlp
from meshwright.models.layers.fused import join
from meshwright.ops.gelu import gelu_by_sigmoid
from meshwright.ops.loss import linear_cross_entropy
from meshwright.parallel import apply
from meshwright.parallel.wgrad_fusion import WgradFusion
from meshwright.spec import RunSpec
from meshwright.train.step import Training


def _fill(fill: Callable[..., None], model: nn.Module, seed: int, *, device: torch.device) -> None:
    fill(model, seed, device=device)


@dataclass
class Change:
    """What is patched while a variant is built and runs, after its weights are filled, and once it stands."""

    inside: Callable[[], AbstractContextManager[Any]] = nullcontext
    filled: Callable[..., None] = _fill
    adjust: Callable[[Training], None] = lambda _: None


def join_only(kind: type[nn.Module], model: nn.Module, run: RunSpec) -> None:
    """Joint products in the modules of one kind."""
    del run
    for module in model.modules():
        if isinstance(module, kind):
            join(module)  # pyright: ignore[reportArgumentType]


def _gelu_forward(self: mlp.Gelu, x_BSD: Tensor) -> Tensor:
    return self.down(functional.gelu(self.up(x_BSD), approximate=self.approximate))


def _sigmoid_forward(self: mlp.Gelu, x_BSD: Tensor) -> Tensor:
    return self.down(gelu_by_sigmoid(self.up(x_BSD)))


@contextmanager
def _chunks(gibibytes: float) -> Iterator[None]:
    larger = partial(linear_cross_entropy, chunk_bytes=int(gibibytes * 2**30))
    with patch.object(decoder, "linear_cross_entropy", larger):
        yield


@contextmanager
def _blas(name: str) -> Iterator[None]:
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(name)
    yield
    torch.backends.cuda.preferred_blas_library(before)


CHANGES: dict[str, Callable[[], Change]] = {
    "base": Change,
    "apart": lambda: Change(inside=lambda: patch.object(apply, "fuse_projections", lambda *_: None)),
    "jointmlp": lambda: Change(
        inside=lambda: patch.object(apply, "fuse_projections", partial(join_only, mlp.SwiGlu))
    ),
    "unsummed": lambda: Change(
        inside=lambda: patch.object(apply, "build_wgrad_fusion", lambda *_: WgradFusion())
    ),
    "tanh": lambda: Change(inside=lambda: patch.object(mlp.Gelu, "forward", _gelu_forward)),
    "onlysigmoid": lambda: Change(inside=lambda: patch.object(mlp.Gelu, "forward", _sigmoid_forward)),
    "chunk2": lambda: Change(inside=lambda: _chunks(2)),
    "chunk4": lambda: Change(inside=lambda: _chunks(4)),
    "chunk9": lambda: Change(inside=lambda: _chunks(9)),
    "descent": lambda: Change(inside=lambda: inductor.patch(coordinate_descent_tuning=True)),
    "lt": lambda: Change(inside=lambda: _blas("cublaslt")),
    "cublas": lambda: Change(inside=lambda: _blas("cublas")),
}
