"""A linear layer whose matmul can be replaced, and the QKV projections made of three of them."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from meshwright.models.layers.adapted_fp8 import stored_adapted_linear
from meshwright.models.layers.adapter import Adapter
from meshwright.models.layers.matmul import Matmul
from meshwright.ops.adapted_linear import adapted_linear
from meshwright.ops.cast import compute_dtype
from meshwright.ops.fused_linear import fused_linear
from meshwright.ops.nf4 import dequantise_nf4
from meshwright.ops.nf4_nested import NestedTable, unnest_absmax
from meshwright.ops.sharded import local
from meshwright.precision.fp8.stored import Fp8Scale, StoredFp8Matmul, decode_stored


class Linear(nn.Module):
    """y = x W^T + b; the weight is [out_width, in_width] as in torch."""

    def __init__(self, in_width: int, out_width: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_width, in_width))
        self.bias = nn.Parameter(torch.empty(out_width)) if bias else None
        self.matmul: nn.Module = Matmul()
        # Set where tp shards the input dim: reduces the partial outputs; the bias is added after it, once.
        self.reduce_output: nn.Module | None = None
        # Set where the frozen weight is NF4: `weight` is then packed, and this has the bits of its absmax.
        self.weight_absmax: nn.Parameter | None = None
        # Set where the absmax is quantised too (nested NF4): it then has codes.
        self.weight_nested: NestedTable | None = None
        # Set where the frozen weight is stored in fp8: `weight` then has its bytes.
        self.weight_scale: Fp8Scale | None = None
        # Set where the weight is frozen and an adapter beside it is trained.
        self.adapter: Adapter | None = None
        # Weight-gradient accumulation fusion: when set, backward adds dW to this one tensor.
        self.grad_buffers: Sequence[Tensor] = ()

    def forward(self, x: Tensor, dropout_keys: Tensor | None = None) -> Tensor:
        """x W^T + b, over the last dim of x; the keys are those of an adapter's dropout."""
        if self.grad_buffers:
            return fused_linear(x, [self.weight], compute_dtype(x), self.grad_buffers)
        bias = None if self.bias is None else local(self.bias)
        if self.reduce_output is None and self.is_plain:
            return self.matmul(x, local(self.weight), bias)
        y = self.matmul(x, local(self.weight)) if self.is_plain else self._adapted_output(x, dropout_keys)
        if self.reduce_output is not None:
            y = self.reduce_output(y)
        if bias is None:
            return y
        return y + (bias if self.is_plain else bias.to(y.dtype))

    @property
    def is_plain(self) -> bool:
        """Whether the output is x W^T + b alone: no adapter, and a weight that is not packed."""
        return self.adapter is None and self.weight_absmax is None

    def _adapted_output(self, x: Tensor, dropout_keys: Tensor | None) -> Tensor:
        """x W^T with the adapter, where W is frozen."""
        if self.adapter is not None and self.adapter.is_fused:
            if isinstance(self.matmul, StoredFp8Matmul):
                return stored_adapted_linear(self.matmul, x, [self.weight], [self.adapter.scaled_factors()])
            return adapted_linears(x, (self,))
        return self.with_adapter(x, self._frozen_output(x), dropout_keys)

    def _frozen_output(self, x: Tensor) -> Tensor:
        """x W^T, where W is frozen."""
        if self.weight_absmax is not None:
            return adapted_linears(x, (self,), adapters=(None,))
        return self.matmul(x, local(self.weight))

    def with_adapter(self, x: Tensor, y: Tensor, dropout_keys: Tensor | None) -> Tensor:
        """The output y = x W^T with what the adapter adds, where there is one."""
        if self.adapter is None:
            return y
        if self.adapter.magnitude is None:
            return self.adapter(x, y, dropout_keys=dropout_keys)
        weight = self.frozen_weight(compute_dtype(x))
        return self.adapter(x, y, dropout_keys=dropout_keys, weight=weight, frozen=self._frozen_output)

    def frozen_weight(self, dtype: torch.dtype) -> Tensor:
        """This rank's part of the weight; NF4 and stored fp8 are dequantised to `dtype`."""
        if self.weight_scale is not None:
            return decode_stored(local(self.weight), self.weight_scale.value, dtype)
        if self.weight_absmax is None:
            return local(self.weight)
        absmax = local(self.weight_absmax)
        if self.weight_nested is not None:
            nested = self.weight_nested
            absmax = unnest_absmax(absmax, nested.value, nested.place).view(torch.int32)
        return dequantise_nf4(local(self.weight), absmax, dtype)


def adapted_linears(
    x: Tensor, linears: Sequence[Linear], adapters: Sequence[Adapter | None] | None = None
) -> Tensor:
    """The outputs of frozen linears with their adapters (or those given), concatenated, without biases."""
    chosen = [linear.adapter for linear in linears] if adapters is None else adapters
    return adapted_linear(
        x,
        [local(linear.weight) for linear in linears],
        [None if one is None else one.scaled_factors() for one in chosen],
        compute_dtype(x),
        absmax=[local(one.weight_absmax) for one in linears if one.weight_absmax is not None],
        nested=[
            (one.weight_nested.value, one.weight_nested.place)
            for one in linears
            if one.weight_nested is not None
        ],
    )


class QkvProjections(nn.Module):
    """Linears on the same input, one after the other; replaced where they are fused into one matmul."""

    def forward(
        self, x: Tensor, linears: Sequence[Linear], dropout_keys: Tensor | None = None
    ) -> list[Tensor]:
        """The output of each linear."""
        return [linear(x, dropout_keys) for linear in linears]
