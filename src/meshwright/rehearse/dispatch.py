"""Records every operator of a step as it is dispatched: its storages, collectives and FLOPs."""

import contextlib
import dataclasses
import sys
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import flop_registry

from meshwright.mesh import Mesh
from meshwright.ops.torch_dispatch import TorchDispatchMode
from meshwright.ops.trees import tree_leaves
from meshwright.rehearse.allocation_log import AllocationLog
from meshwright.rehearse.world import axis_of, group_named

_aten = torch.ops.aten
_ATTENTION = (
    _aten._scaled_dot_product_cudnn_attention,
    _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_efficient_attention,
)
_ATTENTION_BACKWARD = (
    _aten._scaled_dot_product_cudnn_attention_backward,
    _aten._scaled_dot_product_flash_attention_backward,
    _aten._scaled_dot_product_efficient_attention_backward,
)
_MATMULS = (_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm)
# Kind of collective by the name of its operator; all other operators of c10d are bookkeeping.
COLLECTIVES = {
    "allgather_": "all-gather",
    "_allgather_base_": "all-gather",
    "allgather_into_tensor_coalesced_": "all-gather",
    "reduce_scatter_": "reduce-scatter",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor_coalesced_": "reduce-scatter",
    "allreduce_": "all-reduce",
    "allreduce_coalesced_": "all-reduce",
    "alltoall_": "all-to-all",
    "alltoall_base_": "all-to-all",
    "broadcast_": "broadcast",
    "send": "send",
    "recv_": "receive",
    # Functional collectives, as compiled graphs call them: they return their result.
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
    "all_reduce": "all-reduce",
    "all_to_all_single": "all-to-all",
}


@dataclasses.dataclass(slots=True)
class Traffic:
    """Calls of one kind of collective over one axis."""

    count: int = 0
    num_bytes: int = 0
    """Sum over the calls; of a call's input and output the larger one counts."""


class Observer(TorchDispatchMode):
    """Records operators of plain tensors in an allocation log; a DTensor's as the local ones they call."""

    def __init__(self, allocations: AllocationLog, mesh: Mesh) -> None:
        super().__init__()
        self.allocations, self._mesh = allocations, mesh
        self._axes: dict[str, str] = {}
        self.traffic: dict[tuple[str, str], Traffic] = defaultdict(Traffic)
        self.flops = 0
        self.num_operators = 0
        self._is_paused = False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, nothing is recorded."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: torch's compiler works without this mode instead of refusing to compile under it."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the operator, record it, and return its result."""
        kwargs = kwargs or {}
        if self._is_paused:
            return func(*args, **kwargs)
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented
        out = func(*args, **kwargs)
        self.num_operators += 1
        if func.namespace == "c10d":
            self._record_collective(func, args)
            return out
        if func.namespace == "_c10d_functional":
            self.allocations.record(out, str(func._overloadpacket))
            self._record_collective(func, (*args, out))
            return out
        packet = func._overloadpacket
        if packet in flop_registry:
            self.flops += _flops(packet, args, kwargs, out)
        if func is _aten.add.Tensor and _is_gradient_sum():
            target = _unshared(args)
            if target is not None:
                self.allocations.reuse_storage(target, out)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.allocations.record(tensor, str(packet), _kind(func, args, self.allocations))
        return out

    def _record_collective(self, func: Any, args: Any) -> None:
        name = COLLECTIVES.get(func.__name__.split(".")[0])
        if name is None:
            return
        tensors = [[x for x in tree_leaves(arg) if isinstance(x, Tensor)] for arg in args]
        sizes = [sum(x.numel() * x.element_size() for x in group) for group in tensors]
        axis = self._axis(args)
        row = self.traffic[axis, name]
        row.count += 1
        row.num_bytes += max(sizes)
        for tensor in (x for group in tensors for x in group):
            record = self.allocations.find(tensor)
            if record is not None and record.kind is None:
                record.kind = _item_of_message(name, axis)

    def _axis(self, args: Any) -> str:
        for group in filter(None, map(_group, args)):
            if group.group_name not in self._axes:
                self._axes[group.group_name] = axis_of(group, self._mesh)
            return self._axes[group.group_name]
        return "one rank"


def _group(argument: Any) -> dist.ProcessGroup | None:
    """The process group that an argument of a collective is, or is the name of; None for other arguments."""
    if isinstance(argument, torch.ScriptObject):
        try:
            return dist.ProcessGroup.unbox(argument)
        except RuntimeError:  # the ScriptObject is a reduction, not a group
            return None
    return group_named(argument) if isinstance(argument, str) else None


def _flops(packet: Any, args: Any, kwargs: Any, out: Any) -> int:
    """FLOPs of one call by torch's formulas, which do not take a matmul's output dtype.

    They also lack some forms of attention: two matmuls forward and five backward, causal or not.
    """
    if packet in _ATTENTION:
        q, k, v = args[:3]
        return 2 * q.shape[:-1].numel() * k.shape[-2] * (q.shape[-1] + v.shape[-1])
    if packet in _ATTENTION_BACKWARD:
        q, k, v = args[1:4]
        return 2 * q.shape[:-1].numel() * k.shape[-2] * (3 * q.shape[-1] + 2 * v.shape[-1])
    if packet in _MATMULS:
        return flop_registry[packet](*(x for x in args if isinstance(x, Tensor)), out_val=out)
    return flop_registry[packet](*args, **kwargs, out_val=out)


def _item_of_message(name: str, axis: str) -> str | None:
    """Item of a message: dp axes carry weights and gradients, all-to-all and pp carry activations."""
    if name == "all-to-all" or axis == "pp":
        return "exchange"
    return "gathered" if "dp_" in axis and name != "all-reduce" else None


def _kind(func: Any, args: Any, allocations: AllocationLog) -> str | None:
    """`cast weights` for a lower-precision copy of a weight, as autocast makes one before each matmul."""
    if func is not _aten._to_copy.default:
        return None
    source = allocations.find(args[0])
    return "cast weights" if source is not None and source.kind in ("weights", "gathered") else None


def _is_gradient_sum() -> bool:
    """Whether the caller is autograd's engine, which sums two gradients of one tensor.

    For a tensor subclass, such as a fake tensor, it allocates the sum; for a plain tensor it adds in place.
    """
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_name in DISPATCH_WRAPPERS:
        frame = frame.f_back
    return frame.f_code.co_name == "_engine_run_backward"


# Torch calls a dispatch mode through these.
DISPATCH_WRAPPERS = ("_fn", "inner")


def _unshared(gradients: tuple[Tensor, Tensor]) -> Tensor | None:
    """The gradient that the engine would add the other one to: the first without other references."""
    if sys.getrefcount(gradients[0]) <= ENGINE_REFERENCES:
        return gradients[0]
    return gradients[1] if sys.getrefcount(gradients[1]) <= ENGINE_REFERENCES else None


# The engine's own, the one of the pair and the one of the count.
ENGINE_REFERENCES = 3
