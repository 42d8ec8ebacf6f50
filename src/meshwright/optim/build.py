"""From an OptimSpec to a torch optimizer over this rank's shards.

The shards are plain tensors. AdamW and SGD are element by element, so a shard is updated exactly as its
part of the whole parameter would be, and in fp32 torch's fused kernels apply. The other rules look at the
whole parameter, through `Whole`; so does rounding to bf16, whose noise is that of the whole parameter.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.hardware.simulated_device import SimulatedDevice, kernel_device
from meshwright.optim.adafactor import Adafactor
from meshwright.optim.adamw import AdamW
from meshwright.optim.combined import part_of
from meshwright.optim.full_parameter import Whole, uncut
from meshwright.optim.lamb import Lamb
from meshwright.optim.lars import Lars
from meshwright.optim.low_bit import Adam8Bit
from meshwright.optim.muon import Muon
from meshwright.optim.rounding import WeightFormat
from meshwright.optim.sgd import Sgd
from meshwright.optim.sharded import LOWER_BITS, ShardedOptimizer, Shards
from meshwright.spec import OptimSpec
from meshwright.spec.optim import group_of

# State tensors of torch's own optimizers, each of the parameter's shape.
STATE_TENSORS = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}


def state_dims(key: str, num_dims: int) -> tuple[int | None, ...]:
    """The dim of the parameter that each dim of a state tensor goes along with; None: whole on every rank."""
    if key == "row_mean_sq":
        return tuple(range(num_dims - 1))
    if key == "column_mean_sq":
        return (*range(num_dims - 2), num_dims - 1)
    if key.endswith("_scale"):
        return (*range(num_dims - 1), None)
    return tuple(range(num_dims))


def parameter_groups(shards: Mapping[str, nn.Parameter], optim: OptimSpec) -> list[dict[str, Any]]:
    """With weight decay, without (vectors by default), and one for each of `optim.groups`."""
    decaying = {"params": [], "weight_decay": optim.weight_decay, "lr_factor": 1.0}
    others = {"params": [], "weight_decay": 0.0, "lr_factor": 1.0}
    named: dict[tuple[int, float], dict[str, Any]] = {}
    for name, shard in shards.items():
        usual = decaying if optim.weight_decay_on == "all" or shard.ndim >= 2 else others
        index = group_of(name, optim.groups)
        if index is None:
            usual["params"].append(shard)
            continue
        said = optim.groups[index]
        decay = usual["weight_decay"] if said.weight_decay is None else said.weight_decay
        group = {"params": [], "weight_decay": decay, "lr_factor": said.lr_factor}
        named.setdefault((index, decay), group)["params"].append(shard)
    return [decaying, others, *named.values()]


def build_optimizer(
    shards: Mapping[str, nn.Parameter],
    optim: OptimSpec,
    wholes: Mapping[str, Whole] | None = None,
    *,
    weights: WeightFormat = "fp32",
    simulated: SimulatedDevice | None = None,
) -> torch.optim.Optimizer:
    """The optimizer with all its state allocated, so that memory is known before the first step.

    `wholes` tells of each shard what it is a part of; without it the shards are whole parameters. The
    shards are bf16 where `weights` says so.
    """
    groups = [group for group in parameter_groups(shards, optim) if group["params"]]
    if optim.kind in STATE_TENSORS and weights == "fp32" and optim.state == "fp32":
        optimizer = _build_elementwise(groups, optim, on_cuda=_on_cuda(shards, simulated))
    else:
        known = {shard: wholes[name] if wholes else uncut(name, shard) for name, shard in shards.items()}
        optimizer = _build_sharded(Shards(groups, known, optim.lr, weights, simulated), optim)
    set_num_updates(optimizer, shards, optim, num_updates=0)
    return optimizer


def _on_cuda(shards: Mapping[str, nn.Parameter], simulated: SimulatedDevice | None = None) -> bool:
    return any(kernel_device(one.device.type, simulated) == "cuda" for one in shards.values())


def _build_elementwise(
    groups: list[dict[str, Any]], optim: OptimSpec, *, on_cuda: bool
) -> torch.optim.Optimizer:
    if optim.kind == "sgd":
        return torch.optim.SGD(groups, lr=optim.lr, momentum=optim.beta1)
    betas = (optim.beta1, optim.beta2)
    return torch.optim.AdamW(
        groups, lr=optim.lr, betas=betas, eps=optim.eps, fused=on_cuda, foreach=not on_cuda
    )


def _build_sharded(shards: Shards, optim: OptimSpec) -> ShardedOptimizer:
    betas = (optim.beta1, optim.beta2)
    match optim.kind:
        case "adamw":
            return AdamW(shards, betas=betas, eps=optim.eps, state=optim.state)
        case "sgd":
            return Sgd(shards, momentum=optim.beta1)
        case "lars":
            return Lars(shards, momentum=optim.beta1, trust=optim.trust_coefficient)
        case "lamb":
            return Lamb(shards, betas=betas, eps=optim.eps)
        case "adafactor":
            return Adafactor(shards, beta1=optim.beta1)
        case "muon":
            return Muon(shards, momentum=optim.momentum, betas=betas, eps=optim.eps)
        case "adamw_8bit":
            return Adam8Bit(shards, betas=betas, eps=optim.eps)


def state_tensors(
    optimizer: torch.optim.Optimizer, shards: Mapping[str, nn.Parameter], optim: OptimSpec
) -> dict[str, dict[str, Tensor]]:
    """The state by parameter name; the tensors are the optimizer's own, so loading into them is loading.

    The lower bits of weights are not among them: they belong to `master_weights`.
    """
    keys = STATE_TENSORS.get(optim.kind, ()) if optim.kind != "sgd" or optim.beta1 else ()
    found: dict[str, dict[str, Tensor]] = {}
    for name, shard in shards.items():
        state = optimizer.state[shard]
        is_ours = isinstance(part_of(optimizer, shard), ShardedOptimizer)
        found[name] = {key: state[key] for key in (state if is_ours else keys) if key != LOWER_BITS}
    return found


def master_weights(optimizer: torch.optim.Optimizer, shards: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The weights of which the optimizer keeps lower bits, as fp32 copies: what a checkpoint holds."""
    rules = {name: part_of(optimizer, shard) for name, shard in shards.items()}
    return {
        name: rule.master(shards[name])
        for name, rule in rules.items()
        if isinstance(rule, ShardedOptimizer) and LOWER_BITS in rule.state[shards[name]]
    }


def set_master_weights(
    optimizer: torch.optim.Optimizer, shards: Mapping[str, nn.Parameter], masters: Mapping[str, Tensor]
) -> None:
    """Take over weights: rounded into the shards, and the rest into the lower bits where these are kept."""
    for name, value in masters.items():
        rule = part_of(optimizer, shards[name])
        if isinstance(rule, ShardedOptimizer):
            rule.set_master(shards[name], value)
        else:
            shards[name].detach().copy_(value)


def set_num_updates(
    optimizer: torch.optim.Optimizer,
    shards: Mapping[str, nn.Parameter],
    optim: OptimSpec,
    *,
    num_updates: int,
) -> None:
    """Allocate missing state and say how many updates it stands for (Adam's bias correction)."""
    for shard in shards.values():
        rule, state = part_of(optimizer, shard), optimizer.state[shard]
        if isinstance(rule, ShardedOptimizer):
            rule.num_updates = num_updates
            continue
        if optim.kind == "sgd":
            if optim.beta1:
                state.setdefault("momentum_buffer", torch.zeros_like(shard))
            continue
        state["step"] = torch.tensor(float(num_updates), device=shard.device if _on_cuda(shards) else "cpu")
        for key in STATE_TENSORS["adamw"]:
            state.setdefault(key, torch.zeros_like(shard))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Every group moves at the rate times its own factor."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["lr_factor"]
