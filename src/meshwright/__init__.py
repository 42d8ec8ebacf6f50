"""Meshwright decides how to train your model on the GPUs you have, proves it, and then trains."""

import importlib
from typing import Any

__version__ = "0.1.0"

# The Python face, loaded when it is used: `import meshwright` alone needs no torch and no time.
_FACE = {
    "Chain": "meshwright.modules.chain",
    "fit": "meshwright.modules.fit",
    "load_weights": "meshwright.checkpoint.load_weights",
    "prepare": "meshwright.modules.own_loop",
}


def __getattr__(name: str) -> Any:
    """What is loaded on first use."""
    if name not in _FACE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_FACE[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(
            f"meshwright.{name} needs torch: pip install 'meshwright[train]'", name="torch"
        ) from None


def __dir__() -> list[str]:
    """With what is loaded on first use."""
    return sorted([*globals(), *_FACE])
