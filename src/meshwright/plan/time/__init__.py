"""Seconds of a step: kernels, collectives, the pipeline's bubble, the update."""
