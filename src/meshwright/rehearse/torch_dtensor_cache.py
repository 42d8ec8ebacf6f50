"""DTensor's cache of placements, which keeps meshes of earlier worlds in one process.

Meshes are equal when their ranks and names are. So a mesh of the next world may find an entry of this one,
and with it groups that no longer exist.
"""

from torch.distributed.tensor.debug import _clear_sharding_prop_cache


def forget_meshes() -> None:
    """Empty the cache, once the world's groups are gone."""
    _clear_sharding_prop_cache()
