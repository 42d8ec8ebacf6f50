"""`tiny_run`: a RunSpec in float64 that trains three steps in a moment, on documents of ragged lengths."""

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

from meshwright.data.tokenize import ByteTokenizer
from meshwright.rehearse.ragged_documents import write_ragged
from meshwright.spec import (
    AttentionSpec,
    BatchRampSpec,
    DataSpec,
    LatentSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    OptimSpec,
    ParallelSpec,
    PrecisionSpec,
    RopeSpec,
    RunSpec,
    ScheduleSpec,
)

SEQUENCE_LENGTH = 16
BATCH_SEQUENCES = 8
NUM_TOKENS = 64
# tp=2 leaves 35 rows of the embedding, which no ZeRO group of 2 or 4 divides.
VOCAB_SIZE = 70


class _FewTokens(ByteTokenizer):
    """A tokenizer in name only: the datasets here are written as token ids."""

    vocab_size = NUM_TOKENS
    eos_id = NUM_TOKENS - 1


@functools.cache
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="meshwright-ragged-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def ragged_dataset(num_sequences: int) -> str:
    """A packed dataset that holds exactly this many sequences."""
    target = _folder() / f"sequences-{num_sequences}"
    write_ragged(target, _FewTokens(), num_sequences=num_sequences, sequence_length=SEQUENCE_LENGTH)
    return str(target)


_ATTENTION = AttentionSpec(num_heads=8, num_kv_heads=4, head_width=4)
# A large spread of initial weights: attention and routing are then far from uniform.
_GQA = ModelSpec(
    vocab_size=VOCAB_SIZE,
    num_layers=2,
    width=16,
    max_positions=SEQUENCE_LENGTH,
    attention=_ATTENTION,
    mlp=MlpSpec(width=24),
    rope=RopeSpec(),
    init_std=0.3,
)
_MOE = MoeSpec(num_experts=4, top_k=2, width=12, aux_loss=0.05)
_LATENT = LatentSpec(query_rank=12, kv_rank=8, nope_width=6, rope_width=4, value_width=5)

MODELS: dict[str, ModelSpec] = {
    "gqa": _GQA,
    "tied": _GQA.with_(tied_head=True, attention=_ATTENTION.with_(qk_norm=True)),
    "gpt": _GQA.with_(
        tied_head=True,
        norm="layer",
        positions="learned",
        rope=None,
        attention=_ATTENTION.with_(num_kv_heads=8, qkv_bias=True, output_bias=True),
        mlp=MlpSpec(kind="gelu", width=24, bias=True),
    ),
    "window": _GQA.with_(attention=_ATTENTION.with_(window=5)),
    "mla": _GQA.with_(attention=_ATTENTION.with_(num_kv_heads=8, latent=_LATENT, head_width=10)),
    "moe": _GQA.with_(moe=_MOE),
    # DeepSeek's choices: a dense layer first, sigmoid scores, groups, a shared expert, bias-based balancing.
    "moe_shared": _GQA.with_(
        tied_head=True,
        num_layers=3,
        moe=_MOE.with_(
            num_experts=8,
            shared_width=12,
            first_dense_layers=1,
            score="sigmoid",
            num_groups=4,
            top_groups=2,
            routed_scale=2.0,
            has_balance_bias=True,
            balance_bias_rate=0.01,
        ),
    ),
    "moe_capacity": _GQA.with_(moe=_MOE.with_(capacity_factor=0.75, normalise_top_k=False)),
}

# eps is far above rounding: a gradient that is zero but for rounding must not be blown up to a step.
# The limit of sgd lies between the norms of one run, so some steps are clipped and some are not.
OPTIMIZERS: dict[str, OptimSpec] = {
    "sgd": OptimSpec(kind="sgd", lr=0.05, beta1=0.9, weight_decay=0.1, max_grad_norm=2.25),
    "adamw": OptimSpec(kind="adamw", lr=0.01, eps=1e-5, weight_decay=0.1, max_grad_norm=1.0),
}
# Optimizers that read full parameters; their steps are large enough to show a wrong norm.
MORE_OPTIMIZERS: dict[str, OptimSpec] = {
    "lars": OptimSpec(kind="lars", lr=2.0, trust_coefficient=0.02, weight_decay=0.1),
    "lamb": OptimSpec(kind="lamb", lr=0.05, eps=1e-5, weight_decay=0.1),
    "adafactor": OptimSpec(kind="adafactor", lr=0.02, weight_decay=0.1),
    "muon": OptimSpec(kind="muon", lr=0.02, eps=1e-5, weight_decay=0.1),
    "adamw_8bit": OptimSpec(kind="adamw_8bit", lr=0.01, eps=1e-5, weight_decay=0.1),
}


def few_microbatches(parallel: ParallelSpec) -> int:
    """Sequences in a micro-batch such that two micro-batches are left to accumulate, and two for each stage.

    Time goes by micro-batches, not by sequences, and the oracle takes the batch at once however it is split.
    """
    sizes = (4, 2)
    return next((n for n in sizes if BATCH_SEQUENCES // (n * parallel.dp) >= 2 * parallel.pp), 1)


def tiny_run(
    model: str | ModelSpec = "gqa",
    *,
    parallel: ParallelSpec | None = None,
    optim: str | OptimSpec = "sgd",
    microbatch_sequences: int = 1,
    batch_sequences: int = BATCH_SEQUENCES,
    num_sequences: int = 30,
    max_epochs: int | None = None,
    ramp: tuple[tuple[int, int], ...] = (),
    **changes: object,
) -> RunSpec:
    """A run in float64 on the CPU; `changes` are fields of RunSpec, `ramp` holds (before step, sequences)."""
    data = DataSpec(
        path=ragged_dataset(num_sequences),
        sequence_length=SEQUENCE_LENGTH,
        batch_sequences=batch_sequences,
        microbatch_sequences=microbatch_sequences,
        max_epochs=max_epochs,
        batch_ramp=tuple(BatchRampSpec(before_step=step, batch_sequences=size) for step, size in ramp),
        holdout_sequences=3,
    )
    run = RunSpec(
        seed=3,
        device="cpu",
        model=MODELS[model] if isinstance(model, str) else model,
        parallel=parallel or ParallelSpec(),
        precision=PrecisionSpec(compute="fp64"),
        optim=(OPTIMIZERS | MORE_OPTIMIZERS)[optim] if isinstance(optim, str) else optim,
        schedule=ScheduleSpec(num_steps=6, kind="linear", warmup_steps=2),
        data=data,
    )
    return run.with_(**changes) if changes else run
