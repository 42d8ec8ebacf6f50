"""Adapters beside the linears of a stage, and frozen weights.

Frozen weights have no gradient, no weight-gradient matmul, no optimizer state and no master copy; only the
gradient of their input is computed.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.models.decoder import Decoder, Head
from meshwright.models.layers.adapter import Adapter, AdapterDropout, ExpertAdapter
from meshwright.models.layers.embedding import Table
from meshwright.models.layers.linear import Linear
from meshwright.models.layers.moe import PROJECTIONS, Experts, Nf4GroupedLinears
from meshwright.models.layers.token_rows import TokenRows
from meshwright.ops.nf4 import BLOCK, dequantise_nf4
from meshwright.ops.nf4_nested import NestedTable, unnest_absmax
from meshwright.ops.sharded import local_slices
from meshwright.precision.fp8.stored import Fp8Scale, decode_stored
from meshwright.precision.policy import weight_dtype
from meshwright.spec import AdapterSpec, RunSpec
from meshwright.spec.adapter import (
    CHANGE,
    NF4_FORMATS,
    TOKEN_ROWS,
    AdaptedMatrix,
    adapted_matrices,
    is_trained,
    token_changes,
)
from meshwright.spec.fp8 import fp8_base_groups


def prepare_trained(model: Decoder, run: RunSpec) -> None:
    """Attach the run's adapters to a stage on the meta device, and freeze what the run does not train."""
    if run.adapter is not None:
        attach_adapters(model, run.adapter, weight_dtype(run.precision))
    for name, parameter in model.named_parameters():
        if is_trained(name, run.adapter, run.train_only):
            continue
        parameter.requires_grad_(False)
        if run.adapter is not None:
            parameter.data = parameter.data.to(_base_dtype(run, parameter.dtype))
    if run.adapter is not None and run.adapter.base in NF4_FORMATS:
        for module in model.blocks.modules():
            if isinstance(module, Linear):
                _pack(module, is_nested=run.adapter.base == "nf4_nested")
            elif isinstance(module, Experts):
                _pack_experts(module, is_nested=run.adapter.base == "nf4_nested")
    if run.adapter is not None and run.adapter.base == "fp8":
        _store_in_fp8(model)


def _base_dtype(run: RunSpec, usual: torch.dtype) -> torch.dtype:
    """The dtype of frozen parameters; with NF4 that of parameters which are not packed."""
    is_bf16 = run.adapter is not None and run.adapter.base != "weights" and run.precision.compute == "bf16"
    return torch.bfloat16 if is_bf16 else usual


def _pack(linear: Linear, *, is_nested: bool) -> None:
    """Give a frozen linear on the meta device the parameters of an NF4 weight."""
    linear.weight, linear.weight_absmax = _packed(linear.weight, is_nested=is_nested)
    if is_nested:
        linear.weight_nested = NestedTable(*linear.weight_absmax.shape)
    if linear.adapter is not None:
        linear.adapter.is_fused = linear.adapter.can_be_fused


def _pack_experts(experts: Experts, *, is_nested: bool) -> None:
    """Give frozen experts on the meta device the parameters of NF4 weights."""
    tables = nn.ModuleDict()
    for projection in PROJECTIONS:
        packed, absmax = _packed(getattr(experts, projection), is_nested=is_nested)
        setattr(experts, projection, packed)
        setattr(experts, f"{projection}_absmax", absmax)
        tables[projection] = NestedTable(*absmax.shape)
    experts.nested = tables if is_nested else None
    experts.gate_up_matmul, experts.down_matmul = Nf4GroupedLinears(), Nf4GroupedLinears()


def _packed(weight: Tensor, *, is_nested: bool) -> tuple[nn.Parameter, nn.Parameter]:
    """The packed bytes of a weight in NF4 and the bits or codes of its absmax, on the meta device."""
    *rows, width = weight.shape
    with torch.device("meta"):
        packed = torch.empty(*rows, width // 2, dtype=torch.uint8)
        absmax = torch.empty(*rows, width // BLOCK, dtype=torch.uint8 if is_nested else torch.int32)
    return nn.Parameter(packed, requires_grad=False), nn.Parameter(absmax, requires_grad=False)


def _store_in_fp8(model: Decoder) -> None:
    """Give frozen linears and experts on the meta device parameters of one byte per weight, and scales."""
    linears: dict[str, nn.Module] = dict(model.named_modules())
    for group in fp8_base_groups(model.spec):
        scale = Fp8Scale()
        for weight in group:
            linear = linears.get(weight.name.removesuffix(".weight"))
            if isinstance(linear, Linear):  # else it is in another stage, or stacked experts
                linear.weight, linear.weight_scale = _stored(linear.weight), scale
    for experts in [module for module in model.modules() if isinstance(module, Experts)]:
        for projection in PROJECTIONS:
            setattr(experts, projection, _stored(getattr(experts, projection)))
        scales = {projection: Fp8Scale(len(getattr(experts, projection))) for projection in PROJECTIONS}
        experts.scales = nn.ModuleDict(scales)


def _stored(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(weight, dtype=torch.uint8), requires_grad=False)


def attach_adapters(model: Decoder, adapter: AdapterSpec, dtype: torch.dtype) -> None:
    """Attach adapters to the linears and experts that a stage has, on the meta device."""
    modules: dict[str, nn.Module] = dict(model.named_modules())
    for matrix in adapted_matrices(model.spec, adapter):
        module = modules.get(matrix.weight.name.rpartition(".")[0])
        if isinstance(module, Table) and not model.has_embedding:
            continue  # the copy of a tied head, in a stage that looks nothing up
        with torch.device("meta"):
            if isinstance(module, Linear | Table | Head):
                module.adapter = _linear_adapter(matrix, adapter).to(dtype)
            elif isinstance(module, Experts):
                adapters = module.adapters or torch.nn.ModuleDict()
                adapters[matrix.weight.name.rpartition(".")[2]] = _expert_adapter(matrix, adapter).to(dtype)
                module.adapters = adapters
    for change in token_changes(model.spec, adapter):
        module = modules.get(change.name.removesuffix(f".{TOKEN_ROWS}.{CHANGE}"))
        with torch.device("meta"):
            if isinstance(module, Table | Head):
                module.token_rows = TokenRows(adapter.tokens, model.spec.width).to(dtype)
    model.adapter = adapter


def _linear_adapter(matrix: AdaptedMatrix, adapter: AdapterSpec) -> Adapter:
    out_width, in_width = matrix.weight.shape
    return Adapter(
        in_width,
        out_width,
        rank=matrix.rank,
        scale=matrix.scale,
        dropout=_dropout(matrix, adapter),
        has_magnitude=adapter.kind == "dora",
    )


def _dropout(matrix: AdaptedMatrix, adapter: AdapterSpec) -> AdapterDropout | None:
    """The dropout of an adapter; an embedding has none, as its input are tokens."""
    if not adapter.dropout or matrix.weight.kind == "embedding":
        return None
    layer = f"blocks.{matrix.weight.layer}."
    return AdapterDropout(adapter.dropout, matrix.weight.name.removeprefix(layer))


def _expert_adapter(matrix: AdaptedMatrix, adapter: AdapterSpec) -> ExpertAdapter:
    num_experts, out_width, in_width = matrix.weight.shape
    return ExpertAdapter(
        num_experts,
        in_width,
        out_width,
        rank=matrix.rank,
        scale=matrix.scale,
        dropout=_dropout(matrix, adapter),
        has_magnitude=matrix.kind == "dora",
    )


@torch.no_grad()
def set_magnitudes(model: nn.Module) -> None:
    """Set the magnitudes of DoRA to the row norms of the frozen weights, as B is zero at the start.

    Called after the weights are initialised or loaded. A rank sets its own rows; communicates over tp.
    """
    for experts in [module for module in model.modules() if isinstance(module, Experts)]:
        _set_expert_magnitudes(experts)
    linears: list[Linear] = [module for module in model.modules() if isinstance(module, Linear)]
    for linear in linears:
        adapter = linear.adapter
        if adapter is None or adapter.magnitude is None:
            continue
        weight = frozen_shard(linear, adapter.magnitude.dtype)
        squares = weight.to(adapter.magnitude.dtype).square().sum(1)
        if adapter.input_group is not None:
            dist.all_reduce(squares, group=adapter.input_group)
        _shard(adapter.magnitude).copy_(squares.sqrt())


def _set_expert_magnitudes(experts: Experts) -> None:
    """Set the magnitudes of the experts' adapters, where they have some."""
    for projection, adapter in (experts.adapters or {}).items():
        assert isinstance(adapter, ExpertAdapter)
        magnitude = adapter.magnitude
        if magnitude is None:
            continue
        weight = _expert_shard(experts, projection, magnitude.dtype)
        squares = weight.to(magnitude.dtype).square().sum(-1)
        if adapter.input_group is not None:
            dist.all_reduce(squares, group=adapter.input_group)
        _shard(magnitude).copy_(squares.sqrt())


def _expert_shard(experts: Experts, projection: str, dtype: torch.dtype) -> Tensor:
    """This rank's shard of a projection; NF4 and stored fp8 are dequantised to `dtype`."""
    weight, absmax = getattr(experts, projection), getattr(experts, f"{projection}_absmax")
    scale, nested = experts.scale_of(projection), experts.nested_of(projection)
    if scale is not None:
        return decode_stored(_shard(weight), scale.value[scale.index(local_slices(weight)[0])], dtype)
    if absmax is None:
        return _shard(weight)
    return _dequantised(weight, absmax, nested, dtype)


def frozen_shard(linear: Linear, dtype: torch.dtype) -> Tensor:
    """This rank's shard of a frozen weight; NF4 and stored fp8 are dequantised to `dtype`."""
    weight = _shard(linear.weight)
    if linear.weight_scale is not None:
        return decode_stored(weight, linear.weight_scale.value, dtype)
    if linear.weight_absmax is None:
        return weight
    return _dequantised(linear.weight, linear.weight_absmax, linear.weight_nested, dtype)


def _dequantised(packed: Tensor, absmax: Tensor, nested: NestedTable | None, dtype: torch.dtype) -> Tensor:
    """This rank's shard of an NF4 weight."""
    bits = _shard(absmax)
    if nested is not None:
        bits = unnest_absmax(bits, nested.value, nested.place_of(local_slices(absmax))).view(torch.int32)
    return dequantise_nf4(_shard(packed), bits, dtype)


def place_scales(model: nn.Module) -> None:
    """Set which parts of packed weights this rank computes with, where their scales depend on it.

    Called after tp and ep sharded them and before ZeRO-3 does, which gathers what it shards.
    """
    for module in model.modules():
        if isinstance(module, Linear) and module.weight_nested is not None:
            assert module.weight_absmax is not None
            module.weight_nested.set_place(local_slices(module.weight_absmax))
        if isinstance(module, Experts):
            _place_expert_scales(module)


def _place_expert_scales(experts: Experts) -> None:
    for projection in PROJECTIONS:
        scale, nested = experts.scale_of(projection), experts.nested_of(projection)
        if nested is not None:
            nested.set_place(local_slices(getattr(experts, f"{projection}_absmax")))
        if scale is not None:
            scale.set_experts(local_slices(getattr(experts, projection))[0])


def _shard(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
