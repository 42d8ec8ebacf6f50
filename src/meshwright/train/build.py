"""From a RunSpec to the things a step works on."""

import os

import torch
import torch.distributed as dist

from meshwright.data.batches import Batches, build_batches
from meshwright.memory.offload.budget import host_budget
from meshwright.memory.offload.host import HostLink
from meshwright.memory.offload.states import build_streamed_optimizer
from meshwright.memory.offload.weights import HostedWeights
from meshwright.mesh import Mesh
from meshwright.models.initialise import initialise
from meshwright.optim.build import build_optimizer
from meshwright.optim.ema import Ema
from meshwright.parallel.apply import Fill, build_program
from meshwright.parallel.expert_balance import ExpertBalance
from meshwright.parallel.fp8_scales import DelayedScales
from meshwright.parallel.program import Program
from meshwright.parallel.shards import full_parameter_of
from meshwright.precision.loss_scale import LossScale
from meshwright.precision.policy import prepare_device, wide_dtype
from meshwright.spec import RunSpec
from meshwright.train.step import Training


def build_training(run: RunSpec, mesh: Mesh, *, fill: Fill = initialise) -> Training:
    """Model, optimizer and what belongs to them, at the initial weights; all ranks call it.

    `fill` gives each stage its memory and weights.
    """
    if run.deterministic and mesh.device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it first starts
    prepare_device(run.precision, mesh.device, deterministic=run.deterministic)
    offload = run.memory.offload
    weights = HostedWeights(HostLink(mesh.device, limit_bytes=host_budget(run) if offload else None))
    program = build_program(run, mesh, weights, fill=fill)
    trainable = [one for one in program.shards if one.parameter.requires_grad]
    shards = {one.name: one.shard for one in trainable}
    wholes = {one.name: full_parameter_of(one) for one in trainable}
    optimizer = (
        build_streamed_optimizer(
            shards,
            run.optim,
            wholes,
            weights=weights,
            weight_format=run.precision.weights,
            with_states="optimizer" in offload,
        )
        if weights.blocks or ("optimizer" in offload and not run.has_shards_on_host)
        else build_optimizer(shards, run.optim, wholes, weights=run.precision.weights)
    )
    return Training(
        program=program,
        optimizer=optimizer,
        device=mesh.device,
        weights=weights,
        max_grad_norm=run.optim.max_grad_norm,
        loss_scale=LossScale.start(run.precision.loss_scale) if run.precision.loss_scale else None,
        ema=Ema(shards, run.optim.ema_decay) if run.optim.ema_decay is not None else None,
        experts=ExpertBalance(run.model, program.stages, mesh) if run.model.moe else None,
        fp8_scales=_delayed_scales(run, mesh, program),
    )


def _delayed_scales(run: RunSpec, mesh: Mesh, program: Program) -> DelayedScales | None:
    fp8 = run.precision.fp8
    if fp8 is None or fp8.recipe != "delayed":
        return None
    return DelayedScales(program.stages, mesh, history_steps=fp8.history_steps)


def build_data(run: RunSpec, mesh: Mesh) -> Batches:
    """This rank's training batches."""
    return build_batches(
        run.data,
        seed=run.seed,
        vocab_size=run.model.vocab_size,
        dp_rank=mesh.dp_rank,
        dp_size=mesh.parallel.dp,
        device=mesh.device,
        dtype=wide_dtype(run.precision),
    )


def seed_step(seed: int, step: int) -> None:
    """Dropout's randomness: a function of seed, step and rank, so a resume needs no generator state.

    Every region with dropout is cut over dp, cp and tp (sequence parallel), so no two ranks share a mask.
    """
    torch.manual_seed((seed * 1_000_003 + step) * 65_537 + dist.get_rank())
