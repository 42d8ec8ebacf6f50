"""cuBLAS's workspaces: torch keeps them allocated, and frees them by a private function only."""

import torch


def clear_cublas_workspaces() -> None:
    """Free the workspaces that earlier matmuls of this process left; nothing where torch has no CUDA."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()
