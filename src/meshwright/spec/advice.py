"""Advice on settings that are valid but waste the hardware. Like the rules, small named functions.

Tensor cores compute tiles: dims that are multiples of 64 (128 bytes in half precision) fill them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from meshwright.spec.families import FAMILIES
from meshwright.spec.fp8 import FP8_MULTIPLE, fp8_layers, unaligned_weights
from meshwright.spec.run import RunSpec

TILE = 64
ALIGNED = 8  # elements; with a smaller alignment the fast kernels are not used
FEWEST_TOKENS = 128
SLOW_FP8_ROWS = 1024
"""Rows per expert at which fp8 experts were measured to be slower than bf16 ones."""
LARGEST_BUBBLE = 0.2


@dataclass(frozen=True)
class Advice:
    """A fact with its values, the key it is about, and what would be faster."""

    fact: str
    where: str
    hint: str
    change: tuple[tuple[str, Any], ...] = ()
    """The dotted keys and the values that remove the waste, where these are all it takes."""
    cost: float | None = None
    """Expected share of the step that it costs, where it is priced."""


Advisor = Callable[[RunSpec], Iterator[Advice]]


def _uses_tensor_cores(run: RunSpec) -> bool:
    return run.device != "cpu" and run.precision.compute in ("tf32", "bf16", "fp16")


def family_keeps_its_proportions(run: RunSpec) -> Iterator[Advice]:
    """A family with another width has heads and MLP that fit this width, not those of the original."""
    model, original = run.model, FAMILIES.get(run.model.family)
    if original is None or model.width == original.width:
        return
    scale = model.width / original.width
    wanted: dict[str, tuple[int, int]] = {}
    if model.attention.latent is None and model.attention.num_heads == original.attention.num_heads:
        heads = max(1, round(model.attention.num_heads * scale))
        kv_heads = max(n for n in range(1, heads + 1) if heads % n == 0 and n <= model.attention.num_kv_heads)
        wanted["attention.num_heads"] = (model.attention.num_heads, heads)
        wanted["attention.num_kv_heads"] = (model.attention.num_kv_heads, kv_heads)
    if model.mlp.width == original.mlp.width:
        wanted["mlp.width"] = (
            model.mlp.width,
            max(ALIGNED, round(model.mlp.width * scale / ALIGNED) * ALIGNED),
        )
    kept = {key: values for key, values in wanted.items() if values[0] != values[1]}
    if kept:
        fact = f"width={model.width} with {', '.join(f'{key}={old}' for key, (old, _) in kept.items())}"
        hint = " ".join(f"model.{key}={new}" for key, (_, new) in kept.items())
        yield Advice(f"{fact}, which {model.family} has for width={original.width}", "model.width", hint)


def tensor_cores_are_used(run: RunSpec) -> Iterator[Advice]:
    """On a GPU, fp32 leaves the tensor cores idle."""
    if run.device == "cuda" and run.precision.compute == "fp32":
        hint = "precision.compute=tf32 keeps the range at several times the speed; bf16 doubles that again"
        change = (("precision.compute", "tf32"),)
        yield Advice("compute=fp32 leaves the tensor cores idle", "precision.compute", hint, change)


def vocabulary_fills_tiles(run: RunSpec) -> Iterator[Advice]:
    """The head pads its weight to a multiple of 64 rows in every step: an odd vocabulary costs that copy."""
    vocabulary, tp = run.model.vocab_size, run.parallel.tp
    if _uses_tensor_cores(run) and vocabulary % (TILE * tp):
        padded = -(-vocabulary // (TILE * tp)) * TILE * tp
        each = f", {vocabulary // tp} on a rank," if tp > 1 else ""
        key, why = "model.vocab_size", "the head copies its weight to pad it"
        fact = f"vocab_size={vocabulary}{each} is not a multiple of {TILE}: {why}"
        yield Advice(fact, key, f"{key}={padded} needs no copy: the rows added are unused", ((key, padded),))


def widths_fill_tiles(run: RunSpec) -> Iterator[Advice]:
    """Local matmul dims of a rank are multiples of 64."""
    if not _uses_tensor_cores(run):
        return
    for key, width, degree in _sharded_widths(run):
        if (width // degree) % TILE:
            local = f" is {width // degree} on a rank, which" if degree > 1 else ""
            fact = f"{key.rsplit('.', 1)[-1]}={width}{local} is not a multiple of {TILE}"
            padded = -(-width // (TILE * degree)) * TILE * degree
            yield Advice(fact, key, f"{key}={padded} fills the tiles", ((key, padded),))


def _sharded_widths(run: RunSpec) -> Iterator[tuple[str, int, int]]:
    """Key, width and sharding degree of each matmul dim."""
    model, parallel = run.model, run.parallel
    yield "model.width", model.width, 1
    if not model.is_moe_layer(0):
        yield "model.mlp.width", model.mlp.width, parallel.tp
    if model.moe is not None:
        yield "model.moe.width", model.moe.width, parallel.etp


def microbatch_fills_device(run: RunSpec) -> Iterator[Advice]:
    """A forward pass has at least 128 tokens on a rank."""
    tokens = run.data.microbatch_sequences * run.data.sequence_length // run.parallel.cp
    if _uses_tensor_cores(run) and tokens < FEWEST_TOKENS:
        fact = f"a micro-batch has {tokens} tokens on a rank"
        yield Advice(
            fact, "data.microbatch_sequences", "raise data.microbatch_sequences as far as memory allows"
        )


def pipeline_is_filled(run: RunSpec) -> Iterator[Advice]:
    """The pipeline's bubble, (pp - 1) / (micro-batches x virtual_stages), is below a fifth of the work, and
    there are as many micro-batches as pipeline ranks."""
    parallel, count = run.parallel, run.accumulation
    zero_bubble = parallel.schedule in ("interleaved_zero_bubble", "zbv", "dualpipev")
    if parallel.pp == 1 or count == 0:
        return
    bubble = 0.0 if zero_bubble else (parallel.pp - 1) / (count * parallel.virtual_stages)
    if bubble <= LARGEST_BUBBLE and count >= parallel.pp:
        return
    size = f"the pipeline bubble is {bubble:.0%} of the work: " if bubble else ""
    fewer = ", fewer than pipeline ranks: some rank is idle at any time" if count < parallel.pp else ""
    enough = parallel.pp * run.data.microbatch_sequences * parallel.dp
    more = f"raise data.batch_sequences to {enough} or more" if fewer else "use more or smaller micro-batches"
    hint = f"{more}, or an interleaved schedule with more virtual_stages"
    fact = f"{size}pp={parallel.pp} with {count} micro-batches{fewer}"
    yield Advice(fact, "parallel.pp", hint, cost=bubble / (1.0 + bubble) if bubble else None)


def fastest_kernels_are_allowed(run: RunSpec) -> Iterator[Advice]:
    """cuDNN times its kernels (benchmark) and sums use atomics, unless the run is deterministic."""
    if run.deterministic and _uses_tensor_cores(run):
        fact = "deterministic=true excludes the fastest kernels: cuDNN's benchmark and atomics are off"
        hint = "leave it out where losses need not be bitwise equal; its cost is not measured"
        yield Advice(fact, "deterministic", hint)


def blocks_are_compiled(run: RunSpec) -> Iterator[Advice]:
    """torch's compiler passes over selective recompute with row counts of experts, or a ring, inside."""
    if not run.compile or run.memory.recompute != "selective":
        return
    moe, parallel = run.model.moe, run.parallel
    if parallel.cp > 1 and parallel.cp_kind in ("ring", "hierarchical"):
        fact = f"blocks stay uncompiled: cp_kind={parallel.cp_kind} passes keys on inside recompute=selective"
        others = "; so do cp_kind=gather and ulysses"
    elif moe is not None and (parallel.ep > 1 or moe.capacity_factor is not None):
        fact = "routed blocks stay uncompiled: the host reads row counts inside recompute=selective"
        others = ""
    else:
        return
    hint = f"recompute=full compiles their parts, recompute=none the blocks{others}"
    yield Advice(fact, "memory.recompute", hint)


def fp8_is_fast(run: RunSpec) -> Iterator[Advice]:
    """fp8 is fast on devices with fp8 tensor cores, in compiled blocks, with aligned dims."""
    fp8 = run.precision.fp8
    if fp8 is None:
        return
    if run.device == "cpu":
        fact = f"fp8={fp8.recipe} on a CPU is emulated: the numerics are the same, and it is slower than bf16"
        yield Advice(fact, "precision.fp8", "use device=cuda on a GPU with fp8 for speed")
    elif not run.compile:
        fact = "fp8 without compile runs each operation of a cast as a separate kernel"
        yield Advice(fact, "compile", "compile=true fuses them")
    if fp8.recipe == "mxfp8" and run.device != "cpu":
        fact = "mxfp8 needs Blackwell or later; on other GPUs it is emulated in bf16"
        yield Advice(fact, "precision.fp8.recipe", "on Hopper use current, delayed or blockwise")
    unaligned = {_part(one.name) for layer in fp8_layers(run) for one in unaligned_weights(run, layer)}
    if unaligned:
        fact = f"{', '.join(sorted(unaligned))} stay in bf16: dims on a rank are not multiples of"
        hint = "choose widths or tp so that they are, or leave it: the other linears are in fp8"
        yield Advice(f"{fact} {FP8_MULTIPLE[fp8.recipe]}", "precision.fp8", hint)


def fp8_experts_have_many_rows(run: RunSpec) -> Iterator[Advice]:
    """Casts of experts take longer than fp8 saves where an expert has few rows."""
    fp8, moe = run.precision.fp8, run.model.moe
    if fp8 is None or moe is None or not fp8.experts or run.device == "cpu":
        return
    tokens = run.data.microbatch_sequences * run.data.sequence_length // run.parallel.cp
    rows = tokens * run.parallel.ep * moe.top_k // moe.num_experts
    if rows <= SLOW_FP8_ROWS:
        fact = f"fp8.experts=true with about {rows} rows per expert in a micro-batch"
        hint = f"bf16 experts were 7 to 11% faster at {SLOW_FP8_ROWS} rows on an H200: leave experts out"
        yield Advice(fact, "precision.fp8.experts", hint)


def fp8_weights_are_cast_once(run: RunSpec) -> Iterator[Advice]:
    """Where unsharded weights stay on the device, one cast serves all micro-batches of a step."""
    fp8, is_full = run.precision.fp8, run.parallel.zero < 3 and "parameters" not in run.memory.offload
    if fp8 is None or run.device == "cpu" or not is_full or run.accumulation == 1:
        return
    if fp8.cast_weights == "per_microbatch":
        fact = f"fp8 weights are cast in each of {run.accumulation} micro-batches of a step"
        hint = "per_step casts them once, for two more bytes per weight"
        yield Advice(fact, "precision.fp8.cast_weights", hint)


def _part(name: str) -> str:
    """`blocks.3.mlp.up.weight` as `mlp.up`."""
    return name.split(".", 2)[2].removesuffix(".weight")


ADVISORS: list[Advisor] = [
    family_keeps_its_proportions,
    tensor_cores_are_used,
    vocabulary_fills_tiles,
    widths_fill_tiles,
    microbatch_fills_device,
    pipeline_is_filled,
    fastest_kernels_are_allowed,
    blocks_are_compiled,
    fp8_is_fast,
    fp8_experts_have_many_rows,
    fp8_weights_are_cast_once,
]


def advise(run: RunSpec) -> list[Advice]:
    """Everything that would waste the hardware; the run is valid all the same.

    Weights to start from have their shapes: then nothing is advised that changes the model.
    """
    found = [advice for advisor in ADVISORS for advice in advisor(run)]
    if run.checkpoint.start_from is None:
        return found
    return [one for one in found if not any(key.startswith("model.") for key, _ in one.change)]
