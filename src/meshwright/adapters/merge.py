"""Merges adapters into their frozen weights: W + scale B A in fp32, rounded once by whoever writes it."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from meshwright.ops.nf4 import dequantise_nf4, quantise_nf4
from meshwright.ops.nf4_nested import NestedPlace, nest_absmax, unnest_absmax
from meshwright.precision.fp8.stored import decode_stored, encode_stored, stored_scale
from meshwright.spec import AdapterSpec, ModelSpec
from meshwright.spec.adapter import (
    LORA_A,
    LORA_B,
    MAGNITUDE,
    NF4_FORMATS,
    AdaptedMatrix,
    BaseFormat,
    adaptable,
    adapted_matrices,
)
from meshwright.spec.fp8 import fp8_base_groups


def merged_weight(weight: Tensor, matrix: AdaptedMatrix, adapters: Mapping[str, Tensor]) -> Tensor:
    """The merged weight in fp32 (fp64 for fp64); with dora its rows have the trained magnitudes."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    a, b = (adapters[f"{matrix.name}.{own}"].to(dtype) for own in (LORA_A, LORA_B))
    total = weight.to(dtype) + matrix.scale * (b @ a)
    if matrix.kind != "dora":
        return total
    magnitude = adapters[f"{matrix.name}.{MAGNITUDE}"].to(dtype)
    return total * (magnitude / torch.linalg.vector_norm(total, dim=-1))[..., None]


def rounded_to_nf4(weight: Tensor, *, is_nested: bool) -> Tensor:
    """A full weight as a run in NF4 computes with it."""
    packed, absmax = quantise_nf4(weight)
    if is_nested:
        codes, table = nest_absmax(absmax.view(torch.float32))
        absmax = unnest_absmax(codes, table, NestedPlace(0, 0, codes.shape[1])).view(torch.int32)
    return dequantise_nf4(packed, absmax, weight.dtype)


class QuantisedTensors(Mapping[str, Tensor]):
    """The tensors of a base model as a run in NF4 or fp8 computes with them: its linears are rounded."""

    def __init__(self, base: Mapping[str, Tensor], model: ModelSpec, base_format: BaseFormat) -> None:
        self._base, self._format, self._is_nf4 = base, base_format, base_format in NF4_FORMATS
        groups = fp8_base_groups(model) if base_format == "fp8" else []
        self._group = {one.name: [each.name for each in group] for group in groups for one in group}
        self._packed = {one.name for one in adaptable(model)} if self._is_nf4 else set(self._group)

    def __getitem__(self, name: str) -> Tensor:
        weight = self._base[name]
        if name not in self._packed:
            return weight
        if self._is_nf4:
            return rounded_to_nf4(weight, is_nested=self._format == "nf4_nested")
        amax = torch.stack([self._base[each].abs().amax().float() for each in self._group[name]]).amax()
        return decode_stored(encode_stored(weight, stored_scale(amax)), stored_scale(amax), weight.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._base)

    def __len__(self) -> int:
        return len(self._base)


class MergedTensors(Mapping[str, Tensor]):
    """The tensors of a base model with its adapters merged in; a tensor is read and merged on access."""

    def __init__(
        self,
        base: Mapping[str, Tensor],
        adapters: Mapping[str, Tensor],
        model: ModelSpec,
        adapter: AdapterSpec,
    ) -> None:
        self.base, self.adapters = base, adapters
        self.matrices = {one.weight.name: one for one in adapted_matrices(model, adapter)}

    def __getitem__(self, name: str) -> Tensor:
        # Parameters that were trained in full beside the adapters are saved with them.
        weight = self.adapters[name] if name in self.adapters else self.base[name]
        matrix = self.matrices.get(name)
        return weight if matrix is None else merged_weight(weight, matrix, self.adapters)

    def __iter__(self) -> Iterator[str]:
        return iter(self.base)

    def __len__(self) -> int:
        return len(self.base)

    def changed_share(self, dtype: torch.dtype) -> float:
        """The share of the adapted matrices' weights that differ from the base after rounding to `dtype`.

        A change below half a unit in the last place of a 16-bit weight is lost.
        """
        changed = total = 0
        for name in self.matrices:
            base = self.base[name]
            changed += int((self[name].to(dtype) != base.to(dtype)).sum())
            total += base.numel()
        return changed / max(1, total)
