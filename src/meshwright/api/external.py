"""Models of Hugging Face outside of our families: torch, which traces them, is loaded when one is named."""

import importlib
from pathlib import Path

from meshwright.errors import SpecError
from meshwright.plan.external import ExternalModel
from meshwright.spec.huggingface.read import is_external_config


def external_of(model: str) -> ExternalModel | None:
    """The model of a config whose type is none of our families; None for everything else."""
    path = Path(model).expanduser()
    return _traced(path) if is_external_config(path) else None


def _traced(path: Path) -> ExternalModel:
    try:
        tracer = importlib.import_module("meshwright.modules.external_model")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        fact = "a model outside of our families is traced by torch, which is not installed"
        raise SpecError(fact, where=str(path), hint="pip install 'meshwright[train]' transformers") from None
    return tracer.external_model(path)
