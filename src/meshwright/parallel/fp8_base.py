"""fp8 matmuls of frozen linears and experts whose weights are stored in fp8 (`adapter.base=fp8`).

The bytes are sharded as the weights would be: over tp and ep by the placement table, and over rows by ZeRO-3,
which gathers one byte per weight. The amax of x and dy is all-reduced as in `fp8.py` and `fp8_experts.py`;
that of the weights was, when they were loaded.
"""

from meshwright.hardware.simulated_device import SimulatedDevice
from meshwright.mesh import Mesh
from meshwright.models.decoder import Decoder
from meshwright.models.layers.attention import Attention
from meshwright.models.layers.experts_stored import StoredFp8GroupedLinears
from meshwright.models.layers.fused import linears_sharing_input
from meshwright.models.layers.fused_fp8 import Fp8GateUp, Fp8QkvProjections
from meshwright.models.layers.linear import Linear
from meshwright.models.layers.mlp import SwiGlu
from meshwright.models.layers.moe import Experts
from meshwright.parallel.fp8 import amax_groups
from meshwright.parallel.fp8_experts import expert_amax_groups
from meshwright.precision.fp8.grouped_matmul import is_grouped_native
from meshwright.precision.fp8.matmul import is_native
from meshwright.precision.fp8.recipes import RECIPES
from meshwright.precision.fp8.stored import RECIPE, Fp8Scale, StoredFp8Matmul
from meshwright.precision.policy import autocast_dtype, weight_dtype
from meshwright.spec import RunSpec


def apply_fp8_base(
    model: Decoder, run: RunSpec, mesh: Mesh, simulated: SimulatedDevice | None = None
) -> None:
    """Replace the matmuls of the linears and experts that are stored in fp8."""
    names = {linear: name for name, linear in model.named_modules() if isinstance(linear, Linear)}
    lower = autocast_dtype(run.precision)
    native = lower is not None and is_native(RECIPES[RECIPE], mesh.device, simulated)

    def matmul_of(linear: Linear, scale: Fp8Scale) -> StoredFp8Matmul:
        groups = amax_groups(f"{names[linear]}.weight", mesh)
        dtype = lower or weight_dtype(run.precision)
        return StoredFp8Matmul(scale, dtype=dtype, native=native, amax_groups=groups)

    for module in list(model.modules()):
        linears = linears_sharing_input(module)
        if isinstance(module, Linear) and module.weight_scale is not None:
            module.matmul = matmul_of(module, module.weight_scale)
        elif linears and linears[0].weight_scale is not None:
            fused = matmul_of(linears[0], linears[0].weight_scale)
            if isinstance(module, Attention):
                module.qkv = Fp8QkvProjections(fused)
            elif isinstance(module, SwiGlu):
                module.gate_up = Fp8GateUp(fused)
        elif isinstance(module, Experts) and module.scales is not None:
            module.gate_up_matmul, module.down_matmul = (
                _grouped_linears(run, mesh, each, simulated) for each in ("gate_up_matmul", "down_matmul")
            )


def _grouped_linears(
    run: RunSpec, mesh: Mesh, attribute: str, simulated: SimulatedDevice | None
) -> StoredFp8GroupedLinears:
    lower = autocast_dtype(run.precision)
    return StoredFp8GroupedLinears(
        dtype=lower or weight_dtype(run.precision),
        native=lower is not None and is_grouped_native(RECIPES[RECIPE], mesh.device, simulated),
        amax_groups=expert_amax_groups(attribute, mesh),
    )
