"""Number formats of a run file as our runtime keeps them: bytes per parameter, and the share of fp8 layers.

    weights          weight   lower bits      gradients   moments
    fp32             4        -               4           8 (bf16: 4, adamw_8bit: 2)
    bf16_exact       2        2               4 or 2      as above
    bf16_stochastic  2        -               4 or 2      as above

AdamW's state takes 16 bytes per parameter at most, 10 with everything in bf16 and exact weights, 8 with
stochastically rounded weights, and 6 with 8-bit moments on top. Weights of fp8 linears that are cast once per
step take two bytes more.
"""

from dataclasses import replace

from meshwright.plan.framework import Framework, StateBytes, our_runtime
from meshwright.plan.workload.documents import documents_of
from meshwright.plan.workload.workload import WORKING_BYTES, Adapters, Precision, Workload
from meshwright.spec.adapter import (
    EMBEDDING,
    HEAD,
    NESTED_BLOCK,
    NF4_BLOCK,
    NF4_FORMATS,
    AdapterSpec,
    adaptable,
    adapter_parameters,
    is_trained,
    num_trained_parameters,
)
from meshwright.spec.fp8 import fp8_base_groups
from meshwright.spec.parameters import num_parameters
from meshwright.spec.precision import Fp8Spec, PrecisionSpec
from meshwright.spec.run import RunSpec

RECIPE_PRECISION: dict[str, Precision] = {
    "current": "fp8",
    "delayed": "fp8",
    "blockwise": "fp8",
    "mxfp8": "mxfp8",
}
# The gradient norm reads the gradients, and so does the update, which clips them in the same pass.
GRADIENT_PASSES = 2.0


def state_bytes(precision: PrecisionSpec) -> StateBytes:
    """Bytes per parameter without the optimizer's moments."""
    weight = 4.0 if precision.weights == "fp32" else 2.0
    gradient = 4.0 if precision.gradients == "fp32" else 2.0
    lower_bits = 2.0 if precision.weights == "bf16_exact" else 0.0
    working = WORKING_BYTES.get(precision.compute, 2.0)
    return StateBytes(
        weight=weight,
        gradient=gradient,
        master=lower_bits,
        gather=min(weight, working),
        reduce=gradient,
        update=2.0 * (weight + lower_bits) + GRADIENT_PASSES * gradient,
    )


def runtime_of(run: RunSpec) -> Framework:
    """Our own runtime in the formats of this run."""
    return replace(our_runtime(), state=state_bytes(run.precision))


def workload_of(run: RunSpec) -> Workload:
    """The workload of a run file."""
    fp8 = run.precision.fp8
    precision: Precision = run.precision.compute
    has_fp8_base = run.adapter is not None and run.adapter.base == "fp8"
    if fp8 is not None and precision == "bf16":
        precision = RECIPE_PRECISION[fp8.recipe]
    if has_fp8_base and precision == "bf16":
        precision = RECIPE_PRECISION["current"]
    return Workload(
        model=run.model,
        adapters=_adapters(run),
        sequence_length=run.data.sequence_length,
        precision=precision,
        optimizer=_optimizer(run),
        compiled=run.compile,
        documents=documents_of(run.data),
        data_bytes=run.data.on_device_bytes,
        fp8_recipe=fp8.recipe if fp8 is not None else "current",
        low_precision_experts=has_fp8_base or (fp8 is not None and fp8.experts),
        bf16_expert_gradients=True,
        low_precision_layers=_fp8_layers(run.model.num_layers, fp8),
        keeps_low_precision_weights=fp8 is not None and fp8.cast_weights == "per_step",
    )


def _adapters(run: RunSpec) -> Adapters | None:
    """Adapters of a run, with the exact share of trained parameters."""
    if run.adapter is None:
        return None
    total = num_parameters(run.model)
    added = sum(one.num_elements for one in adapter_parameters(run.model, run.adapter))
    in_full = num_trained_parameters(run.model, run.adapter, run.train_only) - added
    packed, has_dropout = _packed_bits(run.adapter), run.adapter.dropout > 0
    return Adapters(
        run.adapter.rank,
        _base_bits(run, run.adapter, packed, total - in_full),
        (added + in_full) / total,
        in_full / total,
        packed,
        table_bits=_table_bits(run, run.adapter),
        has_dropout=has_dropout,
        is_dora=run.adapter.kind == "dora",
        trains_head=is_trained(EMBEDDING if run.model.tied_head else HEAD, run.adapter, run.train_only),
    )


def _packed_bits(adapter: AdapterSpec) -> float | None:
    """Bits of a weight in NF4 or fp8 with its scales."""
    if adapter.base in NF4_FORMATS:
        absmax = 32.0 if adapter.base == "nf4" else 8.0 + 32.0 / NESTED_BLOCK
        return 4.0 + absmax / NF4_BLOCK
    return 8.0 if adapter.base == "fp8" else None


def _base_bits(run: RunSpec, adapter: AdapterSpec, packed_bits: float | None, num_frozen: int) -> float:
    """Mean bits of a frozen weight: NF4 and fp8 are for the linears and routed experts of the blocks."""
    bits = _table_bits(run, adapter)
    if packed_bits is None:
        return bits
    in_fp8 = [one for group in fp8_base_groups(run.model) for one in group]
    packed = in_fp8 if adapter.base == "fp8" else adaptable(run.model)
    share = sum(one.num_elements for one in packed) / num_frozen
    return share * packed_bits + (1.0 - share) * bits


def _table_bits(run: RunSpec, adapter: AdapterSpec) -> float:
    """Bits of a frozen weight that is not packed: 16 where a base computes in bf16, else those of the run."""
    is_bf16 = adapter.base != "weights" and run.precision.compute == "bf16"
    return 16.0 if is_bf16 or run.precision.weights != "fp32" else 32.0


def _fp8_layers(num_layers: int, fp8: Fp8Spec | None) -> float:
    """Share of the blocks whose linears run in fp8."""
    return max(num_layers - 2 * fp8.bf16_layers_each_end, 0) / num_layers if fp8 else 1.0


def _optimizer(run: RunSpec) -> str:
    """Key of the run's optimizer states in OPTIMIZER_BYTES."""
    optim = run.optim
    if optim.is_stateless:
        return "none"
    return "adamw_bf16" if optim.kind == "adamw" and optim.state == "bf16" else optim.kind
