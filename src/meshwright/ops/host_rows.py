"""Rows of a table in host memory, read by the device itself.

Pinned memory has an address on the device, so one kernel reads just the rows that are asked for, and the host
does not wait. Without Triton the host reads the ids and picks the rows: it then waits for the device.
"""

from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional

HAS_TRITON = find_spec("triton") is not None
if HAS_TRITON:  # comes with torch for CUDA
    from meshwright.ops.host_rows_triton import read_host_rows


@torch.library.custom_op("meshwright::host_rows", mutates_args=())
def host_rows(table_VD: Tensor, ids: Tensor) -> Tensor:
    """table[ids], on the device of the ids; the table is in pinned memory where that is a GPU."""
    if not ids.is_cuda:
        return functional.embedding(ids, table_VD)
    if HAS_TRITON:
        return read_host_rows(table_VD, ids)
    return functional.embedding(ids.cpu(), table_VD).to(ids.device)  # host sync


@host_rows.register_fake
def _(table_VD: Tensor, ids: Tensor) -> Tensor:
    return ids.new_empty((*ids.shape, table_VD.shape[1]), dtype=table_VD.dtype)
