"""Load balance of MoE layers: reading what the routers recorded, and updating their bias."""

import torch
from torch import Tensor, nn

from meshwright.models.layers.moe import Moe


def moe_layers(model: nn.Module) -> dict[str, Moe]:
    """The MoE layers by module name, in order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Moe)}


def pop_routing_records(model: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """(choices per expert, auxiliary loss) of each MoE layer since the last call, then reset to zero.

    Both count this rank's tokens: sum them over every rank that holds other tokens.
    """
    records: dict[str, tuple[Tensor, Tensor]] = {}
    for name, layer in moe_layers(model).items():
        records[name] = (layer.load.clone(), layer.balance_loss.clone())
        layer.load.zero_()
        layer.balance_loss.zero_()
    return records


@torch.no_grad()
def update_balance_bias(model: nn.Module, load_by_layer: dict[str, Tensor]) -> None:
    """Move the bias of each trained router one step towards an even load: up for experts below the mean.

    `load_by_layer` holds the choices per expert of the full step, summed over all ranks, so that
    every rank makes the same update.
    """
    for name, layer in moe_layers(model).items():
        bias, load_E = layer.router.balance_bias, load_by_layer[name].to(torch.float64)
        is_trained = layer.router.weight.requires_grad
        if bias is not None and layer.moe.balance_bias_rate and is_trained:
            bias += layer.moe.balance_bias_rate * torch.sign(load_E.mean() - load_E).to(bias)
