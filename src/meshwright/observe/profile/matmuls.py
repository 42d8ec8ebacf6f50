"""The matmuls of a step by shape, and those that miss the tensor cores or their full rate, with the reason.

A matmul is eligible for tensor cores where its operands are fp8, 16-bit or fp32 (as TF32) and neither m nor n
is 1. It misses them where its kernel computes on the general cores, or where rows of an operand or of the
result are no multiple of 16 bytes: cuBLAS then falls back to kernels that load less at a time.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from meshwright.observe.profile.kernel_classes import MATMUL, uses_tensor_cores
from meshwright.observe.profile.operator_work import MatmulShape, matmul_shape
from meshwright.observe.profile.pieces import Piece
from meshwright.plan.time.kernels import (
    ALIGNED_BYTES,
    EARLIER_MISALIGNED,
    HALF_ALIGNED_BYTES,
    HOPPER_MISALIGNED,
    MisalignedRates,
)

ELIGIBLE = ("fp8", "bf16", "fp16", "fp32")
_TILE = 64
# A matmul with less of the FLOPs of its dtype is too small to be the reference of the others.
_REFERENCE_SHARE = 0.02
# How far the aligned matmuls of the alignment measurement are from their mean, as factors of their time.
_RATE_SPREAD = (0.85, 1.2)


@dataclass(frozen=True)
class MatmulRow:
    """All matmuls of one shape and dtype in a step."""

    shape: MatmulShape
    calls: float
    seconds: float
    on_tensor_cores: bool
    kernel: str
    """The kernel with most of the time."""

    @property
    def flops_per_second(self) -> float:
        """Achieved rate."""
        return self.shape.flops * self.calls / self.seconds if self.seconds else 0.0

    @property
    def is_eligible(self) -> bool:
        """Whether tensor cores could compute it."""
        return self.shape.dtype in ELIGIBLE and min(self.shape.m, self.shape.n) > 1

    @property
    def misaligned_bytes(self) -> int | None:
        """The row of an operand or of the result that is the least aligned; None where all are aligned."""
        odd = [size for size in self.shape.rows_bytes if size % ALIGNED_BYTES]
        return min(odd, key=lambda size: size % HALF_ALIGNED_BYTES == 0, default=None)


@dataclass(frozen=True)
class Missed:
    """An eligible matmul without the tensor cores' full rate, and what that costs in a step."""

    row: MatmulRow
    why: str
    low_seconds: float
    high_seconds: float
    """Bounds of the time that aligned dims, or another dtype, would save."""
    dims: tuple[int, ...] = ()
    """The dims that are not aligned."""

    @property
    def gain_seconds(self) -> float:
        """Expected time saved in a step."""
        return (self.low_seconds + self.high_seconds) / 2


def matmul_rows(pieces: Iterable[Piece], *, num_steps: int, is_cuda: bool) -> list[MatmulRow]:
    """The matmuls of a step by shape, the longest first."""
    groups: dict[MatmulShape, dict[str, float]] = {}
    calls: dict[MatmulShape, set[int]] = {}
    for piece in pieces:
        shape = matmul_shape(piece.op) if piece.op is not None and piece.kind == MATMUL else None
        if shape is None:
            continue
        by_name = groups.setdefault(shape, {})
        by_name[piece.name] = by_name.get(piece.name, 0.0) + piece.seconds
        calls.setdefault(shape, set()).add(id(piece.op))
    rows = [
        _row(shape, names, len(calls[shape]), num_steps, is_cuda=is_cuda) for shape, names in groups.items()
    ]
    return sorted(rows, key=lambda row: -row.seconds)


def _row(
    shape: MatmulShape, names: Mapping[str, float], calls: int, num_steps: int, *, is_cuda: bool
) -> MatmulRow:
    kernel = max(names, key=lambda name: names[name])
    seconds = sum(names.values()) / num_steps
    return MatmulRow(shape, calls / num_steps, seconds, is_cuda and uses_tensor_cores(kernel), kernel)


def missed_matmuls(rows: list[MatmulRow], *, is_hopper: bool) -> list[Missed]:
    """Eligible matmuls that do not reach the tensor cores' full rate, the most expensive first."""
    rates = HOPPER_MISALIGNED if is_hopper else EARLIER_MISALIGNED
    found = [one for row in rows if row.is_eligible and (one := _missed(row, rows, rates)) is not None]
    return sorted(found, key=lambda one: -one.gain_seconds)


def _missed(row: MatmulRow, rows: list[MatmulRow], rates: MisalignedRates) -> Missed | None:
    odd = row.misaligned_bytes
    if odd is not None:
        kind = "" if row.on_tensor_cores else "and its kernel is not on tensor cores; "
        why = f"{kind}a row has {odd} bytes, which is no multiple of {ALIGNED_BYTES}"
        low, high = _aligned_gain(row, rows, rates, odd)
        return Missed(row, why.removeprefix("and "), low, high, dims=_odd_dims(row))
    if row.on_tensor_cores:
        return None
    if row.shape.dtype == "fp32":
        return Missed(row, "fp32 runs on the general cores", 0.0, 0.0)
    return Missed(row, f"its kernel {row.kernel[:60]} is not one of tensor cores", 0.0, 0.0)


def _odd_dims(row: MatmulRow) -> tuple[int, ...]:
    """Dims whose rows are not aligned in the dtype of the matmul."""
    item = {"fp8": 1, "fp32": 4}.get(row.shape.dtype, 2)
    dims = dict.fromkeys((row.shape.n, row.shape.k, row.shape.m))
    odd = {size for size in row.shape.rows_bytes if size % ALIGNED_BYTES}
    return tuple(dim for dim in dims if dim * item in odd or (item == 1 and 2 * dim in odd))


def _aligned_gain(
    row: MatmulRow, rows: list[MatmulRow], rates: MisalignedRates, odd: int
) -> tuple[float, float]:
    """Bounds of the saving: by the measured rates of misaligned rows, and by aligned matmuls of the step."""
    slow = rates.half_aligned if odd % HALF_ALIGNED_BYTES == 0 else rates.odd_operand
    if odd % HALF_ALIGNED_BYTES and row.shape.rows_bytes[-1] % HALF_ALIGNED_BYTES:
        slow = rates.odd_result
    aligned = row.seconds * slow * _padded_flops(row) / row.shape.flops
    savings = [max(0.0, row.seconds - spread * aligned) for spread in _RATE_SPREAD]
    reference = _reference_rate(row, rows)
    if reference is not None:
        savings.append(max(0.0, row.seconds - _padded_flops(row) * row.calls / reference))
    return min(savings), max(savings)


def _padded_flops(row: MatmulRow) -> float:
    shape, odd = row.shape, _odd_dims(row)
    m, n, k = (-(-dim // _TILE) * _TILE if dim in odd else dim for dim in (shape.m, shape.n, shape.k))
    return 2.0 * shape.groups * m * n * k


def _reference_rate(row: MatmulRow, rows: list[MatmulRow]) -> float | None:
    """Rate of the aligned matmuls of the same dtype in this step; None where there are none of some size."""
    same = [one for one in rows if one.shape.dtype == row.shape.dtype and one.is_eligible]
    total = sum(one.shape.flops * one.calls for one in same)
    aligned = [
        one
        for one in same
        if one.misaligned_bytes is None
        and one.on_tensor_cores == (row.on_tensor_cores or one.on_tensor_cores)
        and one.shape.flops * one.calls >= _REFERENCE_SHARE * total
    ]
    seconds = sum(one.seconds for one in aligned)
    return sum(one.shape.flops * one.calls for one in aligned) / seconds if seconds else None
