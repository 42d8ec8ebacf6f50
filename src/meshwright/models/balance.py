"""What a step reads from, and writes to, the routers of a model."""

import torch
from torch import Tensor, nn

from meshwright.models.layers.moe import Moe


def moe_layers(model: nn.Module) -> dict[str, Moe]:
    """The MoE layers by module name, in order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Moe)}


def take_records(model: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """(choices per expert, auxiliary loss) of each MoE layer since the last call, then set to zero.

    Both are this rank's share: sum them over every rank that reads other tokens.
    """
    records: dict[str, tuple[Tensor, Tensor]] = {}
    for name, layer in moe_layers(model).items():
        records[name] = (layer.load.clone(), layer.balance_loss.clone())
        layer.load.zero_()
        layer.balance_loss.zero_()
    return records


@torch.no_grad()
def step_balance_bias(model: nn.Module, load_by_layer: dict[str, Tensor]) -> None:
    """Moves each router's bias one step towards even use: up for experts below the mean, down above.

    `load_by_layer` are the choices per expert of the whole step, summed over all ranks, so that
    every rank makes the same step.
    """
    for name, layer in moe_layers(model).items():
        bias, load_E = layer.router.balance_bias, load_by_layer[name].to(torch.float64)
        if bias is not None and layer.moe.balance_bias_rate:
            bias += layer.moe.balance_bias_rate * torch.sign(load_E.mean() - load_E).to(bias)
