"""Rehearsal: what a run will use and whether it computes the right thing, before it is queued."""
