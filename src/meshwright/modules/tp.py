"""Tensor parallel for a Hugging Face decoder by the plan that it publishes.

    colwise                 x[B, S, D] -> y[B, S, F_tp] = x W[D, F_tp]       backward: all-reduce of dx
    rowwise                 y{tp}[B, S, D] = x[B, S, F_tp] W[F_tp, D], all-reduce of y
    colwise_gather_output   as colwise, then an all-gather to y[B, S, F]
    rowwise_split_input     its part x[B, S, F_tp] of x[B, S, F] first, then as rowwise
    embedding_rowwise       x{tp}[B, S, D] = rows of table[V_tp, D], all-reduce

Outside of a column-wise / row-wise pair every tp rank holds the same activations and computes the same full
gradients: parameters there are plain tensors without a reduction. Modules inside a pair (norms of queries and
keys) see a part of the heads; their gradients are all-reduced over tp in backward.

Per pair two all-reduces of B S D elements, one forward and one backward. It pays inside an NVLink domain, for
decoders that are too wide for one device.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import Shard, distribute_tensor

from meshwright.mesh import Mesh
from meshwright.modules.tp_plan import COLUMN_WISE, EMBEDDING, ROW_WISE, Styles
from meshwright.ops.collectives import (
    all_reduce_backward,
    all_reduce_forward,
    gather_to_replicated,
    scatter_from_replicated,
)
from meshwright.ops.sharded import local

Values = dict[str, Any]
"""Values of module attributes during a forward, by name."""


def apply_tp_plan(model: nn.Module, styles: Styles, mesh: Mesh) -> None:
    """Shard the parameters of a module in place, and add the collectives to its layers."""
    group = mesh.group("tp")
    _shard_parameters(model, styles, mesh)
    for name, style in styles.items():
        module = model.get_submodule(name)
        if style in COLUMN_WISE:
            _wrap_colwise(module, group, gathers=style != "colwise")
        elif style in ROW_WISE:
            _wrap_rowwise(module, group, splits=style != "rowwise")
        elif style == EMBEDDING:
            _wrap_embedding(module, group)
        else:
            _all_reduce_gradients(module, group)


def _shard_parameters(model: nn.Module, styles: Styles, mesh: Mesh) -> None:
    """Make DTensors over tp where the plan shards; a parameter that two modules share stays one."""
    sharded: dict[int, nn.Parameter] = {}
    for name, style in styles.items():
        module = model.get_submodule(name)
        for key, dim in _sharded_dims(style).items():
            full = dict(module.named_parameters(recurse=False)).get(key)
            if full is None:
                continue
            if id(full) not in sharded:
                shard = distribute_tensor(full.detach(), mesh.dense["tp"], [Shard(dim)], src_data_rank=None)
                sharded[id(full)] = nn.Parameter(shard, requires_grad=full.requires_grad)
            module.register_parameter(key, sharded[id(full)])


def _sharded_dims(style: str) -> dict[str, int]:
    """The dim that each parameter of a layer is sharded along; torch stores W as [out, in]."""
    if style in COLUMN_WISE:
        return {"weight": 0, "bias": 0}
    return {"weight": 1} if style in ROW_WISE else {"weight": 0} if style == EMBEDDING else {}


def _wrap_colwise(module: nn.Module, group: ProcessGroup, *, gathers: bool) -> None:
    forward = module.forward

    def wrapped(x: Tensor) -> Tensor:
        with _overridden(module, _local_parameters(module)):
            y = forward(all_reduce_backward(x, group))
        return gather_to_replicated(y, y.ndim - 1, group) if gathers else y

    module.forward = wrapped


def _wrap_rowwise(module: nn.Module, group: ProcessGroup, *, splits: bool) -> None:
    forward = module.forward

    def wrapped(x: Tensor) -> Tensor:
        bias = dict(module.named_parameters(recurse=False)).get("bias")  # added once, to the sum
        shard = scatter_from_replicated(x, x.ndim - 1, group) if splits else x
        with _overridden(module, {**_local_parameters(module), "bias": None}):
            y = all_reduce_forward(forward(shard), group)
        return y if bias is None else y + bias

    module.forward = wrapped


def _wrap_embedding(module: nn.Module, group: ProcessGroup) -> None:
    """Rows of other ranks come out as zeros. The padding row, which has no gradient, is on one rank only."""
    forward, padding = module.forward, module.padding_idx

    def wrapped(ids: Tensor) -> Tensor:
        values = _local_parameters(module)
        num_rows = values["weight"].shape[0]
        begin = group.rank() * num_rows
        is_local = (ids >= begin) & (ids < begin + num_rows)
        if padding is not None:
            values["padding_idx"] = padding - begin if 0 <= padding - begin < num_rows else None
        with _overridden(module, values):
            x = forward(torch.where(is_local, ids - begin, 0))
        return all_reduce_forward(x * is_local[..., None], group)

    module.forward = wrapped


def _all_reduce_gradients(module: nn.Module, group: ProcessGroup) -> None:
    """For a module that every rank holds in full, but that sees only a part of the heads."""
    forward: Callable[..., Any] = module.forward

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        values = {key: all_reduce_backward(one, group) for key, one in _local_parameters(module).items()}
        with _overridden(module, values):
            return forward(*args, **kwargs)

    module.forward = wrapped


def _local_parameters(module: nn.Module) -> Values:
    return {key: local(one) for key, one in module.named_parameters(recurse=False)}


@contextmanager
def _overridden(module: nn.Module, values: Values) -> Iterator[None]:
    """A context in which these attributes of a user module have other values.

    An instance attribute comes before nn.Module's own look-up, so parameters are hidden, not changed.
    """
    hidden = {key: vars(module)[key] for key in values if key in vars(module)}
    vars(module).update(values)
    try:
        yield
    finally:
        for key in values:
            del vars(module)[key]
        vars(module).update(hidden)
