"""The number of graphs that torch.compile has made. Torch has no public counter."""

from typing import Any

import torch


def num_compiled_graphs() -> int:
    """Graphs that torch's compiler has made in this process."""
    dynamo: Any = torch._dynamo
    return dynamo.utils.counters["stats"]["unique_graphs"]
