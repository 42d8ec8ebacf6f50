"""Meshwright decides how to train your model on the GPUs you have, proves it, and then trains."""

__version__ = "0.1.0"
