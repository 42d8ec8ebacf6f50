"""What DoRA adds to a frozen output under dropout; the ratio enters the autograd graph at one node.

    y + (r - 1) f + r a  =  (y + a) + (r - 1) (f + a)      f = W drop(x), a = scale B A drop(x),
                                                           r = m / |W + scale B A|

Pipeline schedules that split backward group parameters by the nodes at which they enter the path from input
to output. torch's grouping expects one such node per parameter: with two of them it may run the backward of m
twice, depending on the order of a set. The node is one of torch's own: it lives as long as the schedule holds
it, where torch 2.11 frees that of an `autograd.Function` between the two parts of backward.
"""

import torch
from torch import Tensor


def rescaled_sum(y: Tensor, frozen: Tensor, added: Tensor, ratio: Tensor) -> Tensor:
    """y + (ratio - 1) frozen + ratio added in the dtype of y; the ratio broadcasts over leading dims."""
    # r - 1 is small, and y large: the change is computed before it is rounded beside y.
    return torch.addcmul(y + added, frozen + added, (ratio - 1).to(y.dtype))
