"""The pipeline of one layout, simulated with the runtime's own split of layers and order of actions.

The search prices a pipeline by a closed form, which is within a few per cent where stages are even. The best
layouts, and every number that a user sees, are simulated: the items of the busiest rank, its messages, and a
bubble that is the rest of the time.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.plan.time.step_time import StepCost, stage_seconds
from meshwright.plan.time.timeline import StageSeconds, finish_seconds
from meshwright.plan.workload.layouts import Layouts
from meshwright.plan.workload.operators import stage_layers as even_layers
from meshwright.plan.workload.schedules import PipelineShape, rank_stages
from meshwright.plan.workload.workload import Workload
from meshwright.spec.run import RunSpec
from meshwright.spec.stages import stage_layers

# Items that come after the last micro-batch.
STEP_END_ITEMS = ("dp", "optimizer", "offload")
OTHER_ITEMS = frozenset({"head", "embedding", "imbalance", "bubble", "pp", *STEP_END_ITEMS})
"""Items that do not scale with the number of layers."""


@dataclass(frozen=True)
class _Busiest:
    """The rank with most compute in one micro-batch."""

    seconds: float
    num_layers: int
    has_head: bool
    has_embedding: bool


def simulated_items(
    run: RunSpec, workload: Workload, at: Layouts, cost: StepCost, items: Mapping[str, float]
) -> dict[str, float]:
    """Seconds by item of one layout, from the simulation; unchanged without a pipeline."""
    parallel, micro = run.parallel, run.accumulation
    if parallel.pp == 1:
        return dict(items)
    layers = [len(stage) for stage in stage_layers(run.model, parallel.num_stages)]
    seconds = stage_seconds(cost, layers)
    shape = PipelineShape(parallel.pp, parallel.virtual_stages, micro)
    busiest = _busiest(run, shape, layers, seconds)
    waiting = float(finish_seconds(parallel.schedule, shape, seconds)) - micro * busiest.seconds
    scale = busiest.num_layers / float(even_layers(workload, at).most[0])
    found = {name: value * scale for name, value in items.items() if name not in OTHER_ITEMS}
    head, embedding = cost.head_seconds, cost.embedding_seconds
    found["head"] = micro * float(head[0][0] + head[1][0]) if busiest.has_head else 0.0
    found["embedding"] = micro * float(embedding[0][0] + embedding[1][0]) if busiest.has_embedding else 0.0
    found["pp"] = min(items["pp"], waiting)
    found["bubble"] = waiting - found["pp"]
    return {**found, **{name: items[name] for name in STEP_END_ITEMS if name in items}}


def _busiest(run: RunSpec, shape: PipelineShape, layers: list[int], seconds: StageSeconds) -> _Busiest:
    per_stage = seconds.forward + seconds.backward_input + seconds.backward_weight
    by_rank = [rank_stages(run.parallel.schedule, rank, shape) for rank in range(shape.pp)]
    stages = max(by_rank, key=lambda each: sum(float(per_stage[stage]) for stage in each))
    return _Busiest(
        seconds=sum(float(per_stage[stage]) for stage in stages),
        num_layers=sum(layers[stage] for stage in stages),
        has_head=shape.num_stages - 1 in stages,
        has_embedding=0 in stages,
    )
