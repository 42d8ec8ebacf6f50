"""A user's own optimizer, which updates this rank's shards in place of the parameters."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn, optim

from meshwright.errors import SpecError

# Their update of an element depends on that element alone, so a shard is updated as in the full parameter.
ELEMENTWISE = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.NAdam,
    optim.RAdam,
    optim.Adamax,
    optim.Adadelta,
    optim.RMSprop,
    optim.ASGD,
    optim.Rprop,
)
_WHERE = "optimizer"


def require_optimizer(optimizer: object) -> None:
    """Refuse what is not an optimizer, or one that computes the loss several times in a step."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise SpecError(
            f"{optimizer!r} is not a torch optimizer",
            where=_WHERE,
            hint="give torch.optim.AdamW(model.parameters()), or None and optim={'kind': 'adamw'}",
        )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise SpecError(
            f"{type(optimizer).__name__} calls a closure for the loss, and a step here has one forward",
            where=_WHERE,
            hint="use one whose step() takes no closure, such as AdamW",
        )


def replace_parameters(
    optimizer: torch.optim.Optimizer, shard_of: Mapping[nn.Parameter, nn.Parameter], *, is_sharded: bool
) -> None:
    """Replace the parameters of an optimizer by shards; groups, learning rates and schedulers stay."""
    kind = type(optimizer).__name__
    if optimizer.state:
        raise SpecError(f"{kind} already has state", where=_WHERE, hint="pass it before its first step")
    if is_sharded and type(optimizer) not in ELEMENTWISE:
        raise SpecError(
            f"{kind} may need full parameters, and with ZeRO each rank has a shard",
            where=_WHERE,
            hint="use zero=0, an optimizer of torch that works element by element, "
            "or one of ours: optim={'kind': 'muon'}",
        )
    for group in optimizer.param_groups:
        unknown = [tuple(one.shape) for one in group["params"] if one not in shard_of]
        if unknown:
            raise SpecError(
                f"{kind} holds {len(unknown)} parameters that the model does not have, "
                f"the first of shape {unknown[0]}",
                where=_WHERE,
                hint="build it from model.parameters() of the model that you pass",
            )
        group["params"] = [shard_of[one] for one in group["params"] if shard_of[one].requires_grad]
        group.setdefault("lr_factor", 1.0)


def user_state_tensors(
    optimizer: torch.optim.Optimizer, shards: Mapping[str, nn.Parameter]
) -> dict[str, dict[str, Tensor]]:
    """State tensors that have the shape of their shard, by parameter name."""
    return {
        name: {
            key: value
            for key, value in optimizer.state[shard].items()
            if _is_sharded_state(key, value, shard)
        }
        for name, shard in shards.items()
        if shard in optimizer.state
    }


def user_state_numbers(
    optimizer: torch.optim.Optimizer, shards: Mapping[str, nn.Parameter]
) -> dict[str, Any]:
    """The rest of the state (step counts) and the settings of each group, as plain numbers."""
    state = {
        name: {
            key: float(value)
            for key, value in optimizer.state[shard].items()
            if isinstance(value, Tensor | float | int) and not _is_sharded_state(key, value, shard)
        }
        for name, shard in shards.items()
        if shard in optimizer.state
    }
    plain = (int, float, bool, str, list, tuple, type(None))
    groups = [
        {key: value for key, value in group.items() if key != "params" and isinstance(value, plain)}
        for group in optimizer.param_groups
    ]
    return {"state": state, "groups": groups}


def restore_user_state(
    optimizer: torch.optim.Optimizer, shards: Mapping[str, nn.Parameter], saved: Mapping[str, Any]
) -> None:
    """Restore what `user_state_numbers` returned."""
    for name, values in saved["state"].items():
        state = optimizer.state[shards[name]]
        for key, value in values.items():
            if isinstance(state.get(key), Tensor):
                state[key].fill_(value)
            else:
                state[key] = value
    for group, values in zip(optimizer.param_groups, saved["groups"], strict=True):
        group.update(values)


def allocate(optimizer: torch.optim.Optimizer) -> None:
    """Allocate the state that a checkpoint is loaded into: one step with zero gradients and learning rate."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for shard in group["params"]:
            shard.grad = torch.zeros_like(shard)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _is_sharded_state(key: str, value: Any, shard: nn.Parameter) -> bool:
    return isinstance(value, Tensor) and key != "step" and value.shape == shard.shape
