"""The base of optimizers over full parameters: shards, their state, the count of updates.

Updates are computed in fp32 (in fp64 for fp64 weights). Weights stored in bf16 are read as fp32 for a bounded
number of parameters at a time, updated, and rounded back.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from meshwright.hardware.simulated_device import SimulatedDevice
from meshwright.ops import torch_foreach as foreach
from meshwright.optim.full_parameter import FullParameter
from meshwright.optim.rounding import WeightFormat, bits_of, read, write
from meshwright.optim.rounding_noise import NoiseGrid, draw, noise_grid, step_key

# Elements (of full parameters, so that all ranks agree) that are updated together. The temporaries of an
# update, an fp32 copy and a direction of each parameter, take half a gigabyte at most.
WORKING_ELEMENTS = 2**26
LOWER_BITS = "lower_bits"


class OptimizerShards(NamedTuple):
    """The shards that an optimizer is built over."""

    groups: list[dict[str, Any]]
    full_parameters: Mapping[nn.Parameter, FullParameter]
    lr: float
    weights: WeightFormat = "fp32"
    simulated: SimulatedDevice | None = None
    """The device whose kernels update the shards; None: their own."""


class ShardUpdate(NamedTuple):
    """The inputs of the update of one shard."""

    shard: Tensor
    gradient: Tensor
    state: dict[str, Tensor]
    full: FullParameter
    lr: float
    weight_decay: float


class ShardedOptimizer(torch.optim.Optimizer):
    """Updates shards as the full parameters would be updated; its state is allocated at once."""

    num_updates: int = 0
    applies_gradient_scale: ClassVar[bool] = False
    """Whether `update_all` multiplies gradients by `gradient_scale` as it reads them."""
    gradient_scale: float | Tensor = 1.0
    """Factor of the gradients in the next update only (gradient clipping)."""

    def __init__(self, shards: OptimizerShards) -> None:
        super().__init__(shards.groups, {"lr": shards.lr, "weight_decay": 0.0})
        self._full_parameters = shards.full_parameters
        self.simulated = shards.simulated
        self._grids: dict[str, NoiseGrid] = {}
        for group in self.param_groups:
            for shard in group["params"]:
                self.state[shard] = self.new_state(shard.detach(), self._full_parameters[shard])
                if shards.weights == "bf16_exact":
                    self.state[shard][LOWER_BITS] = torch.zeros_like(shard, dtype=torch.int16)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update of every shard; all ranks call it together."""
        assert closure is None, "gradients are accumulated before the step"
        self.num_updates += 1
        self.update_all([part for group in self.param_groups for part in self._parts(group)])
        self.gradient_scale = 1.0

    def _parts(self, group: dict[str, Any]) -> list[ShardUpdate]:
        lr, weight_decay = group["lr"], group["weight_decay"]
        return [
            ShardUpdate(shard, shard.grad, self.state[shard], self._full_parameters[shard], lr, weight_decay)
            for shard in group["params"]
            if shard.grad is not None
        ]

    def update_all(self, parts: list[ShardUpdate]) -> None:
        """Update shards in sets of bounded size; bf16 weights are read as fp32 and rounded back."""
        for some in working_sets(parts):
            in_fp32 = [_in_fp32(part) for part in some]
            self.update(in_fp32)
            for part, updated in zip(some, in_fp32, strict=True):
                if updated.shard is not part.shard:
                    self._write_back(part, updated.shard)

    def _write_back(self, part: ShardUpdate, fp32: Tensor) -> None:
        lower = part.state.get(LOWER_BITS)
        noise = None
        if lower is None:
            noise = draw(self.grid(part), step_key(self.num_updates, fp32.device)).weight.view_as(fp32)
        write(fp32, bits_of(part.shard), lower, noise)

    def grid(self, part: ShardUpdate) -> NoiseGrid:
        """The noise grid of one parameter, computed once."""
        if part.full.name not in self._grids:
            self._grids[part.full.name] = noise_grid(part.full, part.shard.device)
        return self._grids[part.full.name]

    @abstractmethod
    def new_state(self, shard: Tensor, full: FullParameter) -> dict[str, Tensor]:
        """The state of one shard before the first update."""

    @abstractmethod
    def update(self, parts: list[ShardUpdate]) -> None:
        """Update every shard and its state in place; `num_updates` already counts this update."""

    def master(self, shard: nn.Parameter) -> Tensor:
        """The master weight: an fp32 copy where the shard is bf16 with its lower bits stored beside it."""
        lower = self.state[shard].get(LOWER_BITS)
        # Lower bits may be offloaded to host memory.
        return shard.detach() if lower is None else read(bits_of(shard.detach()), lower.to(shard.device))

    @torch.no_grad()
    def set_master(self, shard: nn.Parameter, value: Tensor) -> None:
        """Set a weight, with its lower bits where they are stored."""
        lower = self.state[shard].get(LOWER_BITS)
        if lower is None:
            shard.copy_(value)
        else:
            write(value.to(shard.device, torch.float32), bits_of(shard), lower, None)


def working_sets(parts: list[ShardUpdate]) -> Iterator[list[ShardUpdate]]:
    """Runs of shards whose full parameters have about WORKING_ELEMENTS together; the same on all ranks."""
    some: list[ShardUpdate] = []
    for part in parts:
        some.append(part)
        if sum(one.full.shape.numel() for one in some) >= WORKING_ELEMENTS:
            yield some
            some = []
    if some:
        yield some


def _in_fp32(part: ShardUpdate) -> ShardUpdate:
    if part.shard.dtype != torch.bfloat16:
        return part
    fp32 = read(bits_of(part.shard), part.state.get(LOWER_BITS))
    return part._replace(shard=fp32, gradient=part.gradient.to(fp32.dtype))


def state_zeros(shard: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """State zeros of the shard's shape (or another), in fp32 for a bf16 shard, else in its dtype."""
    dtype = torch.float32 if shard.dtype == torch.bfloat16 else shard.dtype
    return shard.new_zeros(shard.shape if shape is None else shape, dtype=dtype)


def adam_directions(
    parts: Sequence[ShardUpdate], *, betas: tuple[float, float], eps: float, num_updates: int
) -> list[Tensor]:
    """Adam's direction of each shard, first moment over root of second, with bias correction; updates both
    moments.

    All shards at once: a handful of kernels on CUDA, however many parameters there are.
    """
    if not parts:  # foreach functions refuse empty lists
        return []
    gradients = [part.gradient for part in parts]
    firsts, seconds = ([part.state[key] for part in parts] for key in ("exp_avg", "exp_avg_sq"))
    update_averages(firsts, gradients, betas[0])
    update_averages(seconds, list(foreach.mul(gradients, gradients)), betas[1])
    roots = foreach.sqrt(seconds)
    foreach.div_(roots, (1.0 - betas[1] ** num_updates) ** 0.5)
    foreach.add_(roots, eps)
    directions = foreach.div(firsts, roots)
    foreach.div_(directions, 1.0 - betas[0] ** num_updates)
    return list(directions)


def update_averages(averages: list[Tensor], new: list[Tensor], beta: float) -> None:
    """average <- beta x average + (1 - beta) x new, in place."""
    foreach.mul_(averages, beta)
    foreach.add_(averages, new, alpha=1.0 - beta)


def apply_directions(parts: Sequence[ShardUpdate], directions: list[Tensor], *, has_decay: bool) -> None:
    """w <- w - lr x direction, after w <- (1 - lr x decay) w with decoupled decay; changes `directions`."""
    shards = [part.shard for part in parts]
    if not shards:
        return
    if has_decay:
        foreach.mul_(shards, [1.0 - part.lr * part.weight_decay for part in parts])
    foreach.mul_(directions, [-part.lr for part in parts])
    foreach.add_(shards, directions)


def add_weight_decay(parts: Sequence[ShardUpdate], directions: list[Tensor]) -> list[Tensor]:
    """direction + decay x w, as new tensors: coupled weight decay."""
    decays = foreach.mul([part.shard for part in parts], [part.weight_decay for part in parts])
    foreach.add_(decays, directions)
    return list(decays)
