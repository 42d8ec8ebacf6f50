"""From a module that is not ours to the things a step works on."""

from typing import Any

import torch
from torch import nn

from meshwright.mesh import Mesh
from meshwright.optim.adopt import adopt
from meshwright.optim.build import build_optimizer
from meshwright.optim.ema import Ema
from meshwright.parallel.foreign import Chain, Loss, build_chain_program, build_module_program
from meshwright.parallel.owned import whole_of
from meshwright.parallel.program import Program
from meshwright.precision.loss_scale import LossScale
from meshwright.precision.policy import prepare_device
from meshwright.spec import OptimSpec
from meshwright.spec.foreign import FitSpec, LoopSpec, ModuleSpec
from meshwright.train.step import Training


def build_module_training(
    model: nn.Module | Chain, loss: Loss, spec: FitSpec, mesh: Mesh, batch: Any = None
) -> Training:
    """The module, changed in place, and what belongs to it; all ranks call it.

    `batch` is a micro-batch on the CPU, needed where a pipeline cuts the module.
    """
    chain = model if isinstance(model, Chain) else Chain(model)
    if spec.parallel.num_stages > 1:
        prepare_device(spec.precision, mesh.device, deterministic=spec.deterministic)
        program: Program = build_chain_program(chain, loss, spec, mesh, batch)
    else:
        program = _build_program(chain.model, loss, spec, mesh)
    return _training(program, _own_optimizer(program, spec.optim), spec, mesh, spec.optim)


def build_loop_training(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, spec: LoopSpec, mesh: Mesh
) -> Training:
    """The same for a loop that calls the module itself and may bring its optimizer; all ranks call it."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    program = _build_program(model, _no_loss, spec, mesh)
    if spec.optim is not None:
        return _training(program, _own_optimizer(program, spec.optim), spec, mesh, spec.optim)
    assert optimizer is not None
    shards = {one.name: one.shard for one in program.owned}
    shard_of = {parameter: shards[name] for parameter, name in names.items()}
    adopt(optimizer, shard_of, is_cut=spec.parallel.zero > 0)
    return _training(program, optimizer, spec, mesh, spec)


def _build_program(model: nn.Module, loss: Loss, spec: ModuleSpec, mesh: Mesh) -> Program:
    prepare_device(spec.precision, mesh.device, deterministic=spec.deterministic)
    return build_module_program(model, loss, spec, mesh)


def _no_loss(model: Any, batch: Any) -> Any:
    raise AssertionError("a loop of one's own computes its loss itself")


def _own_optimizer(program: Program, optim: OptimSpec) -> torch.optim.Optimizer:
    trainable = [one for one in program.owned if one.parameter.requires_grad]
    shards = {one.name: one.shard for one in trainable}
    return build_optimizer(shards, optim, {one.name: whole_of(one) for one in trainable})


def _training(
    program: Program,
    optimizer: torch.optim.Optimizer,
    spec: ModuleSpec,
    mesh: Mesh,
    limits: OptimSpec | LoopSpec,
) -> Training:
    """`limits` says how gradients are clipped and weights averaged."""
    shards = {one.name: one.shard for one in program.owned if one.parameter.requires_grad}
    return Training(
        program=program,
        optimizer=optimizer,
        device=mesh.device,
        max_grad_norm=limits.max_grad_norm,
        loss_scale=LossScale.start(spec.precision.loss_scale) if spec.precision.loss_scale else None,
        ema=Ema(shards, limits.ema_decay) if limits.ema_decay is not None else None,
    )
