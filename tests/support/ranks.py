"""The pool of ranks of the tests is the one that `rehearse` proves runs with."""

from meshwright.rehearse.rank_pool import RankFailure, RankPool, rank_device, this_world

__all__ = ["RankFailure", "RankPool", "rank_device", "this_world"]
