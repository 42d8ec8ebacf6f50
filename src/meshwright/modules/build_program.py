"""From any `nn.Module` to the program of this rank, in place: the user's object is the one that trains.

1. broadcast  one dtype; all ranks take the weights and buffers of rank 0
2. cp         replaces the attention of a Hugging Face decoder; verified on a batch before tp is applied
3. tp         by the plan that such a decoder publishes: every later transform sees the sharded layers
4. batch norm statistics over all ranks, if `sync_batch_norm` is set
5. precision  the forward enters autocast itself and returns its outputs in the weights' dtype
6. recompute  (activation checkpointing) wraps blocks before compile and ZeRO-3, so both see the wrapped block
7. compile    block by block
8. offload    of activations, around the compiled block: copies to the host are not part of its graph
9. ZeRO-3     last, because it takes over the parameters
"""

import warnings
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright.checkpoint.load_weights import persistent_buffers
from meshwright.memory.offload.activations import ActivationOffload, apply_activation_offload
from meshwright.memory.offload.host import HostLink
from meshwright.memory.recompute import apply_recompute
from meshwright.mesh import Mesh
from meshwright.modules.blocks import Blocks, find_blocks
from meshwright.modules.buffers import SharedBuffers
from meshwright.modules.chain import Chain, ChainStage, require_chain, split_into_stages
from meshwright.modules.chain_program import ChainProgram
from meshwright.modules.cp import apply_cp_attention, unsharded
from meshwright.modules.hf_layers import as_logits, is_published, replay_calls
from meshwright.modules.module_program import Loss, ModuleProgram
from meshwright.modules.tp import apply_tp_plan
from meshwright.modules.tp_plan import read_tp_plan
from meshwright.modules.unsupported import require_trainable
from meshwright.ops.batch_norm import batch_norms, synchronise
from meshwright.ops.trees import map_tensors
from meshwright.parallel.compile import compile_blocks
from meshwright.parallel.dp import build_reducer, shard_fully
from meshwright.parallel.shards import parameter_shard
from meshwright.precision.policy import autocast_dtype, compute_context, gradient_dtype, weight_dtype
from meshwright.spec.modules import FitSpec, ModuleSpec
from meshwright.spec.stages import stages_of_rank


def build_module_program(
    model: nn.Module, loss: Loss, spec: ModuleSpec, mesh: Mesh, link: HostLink, batch: Any = None
) -> ModuleProgram:
    """The module on this rank, ready to accumulate gradients; all ranks call it.

    `batch` is a micro-batch on which cp is verified.
    """
    blocks = find_blocks(model, spec.blocks)
    require_trainable(model, blocks, spec)
    styles = read_tp_plan(model, spec.parallel.tp) if spec.parallel.tp > 1 else {}
    broadcast_weights(model, spec)
    model.to(mesh.device)
    localise = apply_cp_attention(model, loss, batch, mesh) if spec.parallel.cp > 1 else unsharded
    apply_tp_plan(model, styles, mesh)
    transform(model, blocks, spec, mesh, link)
    shards = [parameter_shard(name, parameter, mesh) for name, parameter in model.named_parameters()]
    reducer = build_reducer(shards, mesh, roots=[model])
    return ModuleProgram(
        model,
        mesh=mesh,
        shards=shards,
        reducer=reducer,
        buffers=SharedBuffers([model], mesh),
        loss=lambda model, content: loss(model, localise(content)),
    )


def build_chain_program(
    chain: Chain, loss: Loss, spec: FitSpec, mesh: Mesh, batch: Any, link: HostLink
) -> ChainProgram:
    """This rank's stages of a module; `batch` is a micro-batch on which the chain is verified first."""
    blocks = find_blocks(chain.model, spec.blocks)
    require_trainable(chain.model, blocks, spec)
    styles = read_tp_plan(chain.model, spec.parallel.tp) if spec.parallel.tp > 1 else {}
    broadcast_weights(chain.model, spec)
    if is_published(chain.model):
        replay_calls(chain.model, chain.parts().items(), chain.inputs(batch))
        loss = as_logits(loss)
    part_io = require_chain(chain, loss, batch)
    apply_tp_plan(chain.model, styles, mesh)
    split = split_into_stages(chain.parts(), spec.parallel.num_stages)
    ends = [0, *accumulate(len(parts) for parts in split)]
    stages: dict[int, nn.Module] = {}
    for index in stages_of_rank(spec.parallel, mesh.coordinate("pp")):
        stages[index] = stage = ChainStage(split[index]).to(mesh.device)
        in_stage = {id(module) for module in stage.modules()}
        stage_blocks = {name: block for name, block in blocks.items() if id(block) in in_stage}
        transform(stage, stage_blocks, spec, mesh, link)
    shards = [
        parameter_shard(name, parameter, mesh)
        for stage in stages.values()
        for name, parameter in stage.named_parameters()
    ]
    return ChainProgram(
        chain,
        stages,
        [part_io[end] for end in ends],
        mesh=mesh,
        num_microbatches=spec.accumulation,
        shards=shards,
        reducer=build_reducer(shards, mesh, roots=list(stages.values())),
        loss=loss,
    )


def broadcast_weights(model: nn.Module, spec: ModuleSpec) -> None:
    """Apply step 1, on the module's own device: users need not seed alike on every rank."""
    model.to(dtype=weight_dtype(spec.precision))
    if dist.get_world_size() == 1:
        return
    tensors = [*model.parameters(), *persistent_buffers([model]).values()]
    with torch.no_grad():
        for tensor in tensors:
            dense = tensor.contiguous()
            dist.broadcast(dense, src=0)
            tensor.copy_(dense)


def transform(model: nn.Module, blocks: Blocks, spec: ModuleSpec, mesh: Mesh, link: HostLink) -> None:
    """Apply steps 4 to 9 to a module or to one stage of it."""
    norms = batch_norms(model)
    if spec.sync_batch_norm:
        for norm in norms:
            synchronise(norm, mesh.data.get_group("data"))
    apply_precision(model, spec, mesh)
    offload = ActivationOffload(link) if "activations" in spec.memory.offload else None
    apply_recompute(blocks.values(), spec.memory, store=None if spec.compile else offload)
    if spec.compile:
        compile_blocks(blocks.values(), spec.memory)
    if offload is not None:
        apply_activation_offload(blocks.values(), offload)
    if spec.parallel.zero == 3:
        _make_contiguous(model)
        # Batch norm needs its weights in the dtype of its statistics; autocast lowers all other weights.
        lower = None if norms else autocast_dtype(spec.precision)
        gradients = gradient_dtype(spec.precision)
        shard_fully(list(blocks.values()), model, mesh, experts=[], lower=lower, gradients=gradients)
        # An in-place change of an output would lose its gradient. Most linears return views; few users do it.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


def apply_precision(model: nn.Module, spec: ModuleSpec, mesh: Mesh) -> None:
    """Apply step 5. Outputs are returned in the weights' dtype: a loss in 16 bits would lose precision."""
    context = compute_context(spec.precision, mesh.device)
    if context is not None:
        model.forward = _with_output_dtype(context(model.forward), weight_dtype(spec.precision))


def _with_output_dtype(forward: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        outputs = forward(*args, **kwargs)
        return map_tensors(outputs, lambda one: one.to(dtype) if one.is_floating_point() else one)

    return wrapped


def _make_contiguous(model: nn.Module) -> None:
    """Make weights contiguous: FSDP2 refuses channels_last. Convolutions follow their input's format."""
    for parameter in model.parameters():
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
