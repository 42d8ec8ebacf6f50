"""Fine-tuning: what `plan --finetune` sets in a run, and the longest context that fits."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal, NamedTuple, get_args

from meshwright.errors import SpecError
from meshwright.plan.search.meshes import meshes
from meshwright.plan.search.question import MIN_CP_POSITIONS_TO_SAVE, Question, memory_use, price_memory
from meshwright.plan.search.space import least_memory_layouts

FineTuning = Literal["full", "lora", "qlora"]
BASES: dict[FineTuning, str] = {"lora": "bf16", "qlora": "nf4"}
"""Format of the frozen weights by the kind of fine-tuning with adapters."""
RANK, ALPHA = 16, 32
TUNING_SEQUENCE, TUNING_BATCH_TOKENS, TUNING_TOKENS = 4096, 2**18, 10**8
"""Defaults of fine-tuning: 64 sequences of 4,096 tokens per step, and 100M tokens in all."""
SHORTEST_CONTEXT, LONGEST_CONTEXT = 256, 2**23
CONTEXT_STEPS = 64
"""The longest context is found to 1/64 of a power of two."""


class LongestContext(NamedTuple):
    """Tokens of the longest sequence that fits, with every saver of memory; 0 where none does."""

    on_device: int
    """With everything on the device."""
    with_offload: int
    """With activations in host memory."""


def require_known(text: str | None) -> FineTuning | None:
    """What `--finetune` names; SpecError for another word."""
    if text is None:
        return None
    if text not in get_args(FineTuning):
        hint = "use full, lora, qlora, or auto"
        raise SpecError(f"--finetune is {text!r}", where="--finetune", hint=hint)
    return text  # pyright: ignore[reportReturnType]  (it is one of the words)


def set_adapter(tree: dict[str, Any], finetune: FineTuning | None) -> Iterator[str]:
    """Set `adapter` in the tree of a run that has none, and list what was filled in."""
    if finetune is None:
        return
    if finetune in BASES and not tree.get("adapter"):
        in_bf16 = tree["precision"].get("compute", "bf16") == "bf16"  # a base in bf16 has matmuls in bf16
        base = BASES[finetune] if in_bf16 or finetune == "qlora" else "weights"
        tree["adapter"] = {"rank": RANK, "alpha": ALPHA, "base": base}
        yield f"adapters of rank {RANK} and alpha {ALPHA} on all linears (adapter.rank, adapter.targets)"
        form = base if base != "weights" else "the format of precision.weights"
        yield f"frozen weights in {form} (adapter.base)"
    checkpoint: dict[str, Any] = tree.get("checkpoint") or {}
    if not checkpoint.get("start_from"):
        yield "pre-trained weights, until checkpoint.start_from=FOLDER names them"


def longest_context(question: Question) -> LongestContext:
    """The longest sequences that fit on all devices, one per data rank, whatever the model's positions."""
    on_device = _longest(question, offloads=False)
    return LongestContext(on_device, _longest(question, offloads=True) if question.may_offload else on_device)


def _longest(question: Question, *, offloads: bool) -> int:
    model, power = question.run.model, SHORTEST_CONTEXT
    limit = LONGEST_CONTEXT if model.positions == "rope" else model.max_positions
    if not _fits(question, power, offloads=offloads):
        return 0
    while 2 * power <= limit and _fits(question, 2 * power, offloads=offloads):
        power *= 2
    fits, too_long = CONTEXT_STEPS, 2 * CONTEXT_STEPS
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        is_fitting = _fits(question, power * middle // CONTEXT_STEPS, offloads=offloads)
        fits, too_long = (middle, too_long) if is_fitting else (fits, middle)
    return min(limit, power * fits // CONTEXT_STEPS)


def _fits(question: Question, length: int, *, offloads: bool) -> bool:
    run, devices = question.run, question.cluster.num_devices
    data = run.data.with_(sequence_length=length, batch_sequences=devices, microbatch_sequences=1)
    model = run.model.with_(max_positions=max(length, run.model.max_positions))
    asked = replace(
        question,
        run=run.with_(data=data, model=model),
        # No more cp ranks than devices.
        min_cp_positions=max(min(length, MIN_CP_POSITIONS_TO_SAVE), length // devices),
    )
    table = meshes(asked, range(devices, devices + 1))
    if len(table["tp"]) == 0:
        return False
    needed = price_memory(asked, least_memory_layouts(asked, table, offloads=offloads))
    return bool(memory_use(asked, needed).min() <= 1.0)
