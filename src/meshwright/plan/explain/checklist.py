"""Notes of `check --on`: what costs time on this cluster, each with its price. Small named functions."""

from collections.abc import Callable, Iterator
from typing import Any

from meshwright.hardware.catalogue import Cluster
from meshwright.plan.explain.prices import predicted_with, saved_share
from meshwright.plan.predict import layout_of, predict_run
from meshwright.plan.scaling_law import CHINCHILLA, FLOPS_PER_PARAMETER_TOKEN, SOURCE
from meshwright.plan.time.kernels import tile_efficiency
from meshwright.plan.workload.formats import workload_of
from meshwright.plan.workload.operators import Matmul, attention_matmuls, mlp_matmuls
from meshwright.spec.advice import Advice
from meshwright.spec.parameters import num_parameters
from meshwright.spec.run import RunSpec
from meshwright.units import show_count

ClusterAdvisor = Callable[[RunSpec, Cluster], Iterator[Advice]]
# A step that is shorter by less than this share is not worth a note.
_WORTH = 0.03
_LEAST_EFFICIENCY = 0.8
# The scaling law was fitted to runs from about this size on.
_LAW_FROM_PARAMETERS = 50e6


def advise_cluster(run: RunSpec, cluster: Cluster) -> list[Advice]:
    """Everything that costs time on this cluster and that a change of settings would avoid."""
    return [note for advisor in CLUSTER_ADVISORS for note in advisor(run, cluster)]


def tp_stays_on_a_node(run: RunSpec, cluster: Cluster) -> Iterator[Advice]:
    """tp exchanges activations in every layer: across nodes it waits for the network."""
    tp, per_node, parallel = run.parallel.tp, cluster.devices_per_node, run.parallel
    if tp <= per_node:
        return
    smaller = max(n for n in range(1, per_node + 1) if tp % n == 0)
    change = {"parallel.tp": smaller, "parallel.dp_shard": parallel.dp_shard * tp // smaller}
    change |= {"parallel.zero": 1} if parallel.zero == 0 else {}
    fact = f"tp={tp} reaches across nodes of {per_node} devices: every layer waits for the network"
    yield from _priced(run, cluster, fact, "parallel.tp", change, always=True)


def recompute_is_needed(run: RunSpec, cluster: Cluster) -> Iterator[Advice]:
    """Recompute (activation checkpointing) computes again what memory could keep."""
    kinds = {"full": ("none", "selective"), "selective": ("none",)}.get(run.memory.recompute, ())
    for kind in kinds:
        change = {"memory.recompute": kind}
        found = list(_priced(run, cluster, f"recompute={run.memory.recompute}", "memory.recompute", change))
        if found:
            yield from found
            return


def zero_stage_is_needed(run: RunSpec, cluster: Cluster) -> Iterator[Advice]:
    """A lower ZeRO stage moves fewer bytes, where its states fit."""
    for stage in range(1, run.parallel.zero):
        change = {"parallel.zero": stage}
        found = list(_priced(run, cluster, f"zero={run.parallel.zero}", "parallel.zero", change))
        if found:
            yield from found
            return


def blocks_are_compiled(run: RunSpec, cluster: Cluster) -> Iterator[Advice]:
    """torch.compile fuses the element-wise kernels of a block."""
    if not run.compile:
        fact = "compile=false runs each element-wise operation as a kernel of its own"
        yield from _priced(run, cluster, fact, "compile", {"compile": True})


def matmuls_use_tensor_cores(run: RunSpec, cluster: Cluster) -> Iterator[Advice]:
    """TF32 runs fp32 matmuls on tensor cores; `device=cuda` has this note on any cluster."""
    if (
        run.device == "auto"
        and run.precision.compute == "fp32"
        and "tf32" in cluster.device.peak_flops_per_second
    ):
        fact = "compute=fp32 leaves the tensor cores idle"
        yield from _priced(run, cluster, fact, "precision.compute", {"precision.compute": "tf32"})


def matmuls_fill_tiles_and_waves(run: RunSpec, cluster: Cluster) -> Iterator[Advice]:
    """Matmuls are computed in tiles, and tiles in waves over the SMs: partial ones cost as much as full."""
    if run.device == "cpu" or not cluster.device.num_sms:
        return
    workload, at = workload_of(run), layout_of(run)
    matmuls = [*attention_matmuls(workload, at), *mlp_matmuls(workload, at)]
    total = sum(float(one.flops[0]) for one in matmuls)
    worst, efficiency = min(
        ((one, _efficiency(one, cluster)) for one in matmuls), key=lambda pair: pair[1], default=(None, 1.0)
    )
    if worst is None or efficiency >= _LEAST_EFFICIENCY:
        return
    share = float(worst.flops[0]) / total
    m, n, k = (int(dim[0]) for dim in (worst.m, worst.n, worst.k))
    fact = (
        f"the matmul {worst.name} ({m} x {k} x {n}, {share:.0%} of a layer's FLOPs) uses {efficiency:.0%} of"
    )
    hint = "a larger data.microbatch_sequences or a smaller parallel.tp has fuller tiles and waves"
    cost = share * (1.0 - efficiency)
    yield Advice(
        f"{fact} the tiles and waves it occupies; costs up to {cost:.0%} of a step on {cluster.device.title}",
        "data.microbatch_sequences",
        hint,
        cost=cost,
    )


def tokens_suit_the_size(run: RunSpec, _: Cluster) -> Iterator[Advice]:
    """A dense model that is trained from scratch is at most twice as large as is compute-optimal."""
    parameters = num_parameters(run.model)
    tokens = run.data.num_sequences(run.schedule.num_steps) * run.data.sequence_length
    is_outside = parameters < _LAW_FROM_PARAMETERS or run.model.moe is not None
    if run.is_finetuning or is_outside:
        return
    flops = FLOPS_PER_PARAMETER_TOKEN * parameters * tokens
    best = CHINCHILLA.optimal_parameters(flops)
    if parameters < 2 * best:
        return
    better = flops / (FLOPS_PER_PARAMETER_TOKEN * best)
    now, then = CHINCHILLA.loss(parameters, tokens), CHINCHILLA.loss(best, better)
    fact = f"{show_count(tokens)} tokens are few for {show_count(parameters)} parameters"
    hint = (
        f"at the same compute {show_count(best)} parameters and {show_count(better)} tokens are expected to "
        f"reach a loss of {then:.2f} instead of {now:.2f} ({SOURCE}); to fine-tune, name the pre-trained "
        "weights in checkpoint.start_from"
    )
    yield Advice(fact, "schedule.num_steps", hint)


def _efficiency(one: Matmul, cluster: Cluster) -> float:
    return float(tile_efficiency(one.m, one.n, one.groups, cluster.device)[0])


def _priced(
    run: RunSpec, cluster: Cluster, fact: str, where: str, change: dict[str, Any], *, always: bool = False
) -> Iterator[Advice]:
    """A note where the changed run fits and is faster; `always`: also where it cannot be priced."""
    words = " ".join(f"{key}={_text(value)}" for key, value in change.items())
    now, changed = predict_run(run, cluster), predicted_with(run, change, cluster)
    share = saved_share(now, changed) if changed is not None and changed.fits else 0.0
    if share >= _WORTH:
        priced = f"{fact}; {words} fits, and a step is {share:.0%} shorter on {cluster.device.title}"
        yield Advice(priced, where, words, tuple(change.items()), cost=share)
    elif always:
        yield Advice(fact, where, "choose a tp of at most the devices of a node")


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


CLUSTER_ADVISORS: list[ClusterAdvisor] = [
    tp_stays_on_a_node,
    matmuls_use_tensor_cores,
    recompute_is_needed,
    zero_stage_is_needed,
    blocks_are_compiled,
    matmuls_fill_tiles_and_waves,
    tokens_suit_the_size,
]
