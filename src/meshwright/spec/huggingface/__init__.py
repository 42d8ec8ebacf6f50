"""Hugging Face `config.json` <-> `ModelSpec`, for the families the decoder can compute."""

from meshwright.spec.huggingface.read import from_config, load_model, model_at
from meshwright.spec.huggingface.write import computes_same, to_config

__all__ = ["computes_same", "from_config", "load_model", "model_at", "to_config"]
