"""From any `nn.Module` to the program of this rank, in place: the user's object is the one that trains.

1. agree      one dtype; all ranks take the first one's weights and buffers
2. cp         replaces the attention of a Hugging Face decoder; tried on the module while it is whole
3. tp         by the plan that such a decoder publishes: everything after sees the cut layers
4. batch norm statistics over all ranks, where asked
5. precision  the forward enters autocast itself and gives its outputs back in the weights' dtype
6. recompute  wraps blocks before they are compiled or sharded, so that both see the wrapped block
7. compile    block by block
8. offload    of activations, around the compiled block: copies to the host are no part of its graph
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
from meshwright.modules.chain import Chain, ChainStage, cut, require_chain
from meshwright.modules.chain_program import ChainProgram
from meshwright.modules.cp import apply_attention, keep_whole
from meshwright.modules.hf_layers import as_logits, is_published, replay_calls
from meshwright.modules.module_program import Loss, ModuleProgram
from meshwright.modules.tp import apply_plan
from meshwright.modules.tp_plan import read_plan
from meshwright.modules.unsupported import require_trainable
from meshwright.ops.batch_norm import batch_norms, synchronise
from meshwright.ops.trees import map_tensors
from meshwright.parallel.compile import compile_blocks
from meshwright.parallel.dp import build_reducer, shard_fully
from meshwright.parallel.shards import parameter_shard
from meshwright.precision.policy import compute_context, gradient_dtype, lower_dtype, weight_dtype
from meshwright.spec.modules import FitSpec, ModuleSpec
from meshwright.spec.stages import stages_of_rank


def build_module_program(
    model: nn.Module, loss: Loss, spec: ModuleSpec, mesh: Mesh, link: HostLink, batch: Any = None
) -> ModuleProgram:
    """The module on this rank, ready to accumulate gradients; all ranks call it.

    `batch` is a micro-batch, on which cp is tried.
    """
    blocks = find_blocks(model, spec.blocks)
    require_trainable(model, blocks, spec)
    styles = read_plan(model, spec.parallel.tp) if spec.parallel.tp > 1 else {}
    start_alike(model, spec)
    model.to(mesh.device)
    localise = apply_attention(model, loss, batch, mesh) if spec.parallel.cp > 1 else keep_whole
    apply_plan(model, styles, mesh)
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
    """This rank's stages of a module; `batch` is a micro-batch, on which the chain is tried first."""
    blocks = find_blocks(chain.model, spec.blocks)
    require_trainable(chain.model, blocks, spec)
    styles = read_plan(chain.model, spec.parallel.tp) if spec.parallel.tp > 1 else {}
    start_alike(chain.model, spec)
    if is_published(chain.model):
        replay_calls(chain.model, chain.parts().items(), chain.inputs(batch))
        loss = as_logits(loss)
    borders = require_chain(chain, loss, batch)
    apply_plan(chain.model, styles, mesh)
    cuts = cut(chain.parts(), spec.parallel.num_stages)
    ends = [0, *accumulate(len(parts) for parts in cuts)]
    stages: dict[int, nn.Module] = {}
    for index in stages_of_rank(spec.parallel, mesh.coordinate("pp")):
        stages[index] = stage = ChainStage(cuts[index]).to(mesh.device)
        held = {id(module) for module in stage.modules()}
        here = {name: block for name, block in blocks.items() if id(block) in held}
        transform(stage, here, spec, mesh, link)
    shards = [
        parameter_shard(name, parameter, mesh)
        for stage in stages.values()
        for name, parameter in stage.named_parameters()
    ]
    return ChainProgram(
        chain,
        stages,
        [borders[end] for end in ends],
        mesh=mesh,
        num_microbatches=spec.accumulation,
        shards=shards,
        reducer=build_reducer(shards, mesh, roots=list(stages.values())),
        loss=loss,
    )


def start_alike(model: nn.Module, spec: ModuleSpec) -> None:
    """Step 1, where the module lies: nobody has to seed the same on every rank."""
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
    """Steps 4 to 9."""
    norms = batch_norms(model)
    if spec.sync_batch_norm:
        for norm in norms:
            synchronise(norm, mesh.data.get_group("data"))
    compute_in(model, spec, mesh)
    offload = ActivationOffload(link) if "activations" in spec.memory.offload else None
    apply_recompute(blocks.values(), spec.memory, keeper=None if spec.compile else offload)
    if spec.compile:
        compile_blocks(blocks.values(), spec.memory)
    if offload is not None:
        apply_activation_offload(blocks.values(), offload)
    if spec.parallel.zero == 3:
        _make_contiguous(model)
        # Batch norm wants its weights in the format of its statistics; autocast lowers all other weights.
        lower = None if norms else lower_dtype(spec.precision)
        gradients = gradient_dtype(spec.precision)
        shard_fully(list(blocks.values()), model, mesh, experts=[], lower=lower, gradients=gradients)
        # Whoever changes an output in place loses its gradient. Most linears put out views, and few do that.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


def compute_in(model: nn.Module, spec: ModuleSpec, mesh: Mesh) -> None:
    """Step 5; a loss in 16 bits would lose what the weights keep, so outputs leave in the weights' dtype."""
    context = compute_context(spec.precision, mesh.device)
    if context is not None:
        model.forward = _raised(context(model.forward), weight_dtype(spec.precision))


def _raised(forward: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    def raised(*args: Any, **kwargs: Any) -> Any:
        outputs = forward(*args, **kwargs)
        return map_tensors(outputs, lambda one: one.to(dtype) if one.is_floating_point() else one)

    return raised


def _make_contiguous(model: nn.Module) -> None:
    """FSDP2 takes no weights in channels_last; convolutions follow the format of their input all the same."""
    for parameter in model.parameters():
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
