"""A plan as a JSON document, and as a run file with the reasons for the plan as comments."""

from collections.abc import Iterator, Sequence
from typing import Any

from meshwright.plan.draw.rank_map import coordinates
from meshwright.plan.explain.failures import with_checkpoints
from meshwright.plan.explain.gains import Gain
from meshwright.plan.explain.neighbours import Neighbour
from meshwright.plan.search.candidate import Candidate
from meshwright.plan.search.decision import Plan
from meshwright.spec.parallel import MESH_ORDER, ParallelSpec
from meshwright.spec.run import RunSpec
from meshwright.spec.text import dump_run
from meshwright.units import show_bytes, show_count, show_range, show_seconds

FLOPS_PER_PARAMETER_AND_TOKEN = 6.0
TOKENS_PER_PARAMETER = 20.0
MOST_NODES_LISTED = 16


def compute_optimal(flops: float) -> tuple[float, float]:
    """Compute-optimal parameters and tokens of a FLOP budget (Chinchilla): 20 tokens per parameter."""
    num_parameters = (flops / (FLOPS_PER_PARAMETER_AND_TOKEN * TOKENS_PER_PARAMETER)) ** 0.5
    return num_parameters, TOKENS_PER_PARAMETER * num_parameters


def format_text(run: RunSpec) -> str:
    """`bf16, weights bf16_exact, adamw, compiled`: number formats, optimizer and compilation of a run."""
    precision, optim, adapter = run.precision, run.optim, run.adapter
    base = precision.weights if adapter is None or adapter.base == "weights" else adapter.base
    parts = [
        precision.compute,
        *([f"fp8 linears ({precision.fp8.recipe})"] if precision.fp8 else []),
        *([f"weights {precision.weights}"] if precision.weights != "fp32" else []),
        *([f"gradients {precision.gradients}"] if precision.gradients != "fp32" else []),
        optim.kind + (f" with moments in {optim.state}" if optim.state != "fp32" else ""),
        *(["compiled"] if run.compile else []),
        *([f"{adapter.kind} of rank {adapter.rank} on {base} weights"] if adapter else []),
    ]
    return ", ".join(parts)


def candidate_document(candidate: Candidate, tokens: int) -> dict[str, Any]:
    """All predictions for one layout."""
    low, high = candidate.interval_seconds
    run = candidate.run
    return {
        "parallel": run.parallel.model_dump(mode="json"),
        "microbatch_sequences": run.data.microbatch_sequences,
        "accumulation": run.accumulation,
        "recompute": run.memory.recompute,
        "recompute_every": run.memory.recompute_every,
        "offload": list(run.memory.offload),
        "num_ranks": candidate.num_ranks,
        "step_seconds": candidate.step_seconds,
        "step_seconds_interval": [low, high],
        "interval_source": candidate.interval_source,
        "step_seconds_items": candidate.seconds_items,
        "tokens_per_second": candidate.tokens_per_second,
        "tokens_per_second_per_device": candidate.tokens_per_second / candidate.num_ranks,
        "mfu": candidate.mfu,
        "device_bytes": candidate.device_bytes,
        "reserved_bytes": candidate.reserved_bytes,
        "allocated_bytes": candidate.allocated_bytes,
        "memory_margin": candidate.memory_margin and candidate.memory_margin._asdict(),
        "memory_items": candidate.memory_items,
        "fits": candidate.fits,
        "days": candidate.days(tokens),
        "device_hours": candidate.device_hours(tokens),
    }


def plan_document(
    plan: Plan,
    *,
    tokens: int,
    assumed: tuple[str, ...],
    why: list[str],
    neighbours: Sequence[Neighbour],
    gains: Sequence[Gain] = (),
) -> dict[str, Any]:
    """The plan; numbers in base units."""
    question, run = plan.question, with_checkpoints(plan)
    optimal = compute_optimal(question.workload.model_flops_per_token * tokens)
    return {
        "model": run.model.family,
        "num_parameters": question.workload.counts.total,
        "cluster": {
            "name": question.cluster.name,
            "device": question.cluster.device.title,
            "num_devices": question.cluster.num_devices,
            "devices_per_node": question.cluster.devices_per_node,
            "memory_bytes": question.cluster.device.memory_bytes,
        },
        "tokens": tokens,
        "batch_tokens": run.data.batch_tokens,
        "sequence_length": run.data.sequence_length,
        "precision": run.precision.compute,
        "objective": question.objective,
        "formats": format_text(run),
        "pins": dict(question.pins.texts),
        "allowed": list(question.allow),
        "changes": [change.setting for change in plan.changes],
        "assumed": list(assumed),
        "best": candidate_document(plan.best, tokens),
        "top": [candidate_document(candidate, tokens) for candidate in plan.top],
        "pareto": [candidate_document(candidate, tokens) for candidate in plan.pareto],
        "without": {
            axis: outcome.candidate and candidate_document(outcome.candidate, tokens)
            for axis, outcome in plan.without.items()
        },
        "why": why,
        "neighbours": [vars(each) for each in neighbours],
        "gains": [vars(each) for each in gains],
        "compute_optimal": None
        if question.from_trained
        else {"num_parameters": optimal[0], "tokens": optimal[1]},
        "search": {
            "num_considered": plan.result.num_considered,
            "num_fitting": plan.result.num_fitting,
            "seconds": plan.search_seconds,
        },
        "fingerprint": run.fingerprint(),
        "run": run.model_dump(mode="json"),
    }


def run_file(plan: Plan, why: list[str]) -> str:
    """The run as YAML for `train`, with the prediction, the reasons and the rank map as comments."""
    best, cluster = plan.best, plan.question.cluster
    low, high = best.interval_seconds
    lines = [
        f"Planned for {best.num_ranks} x {cluster.device.title}, {cluster.devices_per_node} per node.",
        f"Predicted: {show_seconds(best.step_seconds)} per step "
        f"({show_range(low, high)}), "
        f"{show_count(best.tokens_per_second)} tokens/s, MFU {best.mfu:.1%}, "
        f"{show_bytes(best.device_bytes)} of {show_bytes(cluster.device.memory_bytes)} per device.",
        *why,
        *_pretrained(plan),
        *rank_map(best.run.parallel, cluster.devices_per_node),
    ]
    return "".join(f"# {line}\n" for line in lines) + dump_run(with_checkpoints(plan))


def _pretrained(plan: Plan) -> Iterator[str]:
    """What the file of a plan of fine-tuning lacks while it names no weights."""
    run = plan.question.run
    if plan.question.from_trained and run.checkpoint.start_from is None:
        without = "train starts from random weights" if run.adapter is None else "train refuses this file"
        yield f"Set checkpoint.start_from to the folder of the pre-trained weights: without it {without}."


def rank_map(parallel: ParallelSpec, devices_per_node: int) -> list[str]:
    """The coordinates of each node's ranks, tp innermost; of many nodes only the first are listed."""
    axes = [axis for axis in MESH_ORDER if getattr(parallel, axis) > 1]
    num_nodes = -(-parallel.num_ranks // devices_per_node)
    lines = [f"Ranks, from outer to inner axis: {' > '.join(axes) or 'one device'}."]
    for node in range(min(num_nodes, MOST_NODES_LISTED)):
        first = node * devices_per_node
        last = min(first + devices_per_node, parallel.num_ranks) - 1
        low, high = coordinates(parallel, first), coordinates(parallel, last)
        parts = [_span(axis, low[axis], high[axis]) for axis in axes]
        lines.append(f"  node {node}: ranks {first} to {last}: {', '.join(parts) or 'everything'}")
    if num_nodes > MOST_NODES_LISTED:
        lines.append(f"  ... and {num_nodes - MOST_NODES_LISTED} more nodes in the same order")
    return lines


def _span(axis: str, low: int, high: int) -> str:
    return f"{axis} {low}" if low == high else f"{axis} {low} to {high}"
