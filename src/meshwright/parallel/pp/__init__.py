"""Pipeline parallel: consecutive layers on different ranks, micro-batches passed from one to the next.

    stage s: x[B, S, D] -> x[B, S, D], its last output sent to the rank of stage s + 1       point to point

Per micro-batch and border B S D elements forward and as many backward (divided by tp and cp). The ranks wait
for each other at both ends: the bubble, (pp - 1) / micro-batches for 1F1B, is what the schedules fight.
It pays across nodes, where tp's traffic would be too slow, and when micro-batches are many.
"""

from meshwright.parallel.pp.pipeline_program import PipelineProgram, StageIO
from meshwright.parallel.pp.stages import StageModule, build_stages

__all__ = ["PipelineProgram", "StageIO", "StageModule", "build_stages"]
