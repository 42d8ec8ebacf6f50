"""Bytes of the state of a rank, counted by storage: views of one storage count once, and in full."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from meshwright.train.step import Training


@dataclass
class StateBytes:
    """Bytes of state on one rank."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """Bytes of parameters, gradients and optimizer states together."""
        return self.parameters + self.gradients + self.optimizer


def count_state_bytes(training: Training) -> StateBytes:
    """Bytes that the state of this rank takes at the moment."""
    shards = training.program.shards
    computing = [parameter for stage in training.program.stages for parameter in stage.parameters()]
    gradients = [one.shard.grad for one in shards] + [one.parameter.grad for one in shards]
    states = [value for state in training.optimizer.state.values() for value in state.values()]
    return StateBytes(
        parameters=storage_bytes(computing + [one.shard for one in shards]),
        gradients=storage_bytes(gradients),
        optimizer=storage_bytes([value for value in states if isinstance(value, Tensor) and value.ndim]),
    )


def storage_bytes(tensors: Iterable[Any]) -> int:
    """Bytes of the storages behind tensors; None among them is skipped."""
    storages = {}
    for tensor in tensors:
        if tensor is not None:
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            storage = local.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
