"""Bytes of one rank, itemised by category, on the device and on the host."""
