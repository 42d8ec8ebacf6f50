"""From a user module to the objects that a training step needs."""

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright.errors import SpecError
from meshwright.memory.offload.budget import host_share
from meshwright.memory.offload.host import HostLink
from meshwright.memory.offload.states import build_streamed_optimizer
from meshwright.memory.offload.weights import OffloadedWeights
from meshwright.mesh import Mesh
from meshwright.modules.build_program import build_chain_program, build_module_program
from meshwright.modules.chain import Chain
from meshwright.modules.module_program import Loss
from meshwright.optim.build import build_optimizer
from meshwright.optim.ema import Ema
from meshwright.optim.user_optimizer import replace_parameters
from meshwright.parallel.program import Program
from meshwright.parallel.shards import full_parameter_of
from meshwright.precision.loss_scale import LossScale
from meshwright.precision.policy import prepare_device
from meshwright.spec import OptimSpec
from meshwright.spec.modules import FitSpec, LoopSpec, ModuleSpec
from meshwright.spec.violations import nearest
from meshwright.train.step import Training


def require_directory(directory: str | Path | None) -> None:
    """Refuse an empty path, which would mean the current directory."""
    if directory is not None and not str(directory).strip():
        raise SpecError("the path is empty", where="directory", hint="name a directory, or leave it out")


def require_module(model: object) -> None:
    """Refuse an object that is not a module before its parameters are read."""
    if not isinstance(model, nn.Module):
        raise SpecError(
            f"{type(model).__name__} is not an nn.Module", where="model", hint="pass a module instance"
        )


def build_module_training(
    model: nn.Module | Chain, loss: Loss, spec: FitSpec, mesh: Mesh, batch: Any = None
) -> Training:
    """The module, changed in place, with its program, optimizer and loss scale; all ranks call it.

    `batch` is a micro-batch on the CPU, needed where pp splits the module or cp shards its sequences.
    """
    chain, weights = model if isinstance(model, Chain) else Chain(model), _host(spec, mesh)
    _require_groups(chain.model, spec.optim)
    if chain.order is not None:
        chain.parts()  # wrong names are an error with one stage too
    if spec.parallel.num_stages > 1:
        prepare_device(spec.precision, mesh.device, deterministic=spec.deterministic)
        program: Program = build_chain_program(chain, loss, spec, mesh, batch, weights.link)
    else:
        program = _build_program(chain.model, loss, spec, mesh, weights, batch)
    return _training(program, _our_optimizer(program, spec, spec.optim, weights), spec, mesh, weights)


def build_loop_training(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, spec: LoopSpec, mesh: Mesh
) -> Training:
    """The same for a loop that calls the module itself and may have its own optimizer; all ranks call it."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    weights = _host(spec, mesh)
    program = _build_program(model, _no_loss, spec, mesh, weights, None)
    if spec.optim is not None:
        _require_groups(model, spec.optim)
        return _training(program, _our_optimizer(program, spec, spec.optim, weights), spec, mesh, weights)
    assert optimizer is not None
    shards = {one.name: one.shard for one in program.shards}
    shard_of = {parameter: shards[name] for parameter, name in names.items()}
    replace_parameters(optimizer, shard_of, is_sharded=spec.parallel.zero > 0 or spec.parallel.tp > 1)
    return _training(program, optimizer, spec, mesh, weights)


def _host(spec: ModuleSpec, mesh: Mesh) -> OffloadedWeights:
    """The link to host memory; how much of it a module needs is known only as it runs."""
    return OffloadedWeights(HostLink(mesh.device, limit_bytes=host_share() if spec.memory.offload else None))


def _build_program(
    model: nn.Module, loss: Loss, spec: ModuleSpec, mesh: Mesh, weights: OffloadedWeights, batch: Any
) -> Program:
    prepare_device(spec.precision, mesh.device, deterministic=spec.deterministic)
    return build_module_program(model, loss, spec, mesh, weights.link, batch)


def _no_loss(model: Any, batch: Any) -> Any:
    raise AssertionError("a user's own loop computes its loss itself")


def _our_optimizer(
    program: Program, spec: ModuleSpec, optim: OptimSpec, weights: OffloadedWeights
) -> torch.optim.Optimizer:
    trainable = [one for one in program.shards if one.parameter.requires_grad]
    shards = {one.name: one.shard for one in trainable}
    full_parameters = {one.name: full_parameter_of(one) for one in trainable}
    if "optimizer" not in spec.memory.offload:
        return build_optimizer(shards, optim, full_parameters)
    return build_streamed_optimizer(shards, optim, full_parameters, weights=weights, with_states=True)


def _require_groups(model: nn.Module, optim: OptimSpec) -> None:
    """Refuse a group that matches no parameter; the names of a module are known only now."""
    names = [name for name, _ in model.named_parameters()]
    for index, group in enumerate(optim.groups):
        if not any(fnmatchcase(name, group.pattern) for name in names):
            raise SpecError(
                f"pattern {group.pattern!r} matches no parameter",
                where=f"optim.groups.{index}.pattern",
                hint=nearest(group.pattern, names) or f"names are like {names[0]!r}",
            )


def _training(
    program: Program,
    optimizer: torch.optim.Optimizer,
    spec: ModuleSpec,
    mesh: Mesh,
    weights: OffloadedWeights,
) -> Training:
    limits = getattr(spec, "optim", None) or spec
    assert isinstance(limits, OptimSpec | LoopSpec)  # how gradients are clipped and weights averaged
    shards = {one.name: one.shard for one in program.shards if one.parameter.requires_grad}
    return Training(
        program=program,
        optimizer=optimizer,
        device=mesh.device,
        weights=weights,
        max_grad_norm=limits.max_grad_norm,
        loss_scale=LossScale.start(spec.precision.loss_scale) if spec.precision.loss_scale else None,
        ema=Ema(shards, limits.ema_decay) if limits.ema_decay is not None else None,
    )
