"""Measures this machine: matmuls, attention, copies, collectives, data loading, checkpoints and steps."""
