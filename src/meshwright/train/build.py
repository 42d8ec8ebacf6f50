"""Builds from a RunSpec what the loop and a step work on."""

import os
from functools import partial

import torch
import torch.distributed as dist

from meshwright.checkpoint.initial import load_base, load_initial_adapters, load_initial_weights
from meshwright.data.batches import Batches, build_batches
from meshwright.errors import SpecError
from meshwright.memory.offload.budget import host_budget
from meshwright.memory.offload.host import HostLink
from meshwright.memory.offload.states import build_streamed_optimizer
from meshwright.memory.offload.weights import OffloadedWeights
from meshwright.mesh import Mesh, World, build_mesh
from meshwright.models.initialise import initialise
from meshwright.optim.build import build_optimizer
from meshwright.optim.ema import Ema
from meshwright.parallel.apply import Fill, build_program
from meshwright.parallel.expert_balance import ExpertBalance
from meshwright.parallel.fp8_scales import DelayedScales
from meshwright.parallel.program import Program
from meshwright.parallel.shards import full_parameter_of
from meshwright.parallel.simulation import NOTHING_SIMULATED, Simulation
from meshwright.precision.loss_scale import LossScale
from meshwright.precision.policy import full_precision_dtype, prepare_device
from meshwright.spec import RunSpec
from meshwright.train.evaluate import evaluate
from meshwright.train.fp8_comparison import Fp8Comparison
from meshwright.train.histogram_probe import HistogramProbe
from meshwright.train.job import Job
from meshwright.train.noise_scale import measure_half_batch
from meshwright.train.reference import Reference
from meshwright.train.step import Training
from meshwright.train.workload import token_workload


def build_job(run: RunSpec, world: World) -> Job:
    """Mesh, model, optimizer and data of a run on this rank; all ranks call it."""
    mesh = build_mesh(run.parallel, world)
    if run.cuda_graphs and mesh.device.type != "cuda":
        fact = f"cuda_graphs=true on {mesh.device.type}"
        raise SpecError(fact, where="cuda_graphs", hint="leave cuda_graphs out, or train on a CUDA device")
    # The base of adapters is always loaded: to draw it at random first would take minutes.
    adapted = run.adapter is not None
    fill = partial(initialise, leaves_frozen=True) if adapted else initialise
    training, batches = build_training(run, mesh, fill=fill), build_data(run, mesh)
    reference = Reference(run, training.program, mesh, batches)
    return Job(
        run=run,
        mesh=mesh,
        training=training,
        batches=batches,
        workload=token_workload(run),
        load_initial_weights=lambda: (load_initial_adapters if adapted else load_initial_weights)(
            run, training
        ),
        prepare_data=reference.prepare,
        evaluate=lambda: evaluate(run, training.program, mesh, reference=reference.table),
        measure_half_batch=lambda batch: measure_half_batch(training, batch, mesh),
        fp8_comparison=Fp8Comparison(run, training, mesh) if run.precision.fp8 else None,
        histograms=HistogramProbe(run, training, mesh) if run.observe.histograms else None,
        load_base=(lambda: load_base(run, training)) if adapted else None,
    )


def build_training(
    run: RunSpec, mesh: Mesh, *, fill: Fill = initialise, simulation: Simulation = NOTHING_SIMULATED
) -> Training:
    """Model, optimizer and what a step needs beside them, at the initial weights; all ranks call it.

    `fill` gives each stage its memory and weights; `simulation` is given by a rehearsal.
    """
    if run.deterministic and mesh.device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it first starts
    prepare_device(run.precision, mesh.device, deterministic=run.deterministic)
    offload = run.memory.offload
    weights = OffloadedWeights(_host_link(run, mesh, simulation))
    program = build_program(run, mesh, weights, fill=fill, simulation=simulation)
    trainable = [one for one in program.shards if one.parameter.requires_grad]
    shards = {one.name: one.shard for one in trainable}
    full = {one.name: full_parameter_of(one) for one in trainable}
    optimizer = (
        build_streamed_optimizer(
            shards,
            run.optim,
            full,
            weights=weights,
            weight_format=run.precision.weights,
            with_states="optimizer" in offload,
            simulated=simulation.device,
        )
        if weights.blocks or ("optimizer" in offload and not run.has_shards_on_host)
        else build_optimizer(
            shards, run.optim, full, weights=run.precision.weights, simulated=simulation.device
        )
    )
    return Training(
        program=program,
        optimizer=optimizer,
        device=mesh.device,
        weights=weights,
        max_grad_norm=run.optim.max_grad_norm,
        loss_scale=LossScale.start(run.precision.loss_scale) if run.precision.loss_scale else None,
        ema=Ema(shards, run.optim.ema_decay) if run.optim.ema_decay is not None else None,
        experts=ExpertBalance(run.model, program.stages, mesh, is_frozen=run.adapter is not None)
        if run.model.moe
        else None,
        fp8_scales=_delayed_scales(run, mesh, program),
        has_pairs=run.preference is not None,
    )


def _host_link(run: RunSpec, mesh: Mesh, simulation: Simulation) -> HostLink:
    if simulation.allocate_host is not None:
        return HostLink(mesh.device, allocate=simulation.allocate_host)
    return HostLink(mesh.device, limit_bytes=host_budget(run) if run.memory.offload else None)


def _delayed_scales(run: RunSpec, mesh: Mesh, program: Program) -> DelayedScales | None:
    fp8 = run.precision.fp8
    if fp8 is None or fp8.recipe != "delayed":
        return None
    return DelayedScales(program.stages, mesh, history_steps=fp8.history_steps)


def build_data(run: RunSpec, mesh: Mesh) -> Batches:
    """The training batches of this rank."""
    return build_batches(
        run.data,
        seed=run.seed,
        vocab_size=run.model.vocab_size,
        dp_rank=mesh.dp_rank,
        dp_size=mesh.parallel.dp,
        device=mesh.device,
        dtype=full_precision_dtype(run.precision),
        has_dropout=run.adapter is not None and run.adapter.dropout > 0,
    )


def seed_step(seed: int, step: int) -> None:
    """Seed dropout of the model for a step by seed, step and rank, so a resume needs no generator state.

    Its activations are sharded over dp, cp and tp (sequence parallel): no two ranks share a mask. Dropout of
    adapters draws nothing: its masks are computed from keys of the batch.
    """
    torch.manual_seed((seed * 1_000_003 + step) * 65_537 + dist.get_rank())
