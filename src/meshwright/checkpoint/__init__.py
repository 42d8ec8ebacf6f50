"""Saved state: written beside, published by one rename, readable on any mesh."""
