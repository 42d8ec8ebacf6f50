"""fp8 matmuls in the linears of a stage, with scales that do not depend on the layout.

A per-tensor scale needs the amax of the full tensor, so the amax is all-reduced (MAX) over the ranks that
hold its shards (n scalars in one all-reduce of a few bytes):

    column-wise   x[B, S_cp, D]        W[N_tp, D]   dy[B, S_cp, N_tp]
    row-wise      x[B, S_cp, K_tp]     W[D, K_tp]   dy[B, S_cp, D]

dp ranks hold other micro-batches, which are other tensors. Under ZeRO-3 the matmul sees the gathered weight.
Blockwise scales need no all-reduce: a block lies on one rank.

Linears that share their input (q, k, v; gate, up) become one fused matmul. For routed experts see
`fp8_experts.py`. fp8 pays for wide layers on
devices with fp8 tensor cores, in compiled blocks.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from torch import nn
from torch.distributed import ProcessGroup

from meshwright.hardware.simulated_device import SimulatedDevice
from meshwright.mesh import Mesh
from meshwright.models.decoder import Decoder
from meshwright.models.layers.attention import Attention
from meshwright.models.layers.fused import linears_sharing_input
from meshwright.models.layers.fused_fp8 import Fp8GateUp, Fp8QkvProjections
from meshwright.models.layers.linear import Linear, QkvProjections
from meshwright.models.layers.matmul import Matmul
from meshwright.models.layers.mlp import GateUp, SwiGlu
from meshwright.ops.sharded import local
from meshwright.parallel.fp8_experts import ExpertSite, apply_fp8_experts, expert_sites
from meshwright.precision.fp8.cached_weights import CachedFp8Weight
from meshwright.precision.fp8.delayed import Fp8Scales
from meshwright.precision.fp8.linear import NO_AMAX_GROUPS, AmaxGroups, Fp8Matmul
from meshwright.precision.fp8.matmul import is_native
from meshwright.precision.fp8.recipes import RECIPES
from meshwright.precision.policy import autocast_dtype, weight_dtype
from meshwright.spec import RunSpec
from meshwright.spec.fp8 import fp8_experts, fp8_layers, fp8_weights
from meshwright.spec.placement import tp_dim


def apply_fp8(model: Decoder, run: RunSpec, mesh: Mesh, simulated: SimulatedDevice | None = None) -> None:
    """Replace the matmuls of the linears and experts that `spec/fp8.py` selects."""
    if run.precision.fp8 is None:
        return
    apply_fp8_experts(model, run, mesh, simulated)
    native = is_native(RECIPES[run.precision.fp8.recipe], mesh.device, simulated)
    chosen = {weight.name for layer in fp8_layers(run) for weight in fp8_weights(run, layer)}
    names = {
        linear: name
        for name, linear in model.named_modules()
        if isinstance(linear, Linear) and f"{name}.weight" in chosen
    }
    alone = set(names)
    for module in model.modules():
        linears = linears_sharing_input(module)
        if linears and alone.issuperset(linears):
            matmul = _fp8_matmul(run, mesh, names[linears[0]], linears, native=native)
            if isinstance(module, Attention):
                module.qkv = Fp8QkvProjections(matmul)
            elif isinstance(module, SwiGlu):
                module.gate_up = Fp8GateUp(matmul)
            alone.difference_update(linears)
    for linear in alone:
        linear.matmul = _fp8_matmul(run, mesh, names[linear], [linear], native=native)


def _fp8_matmul(run: RunSpec, mesh: Mesh, name: str, linears: Sequence[Linear], *, native: bool) -> Fp8Matmul:
    """The fp8 matmul of linears that tp shards alike; `name` is the name of one of them."""
    fp8 = run.precision.fp8
    assert fp8 is not None
    recipe, shapes = RECIPES[fp8.recipe], [local(linear.weight).shape for linear in linears]
    is_cached = fp8.cast_weights == "per_step"
    return Fp8Matmul(
        fp8.recipe,
        dtype=autocast_dtype(run.precision) or weight_dtype(run.precision),
        native=native and autocast_dtype(run.precision) is not None,
        amax_groups=amax_groups(f"{name}.weight", mesh) if recipe.token_block is None else NO_AMAX_GROUPS,
        cached_weight=CachedFp8Weight(fp8.recipe, sum(rows for rows, _ in shapes), shapes[0][1])
        if is_cached
        else None,
        scales=Fp8Scales() if recipe.is_delayed else None,
    )


def amax_groups(weight: str, mesh: Mesh) -> AmaxGroups:
    """The groups over which the operands of one linear, and so their per-tensor amax, are sharded."""
    tp, cp = _group(mesh, "tp"), _group(mesh, "cp")
    is_column_wise = tp_dim(weight, mesh.parallel) == 0
    return AmaxGroups(
        x=cp if is_column_wise else tp + cp, weight=tp, gradient=tp + cp if is_column_wise else cp
    )


def _group(mesh: Mesh, axis: str) -> tuple[ProcessGroup, ...]:
    return (mesh.group(axis),) if getattr(mesh.parallel, axis) > 1 else ()


def fp8_blocks(run: RunSpec) -> list[int]:
    """The blocks of the full model that have an fp8 linear or experts in fp8."""
    return [layer for layer in fp8_layers(run) if fp8_weights(run, layer) or fp8_experts(run, layer)]


_PLAIN = {"qkv": QkvProjections, "gate_up": GateUp, "matmul": Matmul}


class Fp8Site(NamedTuple):
    """An fp8 matmul and the module attribute that holds it, by itself or inside a fused projection."""

    name: str
    module: nn.Module
    attribute: str
    linears: tuple[Linear, ...]

    @property
    def installed(self) -> nn.Module:
        """The module that the attribute holds now."""
        return getattr(self.module, self.attribute)

    @property
    def matmul(self) -> Fp8Matmul:
        """The fp8 matmul itself."""
        found = self.installed
        return found if isinstance(found, Fp8Matmul) else found.matmul  # pyright: ignore[reportReturnType]

    def install(self, replacement: nn.Module | None) -> None:
        """Set the attribute to another module; None installs the plain one without fp8."""
        setattr(self.module, self.attribute, replacement or _PLAIN[self.attribute]())


def fp8_sites(stages: Iterable[nn.Module]) -> list[Fp8Site]:
    """All fp8 matmuls of linears, in the order of the model; not those of weights stored in fp8."""
    found = [named for stage in stages for named in stage.named_modules()]
    return [
        Fp8Site(f"{name}.{attribute}", module, attribute, linears)
        for name, module in found
        for attribute, linears in _fp8_attributes(module)
        if linears[0].weight_scale is None
    ]


def _fp8_attributes(module: nn.Module) -> list[tuple[str, tuple[Linear, ...]]]:
    if isinstance(module, Attention) and isinstance(module.qkv, Fp8QkvProjections):
        return [("qkv", linears_sharing_input(module))]
    if isinstance(module, SwiGlu) and isinstance(module.gate_up, Fp8GateUp):
        return [("gate_up", linears_sharing_input(module))]
    if isinstance(module, Linear) and isinstance(module.matmul, Fp8Matmul):
        return [("matmul", (module,))]
    return []


def fall_back(stages: Iterable[nn.Module], layers: Collection[int]) -> None:
    """Switch the linears and experts of these blocks, where a stage has them, back to plain matmuls."""
    for site in _all_sites(stages):
        if int(site.name.split(".")[1]) in layers:
            site.install(None)


@contextmanager
def in_bf16(stages: Iterable[nn.Module]) -> Iterator[None]:
    """A context in which every linear and every expert has a plain matmul."""
    found = [(site, site.installed) for site in _all_sites(stages)]
    for site, _ in found:
        site.install(None)
    yield
    for site, installed in found:
        site.install(installed)


def _all_sites(stages: Iterable[nn.Module]) -> list[Fp8Site | ExpertSite]:
    stages = list(stages)
    return [*fp8_sites(stages), *expert_sites(stages)]
