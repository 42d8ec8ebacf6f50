"""`TorchDispatchMode`, which sees every operator that runs inside it.

torch documents it as the way to intercept operators and keeps it in a private module,
`torch.utils._python_dispatch`.
"""

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode"]
