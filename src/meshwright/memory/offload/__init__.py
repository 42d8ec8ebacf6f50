"""Offload: what lives in host memory and is prefetched to the device only while it is used.

    optimizer     states, bucket by bucket during the update       states.py
    parameters    weights of a block while it computes             weights.py
    activations   what a block saves for backward                  activations.py

All three copy through one `HostLink`: a CUDA stream for each direction, and a pool of pinned buffers. On a
CPU there are no streams, and everything else is the same.
"""
