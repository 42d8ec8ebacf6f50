"""From a RunSpec to the program of this rank: the order of transforms, written once.

1. meta       the stages of this rank are built on the meta device, so no rank ever holds the full model;
              adapters are attached there, and what is not trained is frozen
2. tp, ep     parameters are sharded first: every later transform sees the local layer
3. cp         replaces the attention core; touches no parameter
4. fp8        replaces the matmuls of linears; after tp, whose sharding decides where an amax is all-reduced
5. fusion     linears that share their input become one matmul, unless tp or fp8 replaced their matmuls
6. precision  the forward enters autocast itself, so a pipeline's backward runs outside it
7. recompute  (activation checkpointing) wraps blocks before compile and ZeRO-3, so both see the wrapped block
8. compile    block by block: one graph serves all layers, and the collectives of ZeRO-3 stay outside
9. offload    around the compiled block: copies to the host are not part of its graph
10. ZeRO-3    last, because it takes over the parameters as tp and ep have sharded them
11. memory    allocate and initialise: every tensor has its own seed, so the layout does not matter
"""

from collections.abc import Callable

import torch
from torch import nn

from meshwright.adapters.attach import place_scales, prepare_trained, set_magnitudes
from meshwright.data.microbatch import Microbatch
from meshwright.memory.offload.activations import ActivationOffload, apply_activation_offload
from meshwright.memory.offload.embedding import move_embedding
from meshwright.memory.offload.host import HostLink
from meshwright.memory.offload.weights import OffloadedWeights
from meshwright.memory.recompute import apply_recompute
from meshwright.memory.torch_checkpoint import silence_in_place_warning
from meshwright.mesh import Mesh
from meshwright.models.decoder import Decoder
from meshwright.models.initialise import initialise
from meshwright.models.layers.moe import Experts
from meshwright.ops.pair_loss import PairSettings
from meshwright.parallel.cp import apply_cp, cp_groups, shard_microbatch
from meshwright.parallel.cuda_graphs import GraphedProgram
from meshwright.parallel.dp import build_reducer, shard_fully
from meshwright.parallel.ep import apply_moe
from meshwright.parallel.fp8 import apply_fp8
from meshwright.parallel.fp8_base import apply_fp8_base
from meshwright.parallel.fp8_weights import Fp8Weights
from meshwright.parallel.fused_projections import fuse_projections, pack_fused_weights
from meshwright.parallel.pp import PipelineProgram, StageIO, StageModule, build_stages
from meshwright.parallel.pp.tied import TIED_NAMES, find_tied_embedding
from meshwright.parallel.program import Localise, Program, SingleProgram, scaled
from meshwright.parallel.shard_parameters import shard_parameters
from meshwright.parallel.shards import ParameterShard, parameter_shard, set_gradient_dtype
from meshwright.parallel.simulation import NOTHING_SIMULATED, Simulation, apply_simulation
from meshwright.parallel.tp import apply_tp
from meshwright.parallel.wgrad_fusion import build_wgrad_fusion
from meshwright.precision.policy import (
    autocast_dtype,
    compute_context,
    full_precision_dtype,
    gradient_dtype,
    weight_dtype,
)
from meshwright.spec import PrecisionSpec, RunSpec

Fill = Callable[..., None]
"""`initialise`, or a replacement: it gives a stage on the meta device memory and values."""


def build_program(
    run: RunSpec,
    mesh: Mesh,
    weights: OffloadedWeights | None = None,
    *,
    fill: Fill = initialise,
    simulation: Simulation = NOTHING_SIMULATED,
) -> Program:
    """The model of this rank at its initial weights, ready to accumulate gradients; all ranks call it."""
    weights = weights or OffloadedWeights(HostLink(mesh.device))
    dtype = weight_dtype(run.precision)
    stages = build_stages(
        run.model,
        run.parallel,
        mesh.coordinate("pp"),
        dtype=dtype,
        left_out_layers=simulation.left_out_layers,
    )
    for stage in stages:
        prepare_trained(stage.module, run)
        transform(stage.module, run, mesh, weights, simulation)
        allocate(stage.module, run, mesh, fill)
        set_magnitudes(stage.module)
        pack_fused_weights(stage.module)
        if "embedding" in run.memory.offload:
            move_embedding(stage.module, weights.link)
    shards = parameter_shards(stages, run, mesh)
    set_gradient_dtype(shards, gradient_dtype(run.precision), by_fsdp=run.parallel.zero == 3)
    weights.move_to_host()
    reducer = build_reducer(
        shards, mesh, roots=[stage.module for stage in stages], measures_waits=not run.compile
    )
    localise = build_localise(mesh)
    fp8_weights = Fp8Weights([stage.module for stage in stages], mesh)
    fp8_weights.cast()
    if run.parallel.num_stages == 1:
        model = stages[0].module
        is_graphed = run.cuda_graphs and mesh.device.type == "cuda"  # a rehearsal runs on the CPU
        return (GraphedProgram if is_graphed else SingleProgram)(
            model,
            shards=shards,
            reducer=reducer,
            wgrad_fusion=build_wgrad_fusion(model, run, reducer),
            fp8_weights=fp8_weights,
            localise=localise,
        )
    return PipelineProgram(
        stages,
        mesh=mesh,
        stage_io=stage_io(run),
        shards=shards,
        tied=find_tied_embedding(run.model, mesh, shards),
        reducer=reducer,
        fp8_weights=fp8_weights,
        localise=localise,
    )


def transform(
    model: Decoder, run: RunSpec, mesh: Mesh, weights: OffloadedWeights, simulation: Simulation
) -> None:
    """Apply steps 2 to 10 to one stage."""
    parallel = mesh.parallel
    apply_simulation(model, simulation)
    if parallel.tp > 1 or parallel.ep > 1:
        shard_parameters(model, mesh)
    place_scales(model)
    if parallel.tp > 1:
        apply_tp(model, mesh, regather=run.memory.regather_tp_inputs)
    apply_moe(model, mesh)
    if parallel.cp > 1:
        groups = cp_groups(mesh.group("cp"), parallel.cp_inner)
        apply_cp(model, groups, parallel.cp_kind, parallel.cp_stripes)
    if run.preference is not None and model.head is not None:
        cp_group = mesh.group("cp") if parallel.cp > 1 else None
        model.head.pair_settings = PairSettings(run.preference, cp_group)
    apply_fp8(model, run, mesh, simulation.device)
    apply_fp8_base(model, run, mesh, simulation.device)
    fuse_projections(model, run)
    apply_precision(model, run.precision, mesh.device)
    offload = ActivationOffload(weights.link) if "activations" in run.memory.offload else None
    silence_in_place_warning()
    apply_recompute(model.blocks.values(), run.memory, store=None if run.compile else offload)
    if run.compile:
        simulation.compile_blocks(model.blocks.values(), run.memory)
    if offload is not None:
        apply_activation_offload(model.blocks.values(), offload)
    if "parameters" in run.memory.offload and parallel.zero == 0:
        weights.apply(dict(model.blocks.items()))
    if parallel.zero == 3:
        experts: list[nn.Module] = [module for module in model.modules() if isinstance(module, Experts)]
        shard_fully(
            fsdp_units(model),
            model,
            mesh,
            experts=experts,
            lower=autocast_dtype(run.precision),
            gradients=gradient_dtype(run.precision),
            on_host=run.has_shards_on_host,
        )


def allocate(model: Decoder, run: RunSpec, mesh: Mesh, fill: Fill) -> None:
    """Apply step 11 to one stage: shards that live in host memory start there, buffers on the device."""
    if not run.has_shards_on_host:
        fill(model, run.seed, device=mesh.device)
        return
    fill(model, run.seed, device=torch.device("cpu"))
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(mesh.device))


def apply_precision(model: Decoder, precision: PrecisionSpec, device: torch.device) -> None:
    """Make the forward enter autocast; with bf16 the residual stream is bf16 too, at any ZeRO stage.

    With fp16 the residual stream stays fp32 where the weights are: sums over many layers can leave fp16's
    range.
    """
    context = compute_context(precision, device)
    if context is None:
        return
    model.forward = context(model.forward)
    if precision.compute == "bf16" and model.embedding is not None:
        model.embedding.register_forward_hook(lambda _module, _inputs, x_BSD: x_BSD.bfloat16())


def fsdp_units(model: Decoder) -> list[nn.Module]:
    """Modules that ZeRO-3 gathers one at a time; a tied embedding, used at both ends, stays with the root."""
    ends: list[nn.Module] = []
    if not model.spec.tied_head:
        ends = [end for end in (model.embedding, model.head) if end is not None]
    return [*model.blocks.values(), *ends]


def parameter_shards(stages: list[StageModule], run: RunSpec, mesh: Mesh) -> list[ParameterShard]:
    """The shards that this rank updates. Of an embedding tied across stages the norm counts one copy."""
    last = run.parallel.num_stages - 1
    return [
        parameter_shard(name, parameter, mesh, is_counted=name not in TIED_NAMES or 0 in (stage.index, last))
        for stage in stages
        for name, parameter in stage.module.named_parameters()
    ]


def stage_io(run: RunSpec) -> StageIO:
    """Inputs and outputs of the stages for one micro-batch: cp and tp (as sp) shard the sequence."""
    parallel, lower = run.parallel, autocast_dtype(run.precision)
    full = weight_dtype(run.precision)
    # fp16 keeps the stream in the weights' dtype, and the weights are fp16 only where ZeRO-3 gathers them so.
    is_lowered = run.precision.compute == "bf16" or parallel.zero == 3
    rows = run.data.microbatch_sequences, run.data.sequence_length // parallel.cp
    hidden = rows[0], rows[1] // parallel.tp, run.model.width
    return StageIO(
        tokens_BS=torch.empty(rows, dtype=torch.int64, device="meta"),
        x_BSD=torch.empty(
            hidden, dtype=lower if lower and is_lowered else full, device="meta", requires_grad=True
        ),
        loss=torch.empty((), dtype=full_precision_dtype(run.precision), device="meta", requires_grad=True),
    )


def build_localise(mesh: Mesh) -> Localise:
    """The function that takes this rank's part of a micro-batch; with cp its zig-zag shard."""
    cp, cp_rank, stripes = mesh.parallel.cp, mesh.coordinate("cp"), mesh.parallel.cp_stripes

    def localise(microbatch: Microbatch, scale: float) -> Microbatch:
        weighted = scaled(microbatch, scale)
        return shard_microbatch(weighted, cp_rank, cp, stripes) if cp > 1 else weighted

    return localise
