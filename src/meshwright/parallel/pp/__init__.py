"""Pipeline parallel: consecutive layers on different ranks, micro-batches passed from one stage to the next.

    stage s: x[B, S, D] -> x[B, S, D], its output sent to the rank of stage s + 1            point to point

Each micro-batch sends B S D elements between two stages forward and as many backward (divided by tp and cp).
Ranks idle at the start and the end of a step: the bubble, (pp - 1) / micro-batches for 1F1B, which the
schedules reduce. It pays across nodes, where tp's traffic would be too slow, and with many micro-batches.
"""

from meshwright.parallel.pp.pipeline_program import PipelineProgram, StageIO
from meshwright.parallel.pp.stages import StageModule, build_stages

__all__ = ["PipelineProgram", "StageIO", "StageModule", "build_stages"]
