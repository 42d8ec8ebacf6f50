"""What update rules over whole parameters have in common: parts, their state, the count of updates.

Rules compute in fp32 (or in the weights' own dtype when it is wider). Weights that are kept in bf16 are
opened to fp32 for a bounded number of parameters at a time, updated, and rounded back.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from meshwright.hardware.simulated_device import SimulatedDevice
from meshwright.optim.full_parameter import Whole
from meshwright.optim.rounding import WeightFormat, bits_of, read, write
from meshwright.optim.rounding_noise import NoiseGrid, draw, noise_grid, step_key

# Elements (of whole parameters, so that all ranks agree) that are updated together: what a rule makes on the
# way, an fp32 copy and a direction of each, takes half a gigabyte at most.
WORKING_ELEMENTS = 2**26
LOWER_BITS = "lower_bits"


class Shards(NamedTuple):
    """What an optimizer is built over."""

    groups: list[dict[str, Any]]
    wholes: Mapping[nn.Parameter, Whole]
    lr: float
    weights: WeightFormat = "fp32"
    simulated: SimulatedDevice | None = None
    """The device whose kernels update the shards; None: their own."""


class Part(NamedTuple):
    """One shard as an update sees it."""

    shard: Tensor
    gradient: Tensor
    state: dict[str, Tensor]
    whole: Whole
    lr: float
    weight_decay: float


class ShardedOptimizer(torch.optim.Optimizer):
    """Updates shards as the whole parameters would be; its state is allocated at once."""

    num_updates: int = 0
    takes_factor: ClassVar[bool] = False
    """Whether `update_all` multiplies gradients by `gradient_factor` as it reads them."""
    gradient_factor: float | Tensor = 1.0
    """Of the next update alone."""

    def __init__(self, shards: Shards) -> None:
        super().__init__(shards.groups, {"lr": shards.lr, "weight_decay": 0.0})
        wholes = self._wholes = shards.wholes
        self.simulated = shards.simulated
        self._grids: dict[str, NoiseGrid] = {}
        for group in self.param_groups:
            for shard in group["params"]:
                self.state[shard] = self.new_state(shard.detach(), wholes[shard])
                if shards.weights == "bf16_exact":
                    self.state[shard][LOWER_BITS] = torch.zeros_like(shard, dtype=torch.int16)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update of every shard; all ranks call it together."""
        assert closure is None, "gradients are accumulated before the step"
        self.num_updates += 1
        self.update_all([part for group in self.param_groups for part in self._parts(group)])
        self.gradient_factor = 1.0

    def _parts(self, group: dict[str, Any]) -> list[Part]:
        return [
            Part(
                shard, shard.grad, self.state[shard], self._wholes[shard], group["lr"], group["weight_decay"]
            )
            for shard in group["params"]
            if shard.grad is not None
        ]

    def update_all(self, parts: list[Part]) -> None:
        """Update parts in sets of bounded size, each opened to fp32 where it is not wide already."""
        for some in working_sets(parts):
            wide = [_opened(part) for part in some]
            self.update(wide)
            for part, one in zip(some, wide, strict=True):
                if one.shard is not part.shard:
                    self._close(part, one.shard)

    def _close(self, part: Part, wide: Tensor) -> None:
        lower = part.state.get(LOWER_BITS)
        noise = None
        if lower is None:
            noise = draw(self.grid(part), step_key(self.num_updates, wide.device)).weight.view_as(wide)
        write(wide, bits_of(part.shard), lower, noise)

    def grid(self, part: Part) -> NoiseGrid:
        """Of the noise of one parameter; made once."""
        if part.whole.name not in self._grids:
            self._grids[part.whole.name] = noise_grid(part.whole, part.shard.device)
        return self._grids[part.whole.name]

    @abstractmethod
    def new_state(self, shard: Tensor, whole: Whole) -> dict[str, Tensor]:
        """The state of one shard before the first update."""

    @abstractmethod
    def update(self, parts: list[Part]) -> None:
        """Change every shard and its state in place; `num_updates` counts this update already."""

    def master(self, shard: nn.Parameter) -> Tensor:
        """The weight as the update rule knows it: an fp32 copy where bf16 has its lower bits beside it."""
        lower = self.state[shard].get(LOWER_BITS)
        # Lower bits may live in host memory.
        return shard.detach() if lower is None else read(bits_of(shard.detach()), lower.to(shard.device))

    @torch.no_grad()
    def set_master(self, shard: nn.Parameter, value: Tensor) -> None:
        """Take over a weight, with its lower bits where they are kept."""
        lower = self.state[shard].get(LOWER_BITS)
        if lower is None:
            shard.copy_(value)
        else:
            write(value.to(shard.device, torch.float32), bits_of(shard), lower, None)


def working_sets(parts: list[Part]) -> Iterator[list[Part]]:
    """Runs of parts whose whole parameters have about WORKING_ELEMENTS together; the same on all ranks."""
    some: list[Part] = []
    for part in parts:
        some.append(part)
        if sum(one.whole.shape.numel() for one in some) >= WORKING_ELEMENTS:
            yield some
            some = []
    if some:
        yield some


def _opened(part: Part) -> Part:
    if part.shard.dtype != torch.bfloat16:
        return part
    wide = read(bits_of(part.shard), part.state.get(LOWER_BITS))
    return part._replace(shard=wide, gradient=part.gradient.to(wide.dtype))


def wide_zeros(shard: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """A state of the shard's shape (or another), in the dtype that rules compute in."""
    dtype = torch.float32 if shard.dtype == torch.bfloat16 else shard.dtype
    return shard.new_zeros(shard.shape if shape is None else shape, dtype=dtype)


def adam_directions(
    parts: Sequence[Part], *, betas: tuple[float, float], eps: float, num_updates: int
) -> list[Tensor]:
    """Both moments of each part moved, then first over root of second, corrected for a start at zero.

    All parts at once: a handful of kernels on CUDA, however many parameters there are.
    """
    if not parts:  # the functions over lists refuse empty ones
        return []
    gradients = [part.gradient for part in parts]
    firsts, seconds = ([part.state[key] for part in parts] for key in ("exp_avg", "exp_avg_sq"))
    blend(firsts, gradients, betas[0])
    blend(seconds, list(torch._foreach_mul(gradients, gradients)), betas[1])
    roots = torch._foreach_sqrt(seconds)
    torch._foreach_div_(roots, (1.0 - betas[1] ** num_updates) ** 0.5)
    torch._foreach_add_(roots, eps)
    directions = torch._foreach_div(firsts, roots)
    torch._foreach_div_(directions, 1.0 - betas[0] ** num_updates)
    return list(directions)


def blend(averages: list[Tensor], new: list[Tensor], beta: float) -> None:
    """average <- beta x average + (1 - beta) x new, in place."""
    torch._foreach_mul_(averages, beta)
    torch._foreach_add_(averages, new, alpha=1.0 - beta)


def step_along(parts: Sequence[Part], directions: list[Tensor], *, has_decay: bool) -> None:
    """w <- w - lr x direction, after w <- (1 - lr x decay) w where decay is apart; changes `directions`."""
    shards = [part.shard for part in parts]
    if not shards:
        return
    if has_decay:
        torch._foreach_mul_(shards, [1.0 - part.lr * part.weight_decay for part in parts])
    torch._foreach_mul_(directions, [-part.lr for part in parts])
    torch._foreach_add_(shards, directions)


def with_decay(parts: Sequence[Part], directions: list[Tensor]) -> list[Tensor]:
    """direction + decay x w, as new tensors: where decay is a part of what is stepped along."""
    decays = torch._foreach_mul([part.shard for part in parts], [part.weight_decay for part in parts])
    torch._foreach_add_(decays, directions)
    return list(decays)
