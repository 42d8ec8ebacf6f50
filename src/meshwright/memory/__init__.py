"""Recompute (activation checkpointing) and offload: what trades seconds for bytes on one rank."""
