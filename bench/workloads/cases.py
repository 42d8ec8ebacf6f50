"""The models and batches that `bench.step`, `bench.ladder` and `bench.step_variants` measure."""

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

from meshwright.spec import (
    AttentionSpec,
    DataSpec,
    MlpSpec,
    ModelSpec,
    OptimSpec,
    PrecisionSpec,
    RopeSpec,
    RunSpec,
    ScheduleSpec,
)
from meshwright.spec.families import family
from meshwright.spec.text import dump_run, parse_run


@dataclass(frozen=True)
class Case:
    """A model and a batch, the same for all contenders."""

    model: ModelSpec
    sequence_length: int
    microbatch: int
    accumulation: int
    activation_gib: float = 0.0
    """Estimate of the activations of one micro-batch of ours, used until it has made steps."""
    peer_activations: float = 1.35
    """Activations of a compiled peer relative to ours, as measured; more where the logits are larger."""
    peer_weights: str = "fp32"
    """bf16 where fp32 weights do not fit and peers have no exact bf16 form; their rows say so."""
    ours: tuple[str, ...] = ()
    """Overrides of our run."""
    fp8: tuple[str, ...] = ()
    """Names of the FP8 settings that are measured."""
    accumulation_factor: int | None = None
    """Ours is also measured with this many times the micro-batches per step: the update's share falls."""


def _tiny(kind: str) -> ModelSpec:
    if kind == "gpt":
        return (
            family("gpt2-124m")
            .with_(num_layers=3, width=64, vocab_size=512, max_positions=64)
            .with_(
                attention=family("gpt2-124m").attention.with_(num_heads=2, num_kv_heads=2, head_width=32),
                mlp=family("gpt2-124m").mlp.with_(width=256),
            )
        )
    return ModelSpec(
        vocab_size=512,
        num_layers=4,
        width=64,
        max_positions=64,
        attention=AttentionSpec(num_heads=4, num_kv_heads=2, head_width=16),
        mlp=MlpSpec(width=128),
        rope=RopeSpec(),
    )


# 10 bytes per parameter: weights and their lower bits, gradients and two Adam moments, two bytes each.
_SMALL_STATE = ("precision.weights=bf16_exact", "precision.gradients=bf16", "optim.state=bf16")
_ENDS = ("precision.fp8=current",)
_HEAD = (*_ENDS, "precision.fp8.bf16_layers_each_end=0")
CAST_PER_STEP = "precision.fp8.cast_weights=per_step"  # two more bytes per weight
FP8 = {
    "fp8, end blocks in bf16": _ENDS,
    "fp8, head alone in bf16": _HEAD,
    "fp8, end blocks in bf16, weights cast once a step": (*_ENDS, CAST_PER_STEP),
    "fp8, head alone in bf16, weights cast once a step": (*_HEAD, CAST_PER_STEP),
}
_PLAIN_FP8, _FAST_FP8 = tuple(FP8)[:2], tuple(FP8)[2:]
CASES = {
    # The vocabulary is padded from 50257 to a multiple of 128, for all contenders.
    "124m": Case(family("gpt2-124m").with_(vocab_size=50304), 1024, 64, 2, 20.0, 1.7),
    "1b": Case(family("llama-3.2-1b"), 4096, 8, 2, activation_gib=43.0, fp8=_FAST_FP8, accumulation_factor=4),
    "8b": Case(
        family("llama-3.1-8b"),
        4096,
        2,
        4,
        activation_gib=40.0,
        peer_weights="bf16",
        ours=_SMALL_STATE,
        fp8=(*_PLAIN_FP8, _FAST_FP8[1]),  # the fastest settings hardly fit
        accumulation_factor=4,
    ),
    # Cut to a few layers, so that weights, gradients and moments fit on one device.
    "moe": Case(
        family("qwen3-30b-a3b").with_(num_layers=4),
        4096,
        4,
        1,
        activation_gib=16.0,
        peer_activations=2.0,
        peer_weights="bf16",  # with fp32 weights transformers' grouped matmuls fall back to a loop
        ours=_SMALL_STATE,
        accumulation_factor=4,
    ),
    "window": Case(family("mistral-7b").with_(num_layers=8), 8192, 2, 2, activation_gib=40.0),
    "8b-wide": Case(family("llama-3.1-8b").with_(num_layers=8), 8192, 2, 2, activation_gib=40.0),
    "1b-32k": Case(family("llama-3.2-1b"), 32768, 1, 2, activation_gib=43.0),
    "tiny": Case(_tiny("llama"), 64, 2, 2, fp8=_FAST_FP8, accumulation_factor=2),
    "tiny-gpt": Case(_tiny("gpt"), 64, 2, 2),
}


def build_run(case: Case, options: Namespace, data: Path, overrides: tuple[str, ...] = ()) -> RunSpec:
    """Our run of a case; peers read model, batch and optimizer from it."""
    microbatch = options.microbatch or case.microbatch
    run = RunSpec(
        name="bench",
        device=options.device,
        compile=not options.eager,
        model=case.model,
        precision=PrecisionSpec(compute="fp32" if options.precision == "fp32" else "bf16"),
        optim=OptimSpec(lr=1e-4),
        schedule=ScheduleSpec(num_steps=100_000, kind="constant"),
        data=DataSpec(
            path=str(data),
            sequence_length=case.sequence_length,
            batch_sequences=microbatch * (options.accumulation or case.accumulation),
            microbatch_sequences=microbatch,
            documents="separate" if options.documents else "joined",
            shuffle=False,
        ),
    )
    return parse_run(dump_run(run), [*case.ours, *overrides, *options.set]).require_valid()


def with_microbatch(run: RunSpec, size: int) -> RunSpec | None:
    """The same tokens per step in micro-batches of another size; None where it does not divide them."""
    if size < 1 or run.data.batch_sequences % size:
        return None
    return run.with_(data=run.data.with_(microbatch_sequences=size))
