"""Records what a rank communicates: every collective with its kind, its group and its bytes.

A dispatch mode sees the c10d operators under every public function (FSDP2, DTensor, pipelining and our
own calls alike). On a CPU the backward pass runs in the calling thread, so it is seen as well.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.mesh import Mesh

Named = Counter[tuple[str, str, int]]
"""(kind, axes, bytes) -> how often."""

# c10d operator -> (kind, index of the argument whose bytes are counted: the larger side of the exchange).
_KINDS = {
    "allreduce_": ("all_reduce", 0),
    "reduce_scatter_": ("reduce_scatter", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "allgather_": ("all_gather", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "alltoall_base_": ("all_to_all", 1),
    "alltoall_": ("all_to_all", 1),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "scatter_": ("scatter", 1),
    "gather_": ("gather", 0),
    "send": ("send", 0),
    "recv_": ("recv", 0),
    "barrier": ("barrier", 0),
}
_FUNCTIONAL = {
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "broadcast_": "broadcast",
}


@dataclasses.dataclass(frozen=True)
class Call:
    """One collective of one rank."""

    kind: str
    ranks: frozenset[int]
    bytes: int
    """Bytes of the full tensor that is exchanged: the gathered one, or the one before scattering."""


class Recorder(TorchDispatchMode):
    """Records every collective that is launched inside the `with` block."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        namespace, name = func.namespace, func._schema.name.split("::")[1]
        result = func(*args, **(kwargs or {}))
        if namespace == "c10d" and name != "monitored_barrier_":
            kind, counted = _KINDS[name]
            group = next(
                _group(one) for one in args if isinstance(one, torch.ScriptObject) and _is_group(one)
            )
            self.calls.append(Call(kind, _ranks(group), _bytes(args[counted])))
        elif namespace == "_c10d_functional" and name in _FUNCTIONAL:
            self.calls.append(self._functional(name, args, result))
        return result

    def _functional(self, name: str, args: tuple, result: Any) -> Call:
        kind = _FUNCTIONAL[name]
        group = next(value for value in reversed(args) if isinstance(value, str))
        full = args[0] if kind == "reduce_scatter" else result
        return Call(kind, _ranks(dist.distributed_c10d._resolve_process_group(group)), _bytes(full))


def _is_group(value: Any) -> bool:
    return "ProcessGroup" in str(value._type())


def _group(value: Any) -> dist.ProcessGroup:
    return dist.ProcessGroup.unbox(value)


def _ranks(group: dist.ProcessGroup) -> frozenset[int]:
    return frozenset(dist.get_process_group_ranks(group))


def _bytes(value: Any) -> int:
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def axis_ranks(mesh: Mesh) -> dict[str, frozenset[int]]:
    """The ranks of this rank's group along each axis and each product of axes (`dp_shard+cp`)."""
    found = _products(mesh.sequence)
    pipeline = sorted(found["pp"])
    found["pp_ends"] = frozenset((pipeline[0], pipeline[-1]))  # both hold a tied embedding
    if mesh.parallel.ep > 1:
        found |= {name: found_ for name, found_ in _products(mesh.expert).items() if "e" in name[:1]}
    return found


def _products(mesh: DeviceMesh) -> dict[str, frozenset[int]]:
    names = mesh.mesh_dim_names or ()
    here = mesh.get_coordinate() or []
    found = {}
    for count in range(1, len(names) + 1):
        for chosen in combinations(range(len(names)), count):
            part = mesh.mesh[tuple(slice(None) if i in chosen else here[i] for i in range(len(names)))]
            found["+".join(names[i] for i in chosen)] = frozenset(part.flatten().tolist())
    return found


def named_calls(calls: Iterable[Call], mesh: Mesh) -> Named:
    """(kind, axes, bytes) -> how often; calls inside a group of one rank move nothing and are left out."""
    names: dict[frozenset[int], str] = {}
    for name, ranks in axis_ranks(mesh).items():
        names.setdefault(ranks, name)  # the shortest product that covers the group
    return Counter(
        (call.kind, names.get(call.ranks, f"ranks {sorted(call.ranks)}"), call.bytes)
        for call in calls
        if len(call.ranks) > 1
    )
