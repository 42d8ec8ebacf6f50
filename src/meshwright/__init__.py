"""Meshwright decides how to train your model on the GPUs you have, proves it, and then trains."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.api.questions import check, plan, predict
    from meshwright.api.training import train
    from meshwright.checkpoint.load_weights import load_weights
    from meshwright.data.loader import RecordDataset, open_loader
    from meshwright.modules.chain import Chain
    from meshwright.modules.fit import fit
    from meshwright.modules.own_loop import prepare

__version__ = "0.1.0"
__all__ = [
    "Chain",
    "RecordDataset",
    "__version__",
    "check",
    "fit",
    "load_weights",
    "open_loader",
    "plan",
    "predict",
    "prepare",
    "train",
]

# Loaded on first use: `import meshwright` alone needs no torch and no time.
_LAZY = {
    "check": "meshwright.api.questions",
    "predict": "meshwright.api.questions",
    "Chain": "meshwright.modules.chain",
    "RecordDataset": "meshwright.data.loader",
    "fit": "meshwright.modules.fit",
    "load_weights": "meshwright.checkpoint.load_weights",
    "open_loader": "meshwright.data.loader",
    "prepare": "meshwright.modules.own_loop",
}
# Sub-packages that can be called: `meshwright.plan(...)`.
_CALLABLE = ("plan", "train")

if not TYPE_CHECKING:  # a type checker sees the imports above, and refuses any other name

    def __getattr__(name: str) -> Any:
        """Import a public name on first use."""
        if name in _CALLABLE:
            return importlib.import_module(f"{__name__}.{name}")
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            return getattr(importlib.import_module(_LAZY[name]), name)
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise ModuleNotFoundError(
                f"meshwright.{name} needs torch: pip install 'meshwright[train]'", name="torch"
            ) from None

    def __dir__() -> list[str]:
        """All names of the module, with those that are imported on first use."""
        return sorted([*globals(), *_LAZY, *_CALLABLE])
