"""Gradients of several micro-batches summed by the products that make them.

The first micro-batch of a step leaves each weight its gradient. In the others the product dy^T x of a linear
adds to it in place: no gradient of its own is written and read again (8 bytes for each bf16 weight become 4),
and where sums are wider than the products they are not rounded in between.
"""

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from meshwright.models.layers.fused import JointGated, JointProjections, joint_maker, sharing
from meshwright.models.layers.linear import Linear, Product
from meshwright.ops.fused_linear import lies_behind, seen_as_one
from meshwright.parallel.dp import GradientReducer, Reducer
from meshwright.spec import RunSpec

Maker = Linear | JointProjections | JointGated


class WgradFusion:
    """What makes products that may add, with the linears whose weights they are of."""

    def __init__(self, makers: Iterable[tuple[Maker, Sequence[Linear]]] = ()) -> None:
        self._makers = list(makers)

    @contextmanager
    def microbatch(self) -> Generator[None]:
        """Entered around forward and backward of one micro-batch, one after the other."""
        for maker, linears in self._makers:
            maker.totals = _totals([linear.weight.grad for linear in linears])
        try:
            yield
        finally:
            for maker, _ in self._makers:
                maker.totals = ()


def _totals(gradients: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """What to add to: nothing yet, all as one tensor where they lie so, or each."""
    found = tuple(gradient for gradient in gradients if gradient is not None)
    if len(found) < len(gradients):
        return ()
    return (seen_as_one(found),) if lies_behind(found) else found


def build_wgrad_fusion(model: nn.Module, run: RunSpec, reducer: Reducer) -> WgradFusion:
    """Compiled blocks whose gradients no other rank has a part of; nothing that moves tensors to the host.

    A bias is added by the same kernel as a plain product, so linears with one stay as they are.
    """
    is_alone = isinstance(reducer, GradientReducer) and not reducer.buckets
    if not run.compile or not is_alone or run.memory.offload:
        return WgradFusion()
    found = ((joint_maker(module), sharing(module)) for module in model.modules())
    groups = {maker: linears for maker, linears in found if maker is not None}
    taken = {linear for linears in groups.values() for linear in linears}
    alone = (module for module in model.modules() if isinstance(module, Linear) and module not in taken)
    return WgradFusion(
        (maker, linears)
        for maker, linears in [*groups.items(), *((linear, (linear,)) for linear in alone)]
        if all(_can_add(linear) for linear in linears)
    )


def _can_add(linear: Linear) -> bool:
    is_plain = type(linear.product) is Product and linear.collect is None and linear.bias is None
    return is_plain and linear.weight.requires_grad
