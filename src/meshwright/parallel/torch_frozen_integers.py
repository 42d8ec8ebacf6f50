"""Frozen integer parameters under FSDP2 with torch 2.11.

There FSDP2 makes the `nn.Parameter` of every shard with the default `requires_grad=True`, which integers
refuse, and sets the value of the full parameter only afterwards. Packed weights (NF4, fp8 bytes) are integers
because mixed precision does not cast those. torch 2.12 passes the value on: with it this file goes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_param

IS_NEEDED = torch.__version__.startswith("2.11.")


@contextmanager
def frozen_integers() -> Iterator[None]:
    """FSDP2 shards integer parameters inside of this."""
    if not IS_NEEDED:
        yield
        return
    _fsdp_param.nn = SimpleNamespace(Module=nn.Module, Parameter=_parameter)
    try:
        yield
    finally:
        _fsdp_param.nn = nn


def _parameter(data: Tensor, requires_grad: bool | None = None) -> nn.Parameter:  # noqa: FBT001 - as torch calls it
    can_require = data.is_floating_point() or data.is_complex()
    return nn.Parameter(data, requires_grad=can_require if requires_grad is None else requires_grad)
