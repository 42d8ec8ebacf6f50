"""Experiment trackers: Weights & Biases and MLflow, each behind a thread of its own."""
