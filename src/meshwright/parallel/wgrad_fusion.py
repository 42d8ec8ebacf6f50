"""Weight-gradient accumulation fusion: the weight-gradient matmul adds to the gradient in place.

    dW[N, K] += dy[T, N]^T x[T, K]      one GEMM with beta = 1 for every micro-batch after the first

No separate gradient is written and read again (8 bytes of traffic for each bf16 weight become 4), and where
gradients are kept in fp32 the matmul's result is not rounded to bf16 before it is added. It communicates
nothing. It pays with several micro-batches per step, where no other rank has a part of the gradients.
"""

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from meshwright.models.layers.fused import (
    FusedGateUp,
    FusedQkvProjections,
    fused_projection_of,
    linears_sharing_input,
)
from meshwright.models.layers.linear import Linear
from meshwright.models.layers.matmul import Matmul
from meshwright.ops.fused_linear import is_packed, packed_view
from meshwright.parallel.dp import GradientReducer, Reducer
from meshwright.spec import RunSpec

Maker = Linear | FusedQkvProjections | FusedGateUp


class WgradFusion:
    """The modules whose weight-gradient matmuls may accumulate, each with the linears it computes."""

    def __init__(self, makers: Iterable[tuple[Maker, Sequence[Linear]]] = ()) -> None:
        self._makers = list(makers)

    @contextmanager
    def microbatch(self) -> Generator[None]:
        """Entered around forward and backward of one micro-batch."""
        for maker, linears in self._makers:
            maker.grad_buffers = _grad_buffers([linear.weight.grad for linear in linears])
        try:
            yield
        finally:
            for maker, _ in self._makers:
                maker.grad_buffers = ()


def _grad_buffers(gradients: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """The gradients to add to: none yet, one tensor where they are contiguous, or one for each linear."""
    found = tuple(gradient for gradient in gradients if gradient is not None)
    if len(found) < len(gradients):
        return ()
    return (packed_view(found),) if is_packed(found) else found


def build_wgrad_fusion(model: nn.Module, run: RunSpec, reducer: Reducer) -> WgradFusion:
    """Fusion for compiled blocks whose gradients no other rank has a part of, without offload.

    Linears with a bias are left out: a plain matmul adds the bias in the same kernel.
    """
    is_local = isinstance(reducer, GradientReducer) and not reducer.buckets
    if not run.compile or not is_local or run.memory.offload:
        return WgradFusion()
    found = ((fused_projection_of(module), linears_sharing_input(module)) for module in model.modules())
    fused = {maker: linears for maker, linears in found if maker is not None}
    in_fused = {linear for linears in fused.values() for linear in linears}
    single = (module for module in model.modules() if isinstance(module, Linear) and module not in in_fused)
    return WgradFusion(
        (maker, linears)
        for maker, linears in [*fused.items(), *((linear, (linear,)) for linear in single)]
        if all(_can_add(linear) for linear in linears)
    )


def _can_add(linear: Linear) -> bool:
    is_plain = type(linear.matmul) is Matmul and linear.reduce_output is None and linear.bias is None
    return is_plain and linear.weight.requires_grad
