"""Whether autograd's engine is running: torch has a private function for it only."""

import torch


def is_in_backward() -> bool:
    """True inside a backward pass, where a forward is a recomputed one (activation checkpointing)."""
    return torch._C._current_graph_task_id() != -1
