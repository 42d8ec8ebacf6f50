"""From an OptimSpec to a torch optimizer over this rank's shards.

The shards are plain tensors: AdamW and SGD are element by element, so a shard is updated exactly as
its part of the whole parameter would be, and the fused CUDA kernels apply.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from meshwright.spec import OptimSpec

# State tensors of one parameter, each of the parameter's shape; what a checkpoint holds.
STATE_TENSORS = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}


def parameter_groups(shards: Mapping[str, nn.Parameter], optim: OptimSpec) -> list[dict[str, object]]:
    """Two groups: with weight decay and without. Vectors (norms, biases) do not decay by default."""
    decays = {name: optim.decay == "all" or shard.ndim >= 2 for name, shard in shards.items()}
    return [
        {"params": [shards[name] for name in shards if decays[name]], "weight_decay": optim.weight_decay},
        {"params": [shards[name] for name in shards if not decays[name]], "weight_decay": 0.0},
    ]


def build_optimizer(shards: Mapping[str, nn.Parameter], optim: OptimSpec) -> torch.optim.Optimizer:
    """The optimizer with all its state allocated, so that memory is known before the first step."""
    groups = [group for group in parameter_groups(shards, optim) if group["params"]]
    if optim.kind == "sgd":
        optimizer = torch.optim.SGD(groups, lr=optim.lr, momentum=optim.beta1)
    else:
        on_cuda = any(shard.is_cuda for shard in shards.values())
        betas = (optim.beta1, optim.beta2)
        optimizer = torch.optim.AdamW(
            groups, lr=optim.lr, betas=betas, eps=optim.eps, fused=on_cuda, foreach=not on_cuda
        )
    set_num_updates(optimizer, shards, optim, num_updates=0)
    return optimizer


def state_tensors(
    optimizer: torch.optim.Optimizer, shards: Mapping[str, nn.Parameter], optim: OptimSpec
) -> dict[str, dict[str, Tensor]]:
    """The state by parameter name; the tensors are the optimizer's own, so loading into them is loading."""
    keys = STATE_TENSORS[optim.kind] if optim.kind != "sgd" or optim.beta1 else ()
    return {name: {key: optimizer.state[shard][key] for key in keys} for name, shard in shards.items()}


def set_num_updates(
    optimizer: torch.optim.Optimizer,
    shards: Mapping[str, nn.Parameter],
    optim: OptimSpec,
    *,
    num_updates: int,
) -> None:
    """Allocate missing state and say how many updates it stands for (Adam's bias correction)."""
    for shard in shards.values():
        state = optimizer.state[shard]
        if optim.kind == "sgd":
            if optim.beta1:
                state.setdefault("momentum_buffer", torch.zeros_like(shard))
            continue
        state["step"] = torch.tensor(float(num_updates), device=shard.device if shard.is_cuda else "cpu")
        for key in STATE_TENSORS["adamw"]:
            state.setdefault(key, torch.zeros_like(shard))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Every group moves at the same rate."""
    for group in optimizer.param_groups:
        group["lr"] = rate
