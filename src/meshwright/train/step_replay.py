"""Silent corruption: forward and backward of a step run twice, and must have equal bits.

Both runs have the same weights, micro-batches and random numbers, so with `deterministic=true` any difference
is a fault of a device, of memory or of a link, or a bug. The second run is that of the step itself. It is
compared before the update, so a wrong gradient never reaches the weights. What is kept of the first run is
the loss and one 64-bit hash per parameter.
"""

import socket
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.errors import LostRank, RunError
from meshwright.ops.bit_hash import sum_of_bits
from meshwright.parallel.gradient_hashes import GradientHashes
from meshwright.spec.resilience import ReplayAction

_MOST_RANKS = 8


class StepReplay:
    """Loss and gradients of the first run of a step, which its second run must have too."""

    def __init__(
        self,
        *,
        step: int,
        loss: Tensor,
        shards: Mapping[str, Tensor],
        own_gradients: GradientHashes,
        action: ReplayAction,
    ) -> None:
        """`own_gradients` has recorded the first run. `shards` have its gradients now."""
        self._step, self._loss, self._shards, self._action = step, loss, shards, action
        self._own_gradients, self._own = own_gradients, own_gradients.stop()
        self._reduced = _reduced_gradients(shards)
        own_gradients.start()

    def compare(self, loss: Tensor) -> str:
        """What differs in the second run, whose gradients the shards have now; empty where nothing does.

        All ranks call it. Communicates, host sync. RunError or LostRank where the action is not `warn`.
        """
        own = self._own_gradients.stop()
        found = _Difference(
            loss=bool(sum_of_bits(loss) != sum_of_bits(self._loss)),
            own=_differing(self._own, own),
            reduced=_differing(self._reduced, _reduced_gradients(self._shards)),
        )
        differs = torch.tensor([int(found.is_any)])
        dist.all_reduce(differs, op=dist.ReduceOp.MAX)
        if not differs.item():
            return ""
        text = f"forward and backward of step {self._step} ran twice, and differ: {_by_rank(found)}"
        if self._action == "warn":
            return text
        kind = LostRank if self._action == "restart" else RunError
        raise kind(
            text,
            where="resilience.replay",
            hint="suspect the device or the memory of that host; the weights are those before this step, and "
            + ("a restart" if self._action == "restart" else "the same command")
            + " goes on from the newest checkpoint",
        )


class _Difference:
    """What differs on one rank between the two runs of a step."""

    def __init__(self, *, loss: bool, own: list[str], reduced: list[str]) -> None:
        self._loss, self._own, self._reduced = loss, own, reduced

    @property
    def is_any(self) -> bool:
        return self._loss or bool(self._own or self._reduced)

    @property
    def is_own(self) -> bool:
        """Whether this rank itself computed something else, rather than received it."""
        return self._loss or bool(self._own)

    def __str__(self) -> str:
        names = self._own or self._reduced
        parts = ["its part of the loss"] * self._loss
        if names:
            more = f" and of {len(names) - 1} more" if len(names) > 1 else ""
            parts.append(f"the {'' if self._own else 'reduced '}gradient of {names[0]}{more}")
        return " and ".join(parts)


def _by_rank(found: _Difference) -> str:
    """The ranks that computed something else; without any, those whose reduced gradients differ."""
    here = (socket.gethostname(), found.is_any, found.is_own, str(found))
    gathered: list[tuple[str, bool, bool, str]] = [here] * dist.get_world_size()
    dist.all_gather_object(gathered, here)
    has_own = any(is_own for _, _, is_own, _ in gathered)
    texts = [
        f"rank {rank} on {host}: {text}"
        for rank, (host, is_any, is_own, text) in enumerate(gathered)
        if (is_own if has_own else is_any)
    ]
    more = f"; and {len(texts) - _MOST_RANKS} more ranks" if len(texts) > _MOST_RANKS else ""
    return "; ".join(texts[:_MOST_RANKS]) + more


def _reduced_gradients(shards: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The hash of each shard's gradient."""
    return {name: sum_of_bits(shard.grad) for name, shard in shards.items() if shard.grad is not None}


def _differing(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> list[str]:
    """Names whose hashes differ, in order. Host sync."""
    names = list(dict.fromkeys([*first, *second]))
    both = [name for name in names if name in first and name in second]
    if not both:
        return names
    is_equal = (
        torch.stack([first[name] for name in both]) == torch.stack([second[name] for name in both])
    ).tolist()
    equal = {name for name, one in zip(both, is_equal, strict=True) if one}
    return [name for name in names if name not in equal]
