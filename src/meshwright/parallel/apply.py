"""From a RunSpec to the program of this rank: the order of transforms, written once.

1. meta       the stages of this rank are built without memory, so no rank ever holds the whole model
2. tp, ep     parameters are cut first: everything after sees the local layer
3. cp         replaces the attention core; touches no parameter
4. fp8        replaces the products of linears; after tp, whose cuts say over whom a scale is agreed
5. joint      linears that share their input become one product, unless tp or fp8 made them another
6. precision  the forward enters autocast itself, so a pipeline's backward runs outside it
7. recompute  wraps blocks before they are compiled or sharded, so that both see the wrapped block
8. compile    block by block: one graph serves all layers, and the collectives of ZeRO-3 stay outside
9. offload    around the compiled block: copies to the host are no part of its graph
10. ZeRO-3    last, because it takes over the parameters as what tp and ep left of them
11. memory    allocate and fill: every tensor has its own seed, so the layout does not matter
"""

from collections.abc import Callable

import torch
from torch import nn

from meshwright.data.batches import Microbatch
from meshwright.memory.offload.activations import ActivationOffload, apply_activation_offload
from meshwright.memory.offload.host import HostLink
from meshwright.memory.offload.weights import HostedWeights
from meshwright.memory.recompute import apply_recompute, vouch_for_blocks
from meshwright.mesh import Mesh
from meshwright.models.decoder import Decoder
from meshwright.models.initialise import initialise
from meshwright.models.layers.moe import Experts
from meshwright.parallel.compile import compile_blocks
from meshwright.parallel.cp import apply_cp, cp_groups, shard_microbatch
from meshwright.parallel.dp import build_reducer, shard_fully
from meshwright.parallel.ep import apply_moe
from meshwright.parallel.fp8 import apply_fp8
from meshwright.parallel.fp8_weights import Fp8Weights
from meshwright.parallel.fused_projections import fuse_projections, pack_fused_weights
from meshwright.parallel.pp import PipelineProgram, StageIO, StageModule, build_stages
from meshwright.parallel.pp.tied import TIED_NAME, tie
from meshwright.parallel.program import Localise, Program, SingleProgram, scaled
from meshwright.parallel.shard_parameters import shard_parameters
from meshwright.parallel.shards import ParameterShard, parameter_shard, set_gradient_dtype
from meshwright.parallel.tp import apply_tp
from meshwright.parallel.wgrad_fusion import build_wgrad_fusion
from meshwright.precision.policy import compute_context, gradient_dtype, lower_dtype, weight_dtype, wide_dtype
from meshwright.spec import PrecisionSpec, RunSpec

Fill = Callable[..., None]
"""`initialise`, or what takes its place: gives a stage on the meta device memory and values."""


def build_program(
    run: RunSpec, mesh: Mesh, weights: HostedWeights | None = None, *, fill: Fill = initialise
) -> Program:
    """The model of this rank at its initial weights, ready to accumulate gradients; all ranks call it."""
    weights = weights or HostedWeights(HostLink(mesh.device))
    dtype = weight_dtype(run.precision)
    stages = build_stages(run.model, run.parallel, mesh.coordinate("pp"), dtype=dtype)
    for stage in stages:
        transform(stage.module, run, mesh, weights)
        give_memory(stage.module, run, mesh, fill)
        pack_fused_weights(stage.module)
    shards = parameter_shards(stages, run, mesh)
    set_gradient_dtype(shards, gradient_dtype(run.precision), by_fsdp=run.parallel.zero == 3)
    weights.move_in()
    reducer = build_reducer(shards, mesh, roots=[stage.module for stage in stages])
    localise = localiser(mesh)
    narrow = Fp8Weights([stage.module for stage in stages], mesh)
    narrow.write()
    if run.parallel.num_stages == 1:
        model = stages[0].module
        summed = build_wgrad_fusion(model, run, reducer)
        return SingleProgram(
            model, shards=shards, reducer=reducer, summed=summed, narrow=narrow, localise=localise
        )
    return PipelineProgram(
        stages,
        mesh=mesh,
        border=stage_io(run),
        shards=shards,
        tied=tie(run.model, mesh, shards),
        reducer=reducer,
        narrow=narrow,
        localise=localise,
    )


def transform(model: Decoder, run: RunSpec, mesh: Mesh, weights: HostedWeights) -> None:
    """Steps 2 to 10 on one stage."""
    parallel = mesh.parallel
    if parallel.tp > 1 or parallel.ep > 1:
        shard_parameters(model, mesh)
    if parallel.tp > 1:
        apply_tp(model, mesh, regather=run.memory.regather)
    apply_moe(model, mesh)
    if parallel.cp > 1:
        apply_cp(model, cp_groups(mesh.group("cp"), parallel.cp_inner), parallel.cp_kind)
    apply_fp8(model, run, mesh)
    fuse_projections(model, run)
    compute_in(model, run.precision, mesh.device)
    offload = ActivationOffload(weights.link) if "activations" in run.memory.offload else None
    vouch_for_blocks()
    apply_recompute(model.blocks.values(), run.memory, keeper=None if run.compile else offload)
    if run.compile:
        compile_blocks(model.blocks.values(), run.memory)
    if offload is not None:
        apply_activation_offload(model.blocks.values(), offload)
    if "parameters" in run.memory.offload and parallel.zero == 0:
        weights.apply(dict(model.blocks.items()))
    if parallel.zero == 3:
        experts: list[nn.Module] = [module for module in model.modules() if isinstance(module, Experts)]
        shard_fully(
            sharding_units(model),
            model,
            mesh,
            experts=experts,
            lower=lower_dtype(run.precision),
            gradients=gradient_dtype(run.precision),
            on_host=run.has_shards_on_host,
        )


def give_memory(model: Decoder, run: RunSpec, mesh: Mesh, fill: Fill) -> None:
    """Step 11 on one stage: shards that live in host memory begin there; buffers are on the device."""
    if not run.has_shards_on_host:
        fill(model, run.seed, device=mesh.device)
        return
    fill(model, run.seed, device=torch.device("cpu"))
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(mesh.device))


def compute_in(model: Decoder, precision: PrecisionSpec, device: torch.device) -> None:
    """Make the forward enter autocast; with bf16 the residual stream is bf16 too, at any ZeRO stage.

    fp16 keeps it in fp32 where the weights are: sums over many layers can leave fp16's range.
    """
    context = compute_context(precision, device)
    if context is None:
        return
    model.forward = context(model.forward)
    if precision.compute == "bf16" and model.embedding is not None:
        model.embedding.register_forward_hook(lambda _module, _inputs, x_BSD: x_BSD.bfloat16())


def sharding_units(model: Decoder) -> list[nn.Module]:
    """Modules gathered one at a time under ZeRO-3; a tied table, used at both ends, stays with the root."""
    ends: list[nn.Module] = []
    if not model.spec.tied_head:
        ends = [end for end in (model.embedding, model.head) if end is not None]
    return [*model.blocks.values(), *ends]


def parameter_shards(stages: list[StageModule], run: RunSpec, mesh: Mesh) -> list[ParameterShard]:
    """What this rank updates. Of a table tied across stages only the first copy counts in the norm."""
    last = run.parallel.num_stages - 1
    return [
        parameter_shard(name, parameter, mesh, is_counted=name != TIED_NAME or stage.index == 0 or last == 0)
        for stage in stages
        for name, parameter in stage.module.named_parameters()
    ]


def stage_io(run: RunSpec) -> StageIO:
    """What one micro-batch looks like between stages: its rows are cut by cp and, as sp, by tp."""
    parallel, lower = run.parallel, lower_dtype(run.precision)
    wide = weight_dtype(run.precision)
    # fp16 keeps the stream in the weights' dtype, and those are fp16 only where ZeRO-3 gathers them so.
    is_lowered = run.precision.compute == "bf16" or parallel.zero == 3
    rows = run.data.microbatch_sequences, run.data.sequence_length // parallel.cp
    part = rows[0], rows[1] // parallel.tp, run.model.width
    return StageIO(
        tokens_BS=torch.empty(rows, dtype=torch.int64, device="meta"),
        x_BSD=torch.empty(
            part, dtype=lower if lower and is_lowered else wide, device="meta", requires_grad=True
        ),
        loss=torch.empty((), dtype=wide_dtype(run.precision), device="meta", requires_grad=True),
    )


def localiser(mesh: Mesh) -> Localise:
    """This rank's part of a micro-batch: whole sequences, or their zig-zag part under cp."""
    cp, cp_rank = mesh.parallel.cp, mesh.coordinate("cp")

    def localise(microbatch: Microbatch, scale: float) -> Microbatch:
        weighted = scaled(microbatch, scale)
        return shard_microbatch(weighted, cp_rank, cp) if cp > 1 else weighted

    return localise
