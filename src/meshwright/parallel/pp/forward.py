"""A forward pass through the pipeline without gradients, for evaluation.

Torch's schedules always include a backward, and those with several stages on a rank require one. A plain loop
is enough here: each rank runs the micro-batches in order and sends them on, so ranks with one stage each
still overlap.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from meshwright.data.microbatch import Microbatch
from meshwright.mesh import Mesh
from meshwright.parallel.pp.stages import StageModule
from meshwright.parallel.program import model_arguments
from meshwright.spec.stages import stages_of_rank

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_HEADER = 10  # dtype, number of dims, and up to eight of them


def forward_losses(stages: Sequence[StageModule], mesh: Mesh, microbatches: Sequence[Microbatch]) -> Tensor:
    """Sum of the losses on the rank of the last stage, zero on the others; all ranks of pp call it."""
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for microbatch in microbatches:
        loss = _walk(stages, mesh, microbatch)
        if loss is not None:
            total += loss
    for stage in stages:
        if isinstance(stage.module, FSDPModule):
            stage.module.reshard()  # a pipeline keeps parameters gathered for backward; here there is none
    return total


def _walk(stages: Sequence[StageModule], mesh: Mesh, microbatch: Microbatch) -> Tensor | None:
    """Run one micro-batch through the stages of this rank; returns the loss where the last stage is."""
    group, rank_of = mesh.group("pp"), ranks_of_stages(mesh)
    arguments = model_arguments(microbatch)
    kept: Tensor | None = None
    for index, module in stages:
        if index == 0:
            x = microbatch.tokens_BS
        elif rank_of[index - 1] == rank_of[index] and kept is not None:
            x = kept
        else:
            x = receive(rank_of[index - 1], group, mesh.device)
        y: Tensor = module(x, **arguments)
        if index == mesh.parallel.num_stages - 1:
            return y
        if rank_of[index + 1] != rank_of[index]:
            send(y, rank_of[index + 1], group)
        kept = y
    return None


def ranks_of_stages(mesh: Mesh) -> dict[int, int]:
    """The pp rank that holds each stage."""
    parallel = mesh.parallel
    return {stage: rank for rank in range(parallel.pp) for stage in stages_of_rank(parallel, rank)}


def send(x: Tensor, to: int, group: ProcessGroup) -> None:
    """Send a tensor to a pp rank, which calls `receive`."""
    header = torch.zeros(_HEADER, dtype=torch.int64)
    header[: 2 + x.ndim] = torch.tensor([_DTYPES.index(x.dtype), x.ndim, *x.shape])
    dist.send(header.to(x.device), group=group, group_dst=to)
    dist.send(x.contiguous(), group=group, group_dst=to)


def receive(source: int, group: ProcessGroup, device: torch.device) -> Tensor:
    """Receive a tensor from a pp rank; its shape and dtype arrive first. Host sync."""
    header = torch.empty(_HEADER, dtype=torch.int64, device=device)
    dist.recv(header, group=group, group_src=source)
    code, num_dims, *shape = header.tolist()
    x = torch.empty(shape[:num_dims], dtype=_DTYPES[code], device=device)
    dist.recv(x, group=group, group_src=source)
    return x
