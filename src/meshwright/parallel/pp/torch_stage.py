"""Pipeline stages whose neighbours may be on the same rank, on CPU ranks with torch 2.11.

Schedules of V shape (zbv, dualpipev) put two neighbouring stages on one rank. Before the first step torch
2.11 sends a number between all neighbours, also from such a rank to itself, which gloo cannot. Nothing reads
the number: it makes NCCL set up its connections. torch 2.12 has no such step; with it this file goes.
"""

from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

_SENDS_TO_ITSELF = torch.__version__.startswith("2.11.")


def pipeline_stage(
    module: nn.Module, index: int, num_stages: int, device: torch.device, **tensors: Any
) -> PipelineStage:
    """The `PipelineStage` of the module; `tensors` are its example inputs and outputs, and its group."""
    stage = PipelineStage(module, index, num_stages, device, **tensors)
    if _SENDS_TO_ITSELF and device.type == "cpu":
        first_sends = stage._get_init_p2p_neighbors_ops
        stage._get_init_p2p_neighbors_ops = lambda: [
            one for one in first_sends() if one.peer != dist.get_rank()
        ]
    return stage
