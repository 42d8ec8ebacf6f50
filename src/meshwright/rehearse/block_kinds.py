"""The kinds of blocks whose memory is traced, and the small run that has each of them.

A block is an attention half and an MLP half. What differs between kinds of one half does not change the other
half's tensors, so each half is traced beside the plainest other one, and the planner puts them together. A
mode changes both: compiled or not, recompute (activation checkpointing), how weights are kept, fp8, tp.
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
PLAIN_ATTENTION, PLAIN_MLP = "gqa", "swiglu"
CP_KINDS = ("gather", "ring", "ulysses")
ATTENTIONS = ("gqa", "qk_norm", "latent", *CP_KINDS)
MLPS = ("swiglu", "gelu", "routed", "routed_shared", "routed_ep", "routed_shared_ep")
OWN_WEIGHTS = ("gqa", "routed", "latent", "routed_ep", "gelu")
"""Halves with weights of their own, which formats and tp change."""
TP = 3
"""No power of two, so that bytes of a number and ranks of tp cannot be mistaken for each other."""
CP = 4
EP = 2


class Kind(NamedTuple):
    """One block."""

    mode: Mode
    attention: str = PLAIN_ATTENTION
    mlp: str = PLAIN_MLP

    def __str__(self) -> str:
        return f"{self.mode} {self.attention} {self.mlp}"


def kinds() -> Iterator[Kind]:
    """Every kind of the table: each half beside the plainest other one.

    All halves are traced with fp32 weights in bf16 compute and without tp. Other formats and tp change what
    matmuls read and write, not what cp adds: they are traced for halves with weights.
    """
    for recompute, compiled in itertools.product(RECOMPUTE, (True, False)):
        base = Mode(compiled, recompute, "cast", "bf16", "1")
        yield from (Kind(base, attention=one) for one in ATTENTIONS)
        yield from (Kind(base, mlp=one) for one in MLPS[1:])
        for tp in ("tp",) if compiled else ("tp", "tp_rows"):
            # torch's compiler cannot follow full recompute over tp on a machine without devices.
            if not (compiled and recompute == "full"):
                names = OWN_WEIGHTS if compiled else (*ATTENTIONS, *MLPS[1:])
                yield from _halves(base._replace(tp=tp), *names)
                yield from _halves(base._replace(tp=tp, weights="zero3"), *OWN_WEIGHTS[:1])
                yield from _halves(base._replace(tp=tp, fp8="current"), *OWN_WEIGHTS[:1])
        yield from _halves(base._replace(weights="zero3"), *OWN_WEIGHTS)
        yield from _halves(base._replace(weights="bf16"), *OWN_WEIGHTS)
        yield from _halves(base._replace(fp8="current"), "gqa", "gelu", "routed_shared")
        yield from _halves(base._replace(fp8="current", weights="zero3"), "gqa")


def _halves(mode: Mode, *names: str) -> Iterator[Kind]:
    for name in names:
        yield Kind(mode, attention=name) if name in ATTENTIONS else Kind(mode, mlp=name)


def run_of(kind: Kind) -> RunSpec:
    """Two blocks of this kind, with dims that tell each other apart.

    Of two micro-batches the first is read, in which no gradients are reduced. One that shares gradients with
    nobody needs a single one; its second would be compiled anew, with matmuls that add to gradients.
    """
    mode, cp = kind.mode, CP if kind.attention in CP_KINDS else 1
    tp = 1 if mode.tp == "1" else TP
    ep = EP if kind.mlp.endswith("_ep") else 1
    shards = 2 if mode.weights == "zero3" or ep > 1 else 1
    sequences = 1 if mode.tp == "tp" else 3
    microbatches = 1 if shards * cp * tp == 1 else 2
    parallel = ParallelSpec(
        dp_shard=shards,
        zero=3 if mode.weights == "zero3" else 0,
        cp=cp,
        cp_kind=kind.attention if cp > 1 else "gather",  # pyright: ignore[reportArgumentType]
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
        moe = MoeSpec(num_experts=10, top_k=2, width=2432, shared_width=6528 if "shared" in kind.mlp else 0)
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
