"""Measures this machine: matrix products, attention, copies, collectives, data, checkpoints, whole steps."""
