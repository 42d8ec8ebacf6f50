"""Optimizers, parameter groups, gradient norm and learning rate, on plain local tensors."""
