"""Offload: what lives in host memory and comes to the device only while it is used.

    optimizer     states, bucket by bucket through the update      states.py
    parameters    weights of a block while it computes             weights.py
    activations   what a block's backward needs                    activations.py

All three copy through one `HostLink`: two streams (there and back) and a pool of pinned buffers. On a CPU
the streams do nothing and everything else is the same.
"""
