"""Tensors inside whatever a loader or a module gives: tuples, dicts, Hugging Face outputs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Private, and the only place where libraries register their own containers (transformers does).
from torch.utils._pytree import tree_leaves, tree_map_only


def map_tensors(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with every tensor changed."""
    return tree_map_only(Tensor, change, tree)


def on_device(tree: Any, device: torch.device) -> Any:
    """The same structure on a device; from pinned memory this returns before the copies are done."""
    return map_tensors(tree, lambda one: one.to(device, non_blocking=True))


def tensors_of(tree: Any) -> list[Tensor]:
    """Every tensor inside."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
