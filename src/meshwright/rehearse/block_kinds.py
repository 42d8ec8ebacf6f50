"""The kinds of blocks whose memory is traced, and the small run that has each of them.

A block is attention, the core of attention and an MLP. What differs between kinds of one section does not
change the tensors of the others, so one trace gives a kind of each, and the planner puts them together. A
mode changes attention and MLP: compiled or not, recompute (activation checkpointing), how weights are kept,
fp8, tp. The core (softmax(q k) v, communication over cp) knows of these only compiling and recompute.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from meshwright.plan.memory.block_table import Mode
from meshwright.spec import (
    AttentionSpec,
    DataSpec,
    Fp8Spec,
    MemorySpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    OptimSpec,
    ParallelSpec,
    PrecisionSpec,
    RopeSpec,
    RunSpec,
    ScheduleSpec,
    SyntheticSpec,
)
from meshwright.spec.model import LatentSpec

RECOMPUTE = ("none", "selective", "full")
PAIRS = (
    ("gqa", "swiglu"),
    ("qk_norm", "gelu"),
    ("latent", "routed"),
    ("gqa", "routed_shared"),
    ("gqa", "routed_ep"),
    ("gqa", "routed_shared_ep"),
)
"""Attention and MLP that are traced together; the first pair with an attention gives its numbers."""
CP_KINDS = ("gather", "ring", "ulysses", "hierarchical")
CORES = CP_KINDS
FP8_RECIPES = ("current", "blockwise", "mxfp8")
"""A trace cannot follow `delayed`, which has the tensors of `current`."""
TP = 3
"""No power of two, so that bytes of a number and ranks of tp cannot be mistaken for each other."""
CP = 4
CP_INNER = 2
EP = 2
TOP_K = 5
"""Neither a power of two nor TP, so that routed rows cannot be mistaken for tokens."""


class Kind(NamedTuple):
    """One block."""

    mode: Mode
    attention: str = "gqa"
    mlp: str = "swiglu"
    core: str = "plain"

    def __str__(self) -> str:
        return f"{self.mode} {self.attention} {self.mlp} {self.core}"


def kinds() -> Iterator[Kind]:
    """Every kind of the table. All of them are traced with fp32 weights in bf16 compute and without tp."""
    for recompute, compiled in itertools.product(RECOMPUTE, (True, False)):
        base = Mode(compiled, recompute, "cast", "bf16", "1")
        yield from (Kind(base, *pair) for pair in PAIRS)
        yield from (Kind(base, core=core) for core in CORES)
        if not compiled:  # compiled ones have the core of uncompiled ones
            yield from (Kind(base, "latent", "routed", core) for core in CORES)
        for tp in ("tp",) if compiled else ("tp", "tp_rows"):
            # torch's compiler cannot follow full recompute over tp on a machine without devices.
            if not (compiled and recompute == "full"):
                yield from (Kind(base._replace(tp=tp), *pair) for pair in PAIRS)
                zero3 = base._replace(tp=tp, weights="zero3")
                yield from (Kind(zero3, *pair) for pair in (*PAIRS[:3], PAIRS[4]))
                yield Kind(base._replace(tp=tp, weights="bf16"))
                yield Kind(base._replace(tp=tp, fp8="current"))
        yield from (Kind(base._replace(weights="zero3"), *pair) for pair in PAIRS)
        yield from (Kind(base._replace(weights="bf16"), *pair) for pair in PAIRS)
        for recipe in FP8_RECIPES:
            yield from (Kind(base._replace(fp8=recipe), "gqa", mlp) for mlp in ("swiglu", "gelu"))
        yield Kind(base._replace(fp8="current"), "gqa", "routed_shared")
        yield Kind(base._replace(fp8="current", weights="zero3"))


def run_of(kind: Kind) -> RunSpec:
    """Two blocks of this kind, with dims that tell each other apart.

    Of two micro-batches the first is read, in which no gradients are reduced. One that shares gradients with
    nobody needs a single one; its second would be compiled anew, with matmuls that add to gradients.
    """
    mode, cp_kind = kind.mode, kind.core
    cp = CP if cp_kind in CP_KINDS else 1
    tp = 1 if mode.tp == "1" else TP
    ep = EP if kind.mlp.endswith("_ep") else 1
    shards = 2 if mode.weights == "zero3" or ep > 1 else 1
    sequences = 1 if mode.tp == "tp" else 3
    microbatches = 1 if shards * cp * tp == 1 else 2
    parallel = ParallelSpec(
        dp_shard=shards,
        zero=3 if mode.weights == "zero3" else 0,
        cp=cp,
        cp_kind=cp_kind if cp > 1 else "gather",  # pyright: ignore[reportArgumentType]
        cp_inner=CP_INNER if cp_kind == "hierarchical" else 1,
        tp=tp,
        ep=ep,
    )
    return RunSpec(
        device="cpu",
        model=_model(kind),
        parallel=parallel,
        precision=_precision(mode),
        memory=MemorySpec(recompute=mode.recompute),  # pyright: ignore[reportArgumentType]
        optim=OptimSpec(kind="sgd"),
        schedule=ScheduleSpec(num_steps=1),
        compile=mode.compiled,
        data=DataSpec(
            synthetic=SyntheticSpec(),
            sequence_length=4992,
            batch_sequences=sequences * shards * microbatches,
            microbatch_sequences=sequences,
            documents="joined",  # separate documents and windows keep the same tensors
        ),
    )


def traced_rank(run: RunSpec) -> int:
    """The rank whose bytes count: the last of cp calls the attention kernel most often."""
    return run.parallel.cp * run.parallel.tp - 1


def is_split_backward(kind: Kind) -> bool:
    """Whether blocks of this kind may run a split backward, which neither recompute nor compile supports."""
    return kind.mode.recompute == "none" and not kind.mode.compiled


def split_run_of(kind: Kind) -> RunSpec:
    """One micro-batch in a V of four stages, each with one block of this kind."""
    run = run_of(kind)
    sharded = run.parallel.zero == 3
    parallel = run.parallel.with_(
        pp=2,
        schedule="zbv",
        virtual_stages=2,
        grad_reduce="last_microbatch" if sharded else "each_microbatch",
    )
    sequences = run.data.microbatch_sequences * parallel.dp
    return run.with_(
        model=run.model.with_(num_layers=4),
        parallel=parallel,
        data=run.data.with_(batch_sequences=sequences),
    )


SPLIT_BLOCK = 3
"""The block of `split_run_of` that is read: of the last stage, which a V has on its first rank."""


def _precision(mode: Mode) -> PrecisionSpec:
    fp8 = None if mode.fp8 == "bf16" else Fp8Spec(recipe=mode.fp8, bf16_layers_each_end=0)  # pyright: ignore[reportArgumentType]
    weights = "bf16_exact" if mode.weights == "bf16" else "fp32"
    return PrecisionSpec(compute="bf16", weights=weights, fp8=fp8)


def _model(kind: Kind) -> ModelSpec:
    latent = None
    attention = AttentionSpec(num_heads=36, num_kv_heads=12, head_width=160)
    if kind.attention == "latent":
        latent = LatentSpec(query_rank=544, kv_rank=352, nope_width=96, rope_width=64, value_width=112)
        attention = AttentionSpec(num_heads=36, num_kv_heads=36, head_width=160, latent=latent)
    moe = None
    if kind.mlp.startswith("routed"):
        moe = MoeSpec(
            num_experts=10, top_k=TOP_K, width=2432, shared_width=6528 if "shared" in kind.mlp else 0
        )
    return ModelSpec(
        vocab_size=2688,
        num_layers=2,
        width=896,
        max_positions=4096,
        attention=attention.with_(qk_norm=kind.attention == "qk_norm"),
        mlp=MlpSpec(width=4224, kind="gelu" if kind.mlp == "gelu" else "swiglu"),
        moe=moe,
        rope=RopeSpec(),
    )
