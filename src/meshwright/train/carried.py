"""This rank's part of a training kept on the host, while the program around it is built anew.

After a step that ran out of memory weights, states and averages are those of the step before: the update
comes last. So they are taken out, and put into a program with another micro-batch but the same layout.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.checkpoint.run_checkpoints import all_tensors
from meshwright.optim.build import set_num_updates
from meshwright.train.job import Job
from meshwright.train.state import TrainState


@dataclass(frozen=True)
class Carried:
    """What the next attempt starts from."""

    state: TrainState
    tensors: dict[str, Tensor]
    """This rank's parts, by the names of a checkpoint."""
    data: dict[str, Any]
    """Position before the batch that was not finished."""
    loss_scale: tuple[float, int] | None
    fp8_fallen: list[int]


def carry(job: Job, state: TrainState, data: dict[str, Any]) -> Carried:
    """Copy this rank's parts to the host; no communication."""
    run, training = job.run, job.training
    tensors = {
        name: _local(tensor).to("cpu", copy=True) for name, tensor in all_tensors(run, training).items()
    }
    scale = training.loss_scale
    fallen = job.shadow.fallen if job.shadow else []
    return Carried(state, tensors, data, (scale.scale, scale.num_clean_steps) if scale else None, fallen)


def put_back(carried: Carried, job: Job) -> TrainState:
    """Into a program of the same layout; all ranks call it."""
    run, training = job.run, job.training
    with torch.no_grad():
        for name, tensor in all_tensors(run, training).items():
            _local(tensor).copy_(carried.tensors[name])
    training.program.gather_parameters()
    set_num_updates(training.optimizer, training.named_shards, run.optim, num_updates=carried.state.step)
    if training.loss_scale is not None and carried.loss_scale is not None:
        training.loss_scale.scale, training.loss_scale.num_clean_steps = carried.loss_scale
    if training.fp8_scales is not None:
        training.fp8_scales.set_units()
    if job.shadow is not None:
        job.shadow.restore(carried.fp8_fallen)
    job.batches.load_state(carried.data)
    return carried.state


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
