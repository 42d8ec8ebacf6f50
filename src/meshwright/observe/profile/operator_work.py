"""FLOPs and bytes of operators, from the shapes that the profiler recorded."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.observe.profile.kernel_classes import (
    ATTENTION,
    COPY,
    ELEMENTWISE,
    MATMUL,
    NORM,
    OPTIMIZER,
)
from meshwright.observe.profile.trace import Op

ITEM_BYTES = {
    "double": 8,
    "long int": 8,
    "float": 4,
    "int": 4,
    "c10::BFloat16": 2,
    "c10::Half": 2,
    "c10::Float8_e4m3fn": 1,
    "c10::Float8_e5m2": 1,
    "unsigned char": 1,
    "signed char": 1,
    "bool": 1,
}
DTYPES = {
    "double": "fp64",
    "float": "fp32",
    "c10::BFloat16": "bf16",
    "c10::Half": "fp16",
    "c10::Float8_e4m3fn": "fp8",
    "c10::Float8_e5m2": "fp8",
}
_MATMULS = ("mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "_scaled_mm", "_grouped_mm")
_MATMULS += ("_scaled_grouped_mm", "_scaled_mm_v2", "_scaled_grouped_mm_v2")
# FLOPs per element of the largest input: one for element-wise operators, some more for statistics.
_FLOPS_PER_ELEMENT = {ELEMENTWISE: 1.0, NORM: 4.0, OPTIMIZER: 4.0, COPY: 0.0}
# Backward of attention recomputes the scores: 5 matmuls against 2 of the forward.
_ATTENTION_BACKWARD = 2.5


@dataclass(frozen=True)
class Work:
    """FLOPs and bytes that an operator at least moves; None where the shapes do not say."""

    flops: float | None
    num_bytes: float


@dataclass(frozen=True)
class MatmulShape:
    """One (grouped or batched) matmul [m, k] x [k, n]."""

    m: int
    n: int
    k: int
    dtype: str
    groups: int = 1
    rows_bytes: tuple[int, ...] = ()
    """Bytes from one row to the next of both operands and of the result."""

    @property
    def flops(self) -> float:
        """Two for every multiplication and addition."""
        return 2.0 * self.groups * self.m * self.n * self.k

    @property
    def text(self) -> str:
        """`8192 x 2048 x 32003 (m x k x n)`."""
        groups = f"{self.groups} x " if self.groups > 1 else ""
        return f"{groups}{self.m} x {self.k} x {self.n}"


def matmul_shape(op: Op) -> MatmulShape | None:
    """The shape of a matmul operator; None for other operators and unknown forms."""
    name = op.name.rsplit("::", 1)[-1]
    if name not in _MATMULS:
        return None
    tensors = [at for at, dims in enumerate(op.dims) if len(dims) in (2, 3) and isinstance(dims[0], int)]
    first = 1 if name.startswith(("addmm", "baddbmm")) else 0
    if len(tensors) < first + 2 or len(op.dtypes) <= tensors[first]:
        return None
    left, right = tensors[first], tensors[first + 1]
    found = _multiplied(op.dims[left], op.dims[right])
    if found is None:
        return None
    m, n, k, groups = found
    dtype = op.dtypes[left]
    item = ITEM_BYTES.get(dtype, 4)
    strides = [_row_stride(op, index) for index in (left, right)]
    result = 2 * n if item == 1 else item * n  # fp8 operands have a 16-bit result
    rows = tuple(stride * item for stride in strides if stride is not None)
    return MatmulShape(m, n, k, DTYPES.get(dtype, dtype), groups, (*rows, result))


def _multiplied(left: Sequence[int], right: Sequence[int]) -> tuple[int, int, int, int] | None:
    """m, n, k and the number of matmuls of two shapes."""
    if len(left) == 2 and len(right) == 2:
        return (left[0], right[1], left[1], 1) if left[1] == right[0] else None
    if len(left) == 3 and len(right) == 3 and left[2] == right[1]:
        return left[1], right[2], left[2], left[0]
    if len(left) == 2 and len(right) == 3 and left[1] == right[1]:  # grouped: rows of all groups together
        return left[0], right[2], left[1], 1
    return None


def _row_stride(op: Op, index: int) -> int | None:
    """Elements from one row of an operand to the next; None where the trace has no strides."""
    if index >= len(op.strides) or len(op.strides[index]) < 2:
        return None
    strides, dims = op.strides[index][-2:], op.dims[index][-2:]
    if strides[1] == 1:
        return strides[0] if dims[0] > 1 else dims[1]
    return strides[1] if strides[0] == 1 and dims[1] > 1 else dims[0]


def work_of(op: Op, kind: str) -> Work:
    """FLOPs and least bytes of an operator that counts in this class."""
    if kind == MATMUL and (shape := matmul_shape(op)) is not None:
        elements = shape.m * shape.k + shape.k * shape.n + shape.m * shape.n
        item = ITEM_BYTES.get(op.dtypes[0], 2) if op.dtypes else 2
        return Work(shape.flops, float(item * shape.groups * elements))
    if kind == ATTENTION:
        return Work(_attention_flops(op), _input_bytes(op) + _largest_bytes(op))
    if kind == MATMUL:
        return Work(None, _input_bytes(op) + _largest_bytes(op))
    per_element = _FLOPS_PER_ELEMENT.get(kind, 0.0)
    elements = max((count for count, _ in _tensors(op)), default=0)
    written = 0.0 if kind == NORM else _largest_bytes(op)
    return Work(per_element * elements, _input_bytes(op) + written)


def _attention_flops(op: Op) -> float | None:
    """FLOPs of dense attention; None with document offsets, whose lengths the trace does not have."""
    is_backward = "backward" in op.name
    four = [dims for dims in op.dims if len(dims) == 4]
    if len(four) < 3 + is_backward:
        return None
    query, key = four[is_backward], four[is_backward + 1]
    batch, heads, rows, width = query
    causal = 0.5 if "True" in op.values else 1.0
    return 4.0 * causal * batch * heads * rows * key[2] * width * (_ATTENTION_BACKWARD if is_backward else 1)


def _tensors(op: Op) -> Iterator[tuple[int, int]]:
    """Elements and bytes of every tensor argument; in a list dtypes are not recorded, and 4 bytes count."""
    for index, dims in enumerate(op.dims):
        dtype = op.dtypes[index] if index < len(op.dtypes) else ""
        listed: Sequence[Any] = dims if dims and not isinstance(dims[0], int) else [dims] if dims else []
        for one in listed:
            elements = math.prod(one)
            yield elements, elements * ITEM_BYTES.get(dtype, 4 if "List" in dtype else 0)


def _input_bytes(op: Op) -> float:
    return float(sum(size for _, size in _tensors(op)))


def _largest_bytes(op: Op) -> float:
    return float(max((size for _, size in _tensors(op)), default=0))
