"""From an OptimSpec to a torch optimizer over this rank's shards.

The shards are plain tensors. AdamW and SGD work element by element, so a shard is updated exactly as its
slice of the full parameter would be, and in fp32 torch's fused kernels apply. The other optimizers need the
full parameter, through `FullParameter`; so does rounding to bf16, whose noise is that of the full parameter.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.hardware.simulated_device import SimulatedDevice, kernel_device
from meshwright.optim.adafactor import Adafactor
from meshwright.optim.adamw import AdamW
from meshwright.optim.combined import optimizer_of
from meshwright.optim.full_parameter import FullParameter, unsharded
from meshwright.optim.lamb import Lamb
from meshwright.optim.lars import Lars
from meshwright.optim.low_bit import Adam8Bit
from meshwright.optim.muon import Muon
from meshwright.optim.rounding import WeightFormat
from meshwright.optim.sgd import Sgd
from meshwright.optim.sharded import LOWER_BITS, OptimizerShards, ShardedOptimizer
from meshwright.spec import OptimSpec
from meshwright.spec.optim import group_of

# State tensors of torch's own optimizers, each of the parameter's shape.
STATE_TENSORS = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}


def state_dims(key: str, num_dims: int) -> tuple[int | None, ...]:
    """The dim of the parameter that each dim of a state tensor is sharded with; None: unsharded."""
    if key == "row_mean_sq":
        return tuple(range(num_dims - 1))
    if key == "column_mean_sq":
        return (*range(num_dims - 2), num_dims - 1)
    if key.endswith("_scale"):
        return (*range(num_dims - 1), None)
    return tuple(range(num_dims))


def parameter_groups(shards: Mapping[str, nn.Parameter], optim: OptimSpec) -> list[dict[str, Any]]:
    """Groups with weight decay and without (vectors by default), and one for each of `optim.groups`."""
    decaying = {"params": [], "weight_decay": optim.weight_decay, "lr_factor": 1.0}
    others = {"params": [], "weight_decay": 0.0, "lr_factor": 1.0}
    named: dict[tuple[int, float], dict[str, Any]] = {}
    for name, shard in shards.items():
        usual = decaying if optim.weight_decay_on == "all" or shard.ndim >= 2 else others
        index = group_of(name, optim.groups)
        if index is None:
            usual["params"].append(shard)
            continue
        chosen = optim.groups[index]
        decay = usual["weight_decay"] if chosen.weight_decay is None else chosen.weight_decay
        group = {"params": [], "weight_decay": decay, "lr_factor": chosen.lr_factor}
        named.setdefault((index, decay), group)["params"].append(shard)
    return [decaying, others, *named.values()]


def build_optimizer(
    shards: Mapping[str, nn.Parameter],
    optim: OptimSpec,
    full_parameters: Mapping[str, FullParameter] | None = None,
    *,
    weights: WeightFormat = "fp32",
    simulated: SimulatedDevice | None = None,
) -> torch.optim.Optimizer:
    """The optimizer with all its state allocated, so that memory is known before the first step.

    `full_parameters` describes the full parameter of each shard; without it the shards are full parameters.
    `weights` is the format of the shards. A rehearsal passes the device that it simulates.
    """
    groups = parameter_groups(shards, optim)
    # A pipeline stage may train nothing; torch wants one group all the same.
    groups = [group for group in groups if group["params"]] or groups[:1]
    if weights == "fp32" and _has_torch_optimizer(shards, optim, simulated):
        optimizer = _build_elementwise(groups, optim)
    else:
        full = {
            shard: full_parameters[name] if full_parameters else unsharded(name, shard)
            for name, shard in shards.items()
        }
        optimizer = _build_sharded(OptimizerShards(groups, full, optim.lr, weights, simulated), optim)
    set_num_updates(optimizer, shards, optim, num_updates=0)
    return optimizer


def _on_cuda(shards: Mapping[str, nn.Parameter], simulated: SimulatedDevice | None = None) -> bool:
    return any(kernel_device(one.device.type, simulated) == "cuda" for one in shards.values())


def _has_torch_optimizer(
    shards: Mapping[str, nn.Parameter], optim: OptimSpec, simulated: SimulatedDevice | None
) -> bool:
    """Whether torch's optimizer is used. On CUDA our AdamW is faster: clipping is part of its pass."""
    if optim.kind not in STATE_TENSORS or optim.state != "fp32":
        return False
    return optim.kind != "adamw" or not _on_cuda(shards, simulated)


def _build_elementwise(groups: list[dict[str, Any]], optim: OptimSpec) -> torch.optim.Optimizer:
    if optim.kind == "sgd":
        return torch.optim.SGD(groups, lr=optim.lr, momentum=optim.beta1)
    betas = (optim.beta1, optim.beta2)
    return torch.optim.AdamW(groups, lr=optim.lr, betas=betas, eps=optim.eps, foreach=True)


def _build_sharded(shards: OptimizerShards, optim: OptimSpec) -> ShardedOptimizer:
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
    """State tensors by parameter name; they are the optimizer's own, so a checkpoint is loaded into them.

    The lower bits of weights are not among them: they belong to `master_weights`.
    """
    keys = STATE_TENSORS.get(optim.kind, ()) if optim.kind != "sgd" or optim.beta1 else ()
    found: dict[str, dict[str, Tensor]] = {}
    for name, shard in shards.items():
        state = optimizer.state[shard]
        is_ours = isinstance(optimizer_of(optimizer, shard), ShardedOptimizer)
        found[name] = {key: state[key] for key in (state if is_ours else keys) if key != LOWER_BITS}
    return found


def master_weights(optimizer: torch.optim.Optimizer, shards: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """fp32 copies of the weights whose lower bits the optimizer stores, for a checkpoint."""
    parts = {name: optimizer_of(optimizer, shard) for name, shard in shards.items()}
    return {
        name: part.master(shards[name])
        for name, part in parts.items()
        if isinstance(part, ShardedOptimizer) and LOWER_BITS in part.state[shards[name]]
    }


def set_master_weights(
    optimizer: torch.optim.Optimizer, shards: Mapping[str, nn.Parameter], masters: Mapping[str, Tensor]
) -> None:
    """Set weights: rounded into the shards, with the rest in the lower bits where these are stored."""
    for name, value in masters.items():
        part = optimizer_of(optimizer, shards[name])
        if isinstance(part, ShardedOptimizer):
            part.set_master(shards[name], value)
        else:
            shards[name].detach().copy_(value)


def set_num_updates(
    optimizer: torch.optim.Optimizer,
    shards: Mapping[str, nn.Parameter],
    optim: OptimSpec,
    *,
    num_updates: int,
) -> None:
    """Allocate missing state and set the number of updates so far (for Adam's bias correction)."""
    for shard in shards.values():
        part, state = optimizer_of(optimizer, shard), optimizer.state[shard]
        if isinstance(part, ShardedOptimizer):
            part.num_updates = num_updates
            continue
        if optim.kind == "sgd":
            if optim.beta1:
                state.setdefault("momentum_buffer", torch.zeros_like(shard))
            continue
        state["step"] = torch.tensor(float(num_updates))
        for key in STATE_TENSORS["adamw"]:
            state.setdefault(key, torch.zeros_like(shard))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every group: the given rate times the group's factor."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["lr_factor"]
