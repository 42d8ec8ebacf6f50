"""fp8 grouped matmuls in the routed experts of a stage, with scales that do not depend on the layout.

A row of x or dy has scales of its own, and a row is on one rank under dp, cp and ep. Only etp shards rows:

    gate, up   x[N, D]      W[E_ep, F_tp, D]   dy[N, F_tp]
    down       x[N, F_tp]   W[E_ep, D, F_tp]   dy[N, D]

There the amax of each row of F_tp values, and of each expert, is all-reduced (MAX) over tp: one number per
row beside the F_tp that it is the amax of. Blockwise scales need no all-reduce: a block lies on one rank.
"""

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor, nn

from meshwright.hardware.simulated_device import SimulatedDevice
from meshwright.mesh import Mesh
from meshwright.models.layers.experts_fp8 import Fp8GroupedLinears
from meshwright.models.layers.moe import Experts, GroupedLinears
from meshwright.ops.sharded import local
from meshwright.precision.fp8.expert_weights import CachedFp8Experts
from meshwright.precision.fp8.grouped_matmul import is_grouped_native
from meshwright.precision.fp8.linear import NO_AMAX_GROUPS, AmaxGroups
from meshwright.precision.fp8.recipes import RECIPES
from meshwright.precision.policy import autocast_dtype, weight_dtype
from meshwright.spec import RunSpec
from meshwright.spec.fp8 import fp8_experts, fp8_layers

_WEIGHTS = {"gate_up_matmul": ("gate", "up"), "down_matmul": ("down",)}
"""Attributes of `Experts` that hold grouped matmuls, and the parameters that each of them takes."""


class ExpertSite(NamedTuple):
    """An fp8 grouped matmul and the attribute of `Experts` that holds it."""

    name: str
    experts: Experts
    attribute: str

    @property
    def installed(self) -> nn.Module:
        """The module that the attribute holds now."""
        return getattr(self.experts, self.attribute)

    @property
    def matmul(self) -> Fp8GroupedLinears:
        """The fp8 matmul itself."""
        return self.installed  # pyright: ignore[reportReturnType]

    @property
    def weights(self) -> list[Tensor]:
        """This rank's weights of the matmul."""
        return [local(getattr(self.experts, name)) for name in _WEIGHTS[self.attribute]]

    def install(self, replacement: nn.Module | None) -> None:
        """Set the attribute to another module; None installs the plain one without fp8."""
        setattr(self.experts, self.attribute, replacement or GroupedLinears())


def expert_sites(stages: Iterable[nn.Module]) -> list[ExpertSite]:
    """All fp8 grouped matmuls, in the order of the model."""
    return [
        ExpertSite(f"{name}.{attribute}", module, attribute)
        for stage in stages
        for name, module in stage.named_modules()
        if isinstance(module, Experts)
        for attribute in _WEIGHTS
        if isinstance(getattr(module, attribute), Fp8GroupedLinears)
    ]


def apply_fp8_experts(
    model: nn.Module, run: RunSpec, mesh: Mesh, simulated: SimulatedDevice | None = None
) -> None:
    """Replace the grouped matmuls of the experts that `spec/fp8.py` selects."""
    chosen = {weight.name for layer in fp8_layers(run) for weight in fp8_experts(run, layer)}
    for name, module in model.named_modules():
        if isinstance(module, Experts) and f"{name}.gate" in chosen:
            for attribute in _WEIGHTS:
                matmul = _grouped_linears(run, mesh, ExpertSite(name, module, attribute), simulated)
                setattr(module, attribute, matmul)


def _grouped_linears(
    run: RunSpec, mesh: Mesh, site: ExpertSite, simulated: SimulatedDevice | None
) -> Fp8GroupedLinears:
    fp8, dtype = run.precision.fp8, autocast_dtype(run.precision)
    assert fp8 is not None
    recipe, is_cached = RECIPES[fp8.recipe], fp8.cast_weights == "per_step"
    return Fp8GroupedLinears(
        fp8.recipe,
        dtype=dtype or weight_dtype(run.precision),
        native=dtype is not None and is_grouped_native(recipe, mesh.device, simulated),
        amax_groups=expert_amax_groups(site.attribute, mesh)
        if recipe.token_block is None
        else NO_AMAX_GROUPS,
        cached_weights=[CachedFp8Experts(fp8.recipe, each.shape) for each in site.weights]
        if is_cached
        else (),
    )


def expert_amax_groups(attribute: str, mesh: Mesh) -> AmaxGroups:
    """The groups over which the rows, and so the amax of each, are sharded: by etp alone."""
    if mesh.parallel.etp == 1:
        return NO_AMAX_GROUPS
    tp = (mesh.group("tp"),)
    if attribute == "down_matmul":
        return AmaxGroups(x=tp, weight=tp)
    return AmaxGroups(weight=tp, gradient=tp)
