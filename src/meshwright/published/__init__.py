"""Predictions against published runs: their tables, FLOP conventions, models, and other frameworks."""
