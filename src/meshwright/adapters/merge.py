"""Merges adapters into their frozen weights: W + scale B A in fp32, rounded once by whoever writes it."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from meshwright.ops.nf4 import dequantise_nf4, quantise_nf4
from meshwright.ops.nf4_nested import NestedPlace, nest_absmax, unnest_absmax
from meshwright.precision.fp8.stored import decode_stored, encode_stored, stored_scale, weight_amax
from meshwright.spec import AdapterSpec, ModelSpec
from meshwright.spec.adapter import (
    CHANGE,
    EMBEDDING,
    HEAD,
    LORA_A,
    LORA_B,
    MAGNITUDE,
    NF4_FORMATS,
    TOKEN_ROWS,
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
    """A full weight, or stacked ones, as a run in NF4 computes with it."""
    packed, absmax = quantise_nf4(weight)
    if is_nested:
        codes, table = nest_absmax(absmax.view(torch.float32))
        place = NestedPlace(0, 0, codes.shape[-1], 0, codes.shape[:-2].numel())
        absmax = unnest_absmax(codes, table, place).view(torch.int32)
    return dequantise_nf4(packed, absmax, weight.dtype)


def with_token_rows(weight: Tensor, tokens: Tensor, change: Tensor) -> Tensor:
    """A table in fp32 (fp64 for fp64) with the changes of single tokens' rows added."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    return weight.to(dtype).index_add(0, tokens, change.to(dtype))


def merged_model(model: ModelSpec, adapter: AdapterSpec) -> ModelSpec:
    """The model of merged weights: with an adapter on one end, tied embedding and head become two tables."""
    at_ends = any(one.weight.layer is None for one in adapted_matrices(model, adapter))
    return model.with_(tied_head=False) if at_ends and model.tied_head else model


class QuantisedTensors(Mapping[str, Tensor]):
    """The tensors of a base model as a run in NF4 or fp8 computes with them: linears, experts are rounded."""

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
        amax = torch.stack([weight_amax(self._base[each]) for each in self._group[name]]).amax(0)
        scale = stored_scale(amax)
        return decode_stored(encode_stored(weight, scale), scale, weight.dtype)

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
        self.model = merged_model(model, adapter)
        self._is_untied = self.model != model
        self._tokens = torch.tensor(sorted(adapter.tokens))

    def __getitem__(self, name: str) -> Tensor:
        weight, matrix = self._frozen(name), self.matrices.get(name)
        if matrix is not None:
            return merged_weight(weight, matrix, self.adapters)
        change = self.adapters.get(f"{name.removesuffix('weight')}{TOKEN_ROWS}.{CHANGE}")
        return weight if change is None else with_token_rows(weight, self._tokens, change)

    def _frozen(self, name: str) -> Tensor:
        """A tensor without adapters; those that were trained in full beside adapters are saved with them."""
        name = EMBEDDING if self._is_untied and name == HEAD else name
        return self.adapters[name] if name in self.adapters else self.base[name]

    def __iter__(self) -> Iterator[str]:
        return iter([*self.base, *([HEAD] if self._is_untied else [])])

    def __len__(self) -> int:
        return len(self.base) + self._is_untied

    def changed_share(self, dtype: torch.dtype) -> float:
        """The share of the adapted matrices' weights that differ from the base after rounding to `dtype`.

        A change below half a unit in the last place of a 16-bit weight is lost.
        """
        changed = total = 0
        for name in self.matrices:
            base = self._frozen(name)
            changed += int((self[name].to(dtype) != base.to(dtype)).sum())
            total += base.numel()
        return changed / max(1, total)
