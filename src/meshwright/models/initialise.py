"""Initial weights that do not depend on the layout: every tensor has a seed of its own.

A full parameter is drawn on the CPU in float32, from a generator seeded by the run's seed and the parameter's
name, and each rank keeps its shard. So any mesh, stage split, device or dtype starts from the same weights.
"""

import hashlib
import math

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.models.decoder import Decoder
from meshwright.ops.sharded import local_slices
from meshwright.spec import ModelSpec
from meshwright.spec.parameters import Parameter, parameters

# QkvProjections into the residual stream; each layer adds two of them.
_INTO_RESIDUAL = ("attention.output.weight", "mlp.down.weight", "mlp.experts.down", "mlp.shared.down.weight")


@torch.no_grad()
def initialise(model: Decoder, seed: int, *, device: torch.device | str = "cpu") -> None:
    """Allocate a model that is on the meta device on `device`, and initialise every parameter and buffer.

    A model that has memory already is filled in place. Does not communicate.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        model.to_empty(device=device)
    described = {parameter.name: parameter for parameter in parameters(model.spec)}
    for name, tensor in model.named_parameters():
        fill(tensor, initial_value(model.spec, described[name], seed))
    for buffer in model.buffers():
        buffer.zero_()  # balance bias, load and loss records


def initial_value(spec: ModelSpec, parameter: Parameter, seed: int) -> Tensor:
    """The full tensor, float32 on the CPU: ones for norms, zeros for biases, else a normal distribution."""
    if parameter.kind == "norm":
        return torch.ones(parameter.shape)
    if parameter.kind == "bias":
        return torch.zeros(parameter.shape)
    generator = torch.Generator().manual_seed(seed_of(seed, parameter.name))
    drawn = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
    return drawn.normal_(0.0, initial_std(spec, parameter), generator=generator)


def initial_std(spec: ModelSpec, parameter: Parameter) -> float:
    """Standard deviation of a random tensor."""
    into_residual = parameter.name.endswith(_INTO_RESIDUAL)
    scaled = into_residual and spec.scaled_residual_init
    return spec.init_std / math.sqrt(2 * spec.num_layers) if scaled else spec.init_std


def fill(parameter: Tensor, full: Tensor) -> None:
    """Copy a full tensor into a parameter that may be sharded: each rank takes its shard."""
    target = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    target.copy_(full[local_slices(parameter)])


def seed_of(seed: int, name: str) -> int:
    """The seed of one tensor, from the run's seed and the tensor's name: 63 bits."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
