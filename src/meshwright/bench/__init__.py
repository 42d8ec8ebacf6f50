"""Measures this machine: matmuls, attention, copies, collectives, data loading, checkpoints, training steps."""
