"""Tensor parallel for a Hugging Face decoder by the plan that it publishes.

    colwise                 x[B, S, D] -> y[B, S, F_tp] = x W[D, F_tp]       backward: all-reduce of dx
    rowwise                 y{tp}[B, S, D] = x[B, S, F_tp] W[F_tp, D], all-reduce of y
    colwise_gather_output   as colwise, then an all-gather to y[B, S, F]
    rowwise_split_input     its part x[B, S, F_tp] of x[B, S, F] first, then as rowwise
    embedding_rowwise       x{tp}[B, S, D] = rows of table[V_tp, D], all-reduce

Outside of cut pairs every tp rank holds the same activations and finds the same, whole gradients: parameters
there are plain tensors that nothing is summed for. What stands inside a pair (norms of queries and keys)
sees a part of the heads; its gradient is summed over tp on the way back.

Per pair two all-reduces of B S D elements, one forward and one backward.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import Shard, distribute_tensor

from meshwright.mesh import Mesh
from meshwright.modules.tp_plan import COLUMN_WISE, LOOKUP, ROW_WISE, Styles
from meshwright.ops.collectives import all_reduce_backward, all_reduce_forward, gather_alike, part_alike
from meshwright.ops.sharded import local

Values = dict[str, Any]
"""What attributes of a module are during its forward."""


def apply_plan(model: nn.Module, styles: Styles, mesh: Mesh) -> None:
    """Cut the parameters of a module in place, and put the crossings around its layers."""
    group = mesh.group("tp")
    _cut_parameters(model, styles, mesh)
    for name, style in styles.items():
        module = model.get_submodule(name)
        if style in COLUMN_WISE:
            _cross_columns(module, group, gathers=style != "colwise")
        elif style in ROW_WISE:
            _cross_rows(module, group, splits=style != "rowwise")
        elif style == LOOKUP:
            _cross_lookup(module, group)
        else:
            _sum_gradients(module, group)


def _cut_parameters(model: nn.Module, styles: Styles, mesh: Mesh) -> None:
    """DTensors over tp where the plan cuts; a parameter of two modules stays one."""
    cut: dict[int, nn.Parameter] = {}
    for name, style in styles.items():
        module = model.get_submodule(name)
        for key, dim in _cut_dims(style).items():
            whole = module._parameters.get(key)
            if whole is None:
                continue
            if id(whole) not in cut:
                part = distribute_tensor(whole.detach(), mesh.dense["tp"], [Shard(dim)], src_data_rank=None)
                cut[id(whole)] = nn.Parameter(part, requires_grad=whole.requires_grad)
            module.register_parameter(key, cut[id(whole)])


def _cut_dims(style: str) -> dict[str, int]:
    """The dim that each parameter of a layer is cut along; torch keeps W as [out, in]."""
    if style in COLUMN_WISE:
        return {"weight": 0, "bias": 0}
    return {"weight": 1} if style in ROW_WISE else {"weight": 0} if style == LOOKUP else {}


def _cross_columns(module: nn.Module, group: ProcessGroup, *, gathers: bool) -> None:
    forward = module.forward

    def crossed(x: Tensor) -> Tensor:
        with _seen_as(module, _local_parameters(module)):
            y = forward(all_reduce_backward(x, group))
        return gather_alike(y, y.ndim - 1, group) if gathers else y

    module.forward = crossed


def _cross_rows(module: nn.Module, group: ProcessGroup, *, splits: bool) -> None:
    forward = module.forward

    def crossed(x: Tensor) -> Tensor:
        bias = module._parameters["bias"]  # added once, to the sum
        part = part_alike(x, x.ndim - 1, group) if splits else x
        with _seen_as(module, {**_local_parameters(module), "bias": None}):
            y = all_reduce_forward(forward(part), group)
        return y if bias is None else y + bias

    module.forward = crossed


def _cross_lookup(module: nn.Module, group: ProcessGroup) -> None:
    """Rows of other ranks come out as zeros. A padding row, which learns nothing, is one rank's only."""
    forward, padding = module.forward, module.padding_idx

    def crossed(ids: Tensor) -> Tensor:
        values = _local_parameters(module)
        num_rows = values["weight"].shape[0]
        begin = group.rank() * num_rows
        is_mine = (ids >= begin) & (ids < begin + num_rows)
        if padding is not None:
            values["padding_idx"] = padding - begin if 0 <= padding - begin < num_rows else None
        with _seen_as(module, values):
            x = forward(torch.where(is_mine, ids - begin, 0))
        return all_reduce_forward(x * is_mine[..., None], group)

    module.forward = crossed


def _sum_gradients(module: nn.Module, group: ProcessGroup) -> None:
    """For what is whole on every rank, but sees only a part of the heads."""
    forward: Callable[..., Any] = module.forward

    def crossed(*args: Any, **kwargs: Any) -> Any:
        values = {key: all_reduce_backward(one, group) for key, one in _local_parameters(module).items()}
        with _seen_as(module, values):
            return forward(*args, **kwargs)

    module.forward = crossed


def _local_parameters(module: nn.Module) -> Values:
    return {key: local(one) for key, one in module.named_parameters(recurse=False)}


@contextmanager
def _seen_as(module: nn.Module, values: Values) -> Iterator[None]:
    """Let a forward that we did not write find these values under the names of its attributes.

    An instance attribute stands before nn.Module's own look-up, so parameters are hidden, not changed.
    """
    hidden = {key: vars(module)[key] for key in values if key in vars(module)}
    vars(module).update(values)
    try:
        yield
    finally:
        for key in values:
            del vars(module)[key]
        vars(module).update(hidden)
