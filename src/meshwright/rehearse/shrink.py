"""A run small enough to prove on this machine, made from any run that `check` accepts.

What decides how the program is built stays: axes and schedule, kinds of layers and their order, tied weights,
windows, routing, recompute. What only costs time shrinks: depth, widths, lengths, counts. The rest is set so
that float64 can tell a mistake from rounding, and is listed in `Shrunken.changes`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from meshwright.rehearse.small_worlds import MAX_RANKS, covering_worlds, degree_changes
from meshwright.spec import (
    AdapterSpec,
    AttentionSpec,
    CheckpointSpec,
    DataSpec,
    LatentSpec,
    LaunchSpec,
    MemorySpec,
    ModelSpec,
    MoeSpec,
    ObserveSpec,
    OptimSpec,
    ParallelSpec,
    PrecisionSpec,
    ResilienceSpec,
    RunSpec,
    ScheduleSpec,
    SyntheticSpec,
)
from meshwright.spec.adapter import (
    adapted_matrices,
    adapter_parameters,
    all_adaptable,
    is_trained,
    matches,
)
from meshwright.spec.conditions import ADAM_KINDS, settings_have_effect
from meshwright.spec.optim import group_of
from meshwright.spec.parameters import parameters

WIDTH = 16
HEAD_WIDTH = 4
INNER_WIDTH = 12
"""Width of an MLP or expert per tp rank."""
LEAST_LENGTH = 16
ADAPTER_RANK = 2
WINDOW = 5
"""An attention window that is shorter than a sequence and no multiple of a tile."""
BYTE_VOCABULARY = 257
LARGEST_GROUP = 4
"""Query heads per key/value head."""
HOLDOUT_SEQUENCES = 3
NUM_STEPS = 6
# With a large spread of weights attention and routing are far from uniform, so mistakes in them show.
INIT_STD = 0.3
# A gradient that is zero but for rounding must not be amplified to an update.
LEAST_EPS = 1e-5
# Learning rates at which three steps change the weights visibly, whatever the run's warm-up.
_RATES = {"sgd": 0.05, "lars": 2.0, "lamb": 0.05, "adafactor": 0.02, "muon": 0.02}
_USUAL_RATE = 0.01
_TRUST = 0.02


@dataclass(frozen=True)
class Shrunken:
    """A small run, and what it leaves out of the large one."""

    run: RunSpec
    changes: tuple[str, ...]
    """Degrees that are smaller (`dp_shard 64 -> 2`), and settings that a proof cannot have."""


def shrink(run: RunSpec, *, max_ranks: int = MAX_RANKS, all_pairs: bool = False) -> list[Shrunken]:
    """One small run; with `all_pairs` as many as it takes to run every pair of axes together."""
    worlds = covering_worlds(run.parallel, max_ranks=max_ranks)
    return [shrink_to(run, parallel) for parallel in (worlds if all_pairs else worlds[:1])]


def shrink_to(run: RunSpec, parallel: ParallelSpec) -> Shrunken:
    """The run on a small world; it is valid whenever the large one is."""
    data = _small_data(run, parallel)
    model = _small_model(run, parallel, data.sequence_length)
    adapter = _small_adapter(run.adapter, model)
    names = [parameter.name for parameter in parameters(model)]
    trained = [each for each in run.train_only if any(fnmatchcase(name, each) for name in names)]
    small = run.with_(
        name=f"{run.name}-proof",
        compile=False,
        model=model,
        adapter=adapter,
        train_only=trained,
        parallel=parallel,
        precision=PrecisionSpec(compute="fp64"),
        memory=_small_memory(run.memory),
        optim=_small_optim(run.optim, model, adapter, trained),
        schedule=ScheduleSpec(num_steps=NUM_STEPS, kind="linear", warmup_steps=2),
        data=data,
        checkpoint=CheckpointSpec(),
        observe=ObserveSpec(),
        resilience=ResilienceSpec(),
        launch=LaunchSpec(),
    )
    small, idle = _without_idle_settings(small)
    return Shrunken(small, tuple(degree_changes(run.parallel, parallel) + _left_out(run) + idle))


def _without_idle_settings(small: RunSpec) -> tuple[RunSpec, list[str]]:
    """The run with settings of left-out axes at their defaults, and a line for each of them."""
    changes: list[str] = []
    for violation in settings_have_effect(small):
        section, _, field = violation.where.partition(".")
        spec = getattr(small, section)
        if "." not in field:
            default = type(spec).model_fields[field].default
            changes.append(f"{violation.where} {getattr(spec, field)} -> {default}")
            small = small.with_(**{section: spec.with_(**{field: default})})
    return small, changes


def _left_out(run: RunSpec) -> list[str]:
    changes: list[str] = []
    if run.model.dropout or run.model.attention.dropout:
        changes.append("no dropout: masks depend on the layout")
    if run.compile:
        changes.append("not compiled")
    if run.data.batch_ramp:
        changes.append("no batch-size ramp")
    if run.precision.fp8 is not None:
        changes.append("no fp8: matmuls in float64")
    if run.adapter is not None:
        changes.append(f"adapters of rank {ADAPTER_RANK} on a base in float64")
    return changes


def _small_memory(memory: MemorySpec) -> MemorySpec:
    return memory.with_(recompute_every=min(memory.recompute_every, 2))


def _small_model(run: RunSpec, parallel: ParallelSpec, length: int) -> ModelSpec:
    model, tp = run.model, parallel.tp
    moe = _small_moe(model.moe, parallel, length) if model.moe else None
    least = max(parallel.num_stages, 2 if moe is None else 2 + moe.first_dense_layers)
    spare = run.parallel.num_stages < model.num_layers and parallel.num_stages > 1
    return model.with_(
        vocab_size=math.ceil(BYTE_VOCABULARY / tp) * tp,
        num_layers=least + spare,
        width=WIDTH,
        max_positions=length,
        attention=_small_attention(run, parallel, length),
        mlp=model.mlp.with_(width=INNER_WIDTH * tp),
        moe=moe,
        dropout=0.0,
        init_std=INIT_STD,
    )


def _small_attention(run: RunSpec, parallel: ParallelSpec, length: int) -> AttentionSpec:
    attention = run.model.attention
    kv_heads = parallel.tp * _head_exchange(parallel)
    if attention.num_kv_heads > run.parallel.tp * _head_exchange(run.parallel):
        kv_heads *= 2
    latent = _small_latent(attention.latent) if attention.latent else None
    window = attention.window
    if window is not None:
        window = WINDOW if window < run.data.sequence_length else length
    return attention.with_(
        num_heads=kv_heads * _small_group(attention.num_heads // attention.num_kv_heads),
        num_kv_heads=kv_heads,
        head_width=latent.nope_width + latent.rope_width if latent else HEAD_WIDTH,
        window=window,
        latent=latent,
        dropout=0.0,
    )


def _head_exchange(parallel: ParallelSpec) -> int:
    """Ways in which cp shards heads, besides tp: the ranks of a Ulysses all-to-all."""
    return {"ulysses": parallel.cp, "hierarchical": parallel.cp_inner}.get(parallel.cp_kind, 1)


def _small_group(group: int) -> int:
    """Query heads per key/value head: at most LARGEST_GROUP, and odd where the run's number is odd."""
    return group if group <= LARGEST_GROUP else LARGEST_GROUP - group % 2


def _small_latent(latent: LatentSpec) -> LatentSpec:
    query_rank = 12 if latent.query_rank else None
    return LatentSpec(query_rank=query_rank, kv_rank=8, nope_width=6, rope_width=4, value_width=5)


def _small_moe(moe: MoeSpec, parallel: ParallelSpec, length: int) -> MoeSpec:
    top_k = min(moe.top_k, 2)
    groups = min(moe.num_groups, 4)
    top_groups = groups if moe.top_groups == moe.num_groups else min(moe.top_groups, groups - 1)
    per_group = 2 if moe.group_score == "top2_sum" else 1
    least = max(top_k, per_group * groups, math.ceil(top_k / max(1, top_groups)) * groups)
    if moe.num_experts > parallel.ep:
        least = max(least, 2 * parallel.ep)
    step = math.lcm(parallel.ep, groups)
    num_experts = math.ceil(least / step) * step
    changes: dict[str, Any] = {"num_groups": groups, "top_groups": top_groups} if moe.num_groups > 1 else {}
    if moe.capacity_factor is not None:
        changes["capacity_factor"] = max(moe.capacity_factor, num_experts / (length * top_k))
    return moe.with_(
        num_experts=num_experts,
        top_k=top_k,
        width=INNER_WIDTH * parallel.etp,
        shared_width=INNER_WIDTH * parallel.tp if moe.shared_width else 0,
        first_dense_layers=min(moe.first_dense_layers, 1),
        **changes,
    )


def _small_data(run: RunSpec, parallel: ParallelSpec) -> DataSpec:
    microbatch = min(run.data.microbatch_sequences, 2)
    pieces = parallel.tp * (2 * parallel.cp * parallel.cp_stripes if parallel.cp > 1 else 1)
    return run.data.with_(
        path=None,
        synthetic=SyntheticSpec(num_documents=50),
        sequence_length=math.ceil(LEAST_LENGTH / pieces) * pieces,
        microbatch_sequences=microbatch,
        batch_sequences=_num_microbatches(run, parallel) * microbatch * parallel.dp,
        batch_ramp=(),
        max_epochs=None,
        holdout_sequences=HOLDOUT_SEQUENCES,
        holdout=None,
        on_device_bytes=0,
    )


def _num_microbatches(run: RunSpec, parallel: ParallelSpec) -> int:
    """Micro-batches that fill the pipeline as far as the large run does: one, exactly full, or more."""
    if parallel.pp == 1:
        return min(run.accumulation, 2)
    if run.accumulation < run.parallel.pp:
        return 1
    if run.accumulation < run.parallel.num_stages:
        return parallel.pp
    more = run.accumulation > run.parallel.num_stages
    return parallel.num_stages + (parallel.pp if more else 0)


def _small_adapter(adapter: AdapterSpec | None, model: ModelSpec) -> AdapterSpec | None:
    """The adapter at a low rank, on a full-precision base, without targets that match nothing."""
    if adapter is None:
        return None
    listed = all_adaptable(model)
    targets = [each for each in adapter.targets if any(matches(model, one, each) for one in listed)]
    small = adapter.with_(
        rank=ADAPTER_RANK,
        ranks=[],
        base="weights",
        start_from=None,
        tokens=tuple(range(min(len(adapter.tokens), ADAPTER_RANK))),
        targets=targets or AdapterSpec.model_fields["targets"].default,
    )
    adapted = [one.weight for one in adapted_matrices(model, small)]
    ranks = [
        own.with_(rank=ADAPTER_RANK - 1).model_dump()
        for own in adapter.ranks
        if any(matches(model, weight, own.pattern) for weight in adapted)
    ]
    return small.with_(ranks=ranks)


def _small_optim(
    optim: OptimSpec, model: ModelSpec, adapter: AdapterSpec | None, trained: Sequence[str]
) -> OptimSpec:
    """The optimizer with learning rates that change weights, without groups that match no parameter."""
    listed = [*parameters(model), *adapter_parameters(model, adapter)]
    names = [parameter.name for parameter in listed if is_trained(parameter.name, adapter, trained)]
    taken = {group_of(name, optim.groups) for name in names}
    changes: dict[str, Any] = {"eps": max(optim.eps, LEAST_EPS)} if optim.kind in ADAM_KINDS else {}
    if optim.kind == "lars":
        changes["trust_coefficient"] = _TRUST
    return optim.with_(
        lr=_RATES.get(optim.kind, _USUAL_RATE),
        lr_scaling=None,
        groups=[group.model_dump() for index, group in enumerate(optim.groups) if index in taken],
        **changes,
    )


def proof_optimizers(optim: OptimSpec) -> list[OptimSpec]:
    """SGD, which shows a wrong gradient scale that Adam hides, and the run's own or AdamW, for its states."""
    shared = {
        name: getattr(optim, name) for name in ("weight_decay", "weight_decay_on", "groups", "max_grad_norm")
    }
    other = "adamw" if optim.kind == "sgd" else "sgd"
    plain = OptimSpec(kind=other, lr=_RATES.get(other, _USUAL_RATE)).with_(
        **{**shared, "groups": [group.model_dump() for group in optim.groups]}
    )
    if other == "adamw":
        plain = plain.with_(eps=LEAST_EPS)
    return [optim, plain] if other == "adamw" else [plain, optim]
