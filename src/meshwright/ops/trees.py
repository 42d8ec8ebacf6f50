"""Tensors inside nested containers that a loader or a module returns: tuples, dicts, Hugging Face outputs."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# Private: torch has no public pytree, and libraries register their own containers there (transformers does).
# Other files import these names from here.
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only


def map_tensors(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with `change` applied to every tensor."""
    return tree_map_only(Tensor, change, tree)


def map_together(change: Callable[..., Any], trees: Sequence[Any]) -> Any:
    """One structure: `change` of the leaves of several at each place; ValueError where structures differ."""
    return tree_map(change, trees[0], *trees[1:])


def on_device(tree: Any, device: torch.device) -> Any:
    """The same structure on a device; copies from pinned memory are asynchronous."""
    return map_tensors(tree, lambda one: one.to(device, non_blocking=True))


def pinned(tree: Any) -> Any:
    """The same structure with host tensors in pinned memory, so that copies to a device overlap."""
    return map_tensors(tree, lambda one: one.pin_memory() if one.device.type == "cpu" else one)


def tensors_of(tree: Any) -> list[Tensor]:
    """All tensors of the structure."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
