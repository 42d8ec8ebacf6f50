"""How layers read a parameter that may be cut over tp."""

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial


def local(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter, as a plain tensor; gradients flow back to the parameter.

    A parameter that an axis does not cut is used by each of its ranks on another part of the
    sequence or of the heads, so the gradient each rank finds is one term of a sum: Partial.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    grads = [Partial() if placement.is_replicate() else placement for placement in parameter.placements]
    return parameter.to_local(grad_placements=grads)
