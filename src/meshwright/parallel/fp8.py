"""fp8 products in the linears of a stage, with scales that do not depend on the layout.

A scale for a whole tensor needs the largest magnitude of the whole tensor, so it is agreed over the ranks
that hold its parts (n scalars in one all-reduce of a few bytes):

    cut by columns   x[B, S_cp, D]        W[N_tp, D]   dy[B, S_cp, N_tp]
    cut by rows      x[B, S_cp, K_tp]     W[D, K_tp]   dy[B, S_cp, D]

dp ranks hold other micro-batches, which are other tensors. Under ZeRO-3 the product sees the gathered
weight. Scales of blocks need no agreement: a block lies on one rank.
"""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed import ProcessGroup

from meshwright.mesh import Mesh
from meshwright.models.decoder import Decoder
from meshwright.models.layers.linear import Linear, Product
from meshwright.precision.fp8.delayed import DelayedProduct
from meshwright.precision.fp8.linear import UNCUT, Cuts, Fp8Product
from meshwright.precision.fp8.matmul import is_native
from meshwright.precision.fp8.recipes import RECIPES
from meshwright.precision.policy import lower_dtype, weight_dtype
from meshwright.spec import Fp8Spec, RunSpec
from meshwright.spec.fp8 import fp8_layers, fp8_weights
from meshwright.spec.placement import tp_dim


def apply_fp8(model: Decoder, run: RunSpec, mesh: Mesh) -> None:
    """Replace the products that the table names."""
    if run.precision.fp8 is None:
        return
    recipe = RECIPES[run.precision.fp8.recipe]
    dtype = lower_dtype(run.precision) or weight_dtype(run.precision)
    native = is_native(recipe, mesh.device) and lower_dtype(run.precision) is not None
    chosen = {weight.name for layer in fp8_layers(run) for weight in fp8_weights(run, layer)}
    for name, linear in model.named_modules():
        if isinstance(linear, Linear) and f"{name}.weight" in chosen:
            cuts = _cuts(f"{name}.weight", mesh) if recipe.token_block is None else UNCUT
            linear.product = _product(run.precision.fp8, dtype=dtype, native=native, cuts=cuts)


def _product(fp8: Fp8Spec, *, dtype: torch.dtype, native: bool, cuts: Cuts) -> nn.Module:
    if RECIPES[fp8.recipe].is_delayed:
        steps = fp8.history_steps
        return DelayedProduct(fp8.recipe, dtype=dtype, native=native, cuts=cuts, history_steps=steps)
    return Fp8Product(fp8.recipe, dtype=dtype, native=native, cuts=cuts)


def _cuts(weight: str, mesh: Mesh) -> Cuts:
    """Over which groups the operands of one linear are cut."""
    tp, cp = _group(mesh, "tp"), _group(mesh, "cp")
    is_by_columns = tp_dim(weight, mesh.parallel) == 0
    return Cuts(x=cp if is_by_columns else tp + cp, weight=tp, gradient=tp + cp if is_by_columns else cp)


def _group(mesh: Mesh, axis: str) -> tuple[ProcessGroup, ...]:
    return (mesh.group(axis),) if getattr(mesh.parallel, axis) > 1 else ()


def fp8_blocks(run: RunSpec) -> list[int]:
    """The blocks of the whole model that have an fp8 linear."""
    return [layer for layer in fp8_layers(run) if fp8_weights(run, layer)]


def fall_back(stages: Iterable[nn.Module], layers: Collection[int]) -> None:
    """Give the linears of these blocks, where a stage has them, plain products again."""
    for linear in _narrow_linears(stages, layers):
        linear.product = Product()


@contextmanager
def in_bf16(stages: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, every linear has a plain product."""
    linears = _narrow_linears(stages, None)
    products = [linear.product for linear in linears]
    for linear in linears:
        linear.product = Product()
    yield
    for linear, product in zip(linears, products, strict=True):
        linear.product = product


def _narrow_linears(stages: Iterable[nn.Module], layers: Collection[int] | None) -> list[Linear]:
    return [
        module
        for stage in stages
        for name, module in stage.named_modules()
        if isinstance(module, Linear) and isinstance(module.product, (Fp8Product, DelayedProduct))
        if layers is None or int(name.split(".")[1]) in layers
    ]
