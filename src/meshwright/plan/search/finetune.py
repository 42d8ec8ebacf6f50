"""Fine-tuning: what `plan --finetune` sets in a run, and the longest context that fits."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal, get_args

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
SHORTEST_CONTEXT = 256


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
        tree["adapter"] = {"rank": RANK, "alpha": ALPHA, "base": BASES[finetune]}
        yield f"adapters of rank {RANK} and alpha {ALPHA} on all linears (adapter.rank, adapter.targets)"
        yield f"frozen weights in {BASES[finetune]} (adapter.base)"
    checkpoint: dict[str, Any] = tree.get("checkpoint") or {}
    if not checkpoint.get("start_from"):
        yield "pre-trained weights, until checkpoint.start_from=FOLDER names them"


def longest_context(question: Question) -> int | None:
    """The longest sequence, up to the model's positions, that fits with one sequence per data rank.

    Lengths are powers of two, with every saver of memory but offload; None where the shortest does not fit.
    """
    length, found = SHORTEST_CONTEXT, None
    while length <= question.run.model.max_positions and _fits(question, length):
        length, found = 2 * length, length
    return found


def _fits(question: Question, length: int) -> bool:
    devices = question.cluster.num_devices
    data = question.run.data.with_(sequence_length=length, batch_sequences=devices, microbatch_sequences=1)
    asked = replace(
        question, run=question.run.with_(data=data), min_cp_positions=min(length, MIN_CP_POSITIONS_TO_SAVE)
    )
    table = meshes(asked, range(1, devices + 1))
    if len(table["tp"]) == 0:
        return False
    needed = price_memory(asked, least_memory_layouts(asked, table, offloads=False))
    return bool(memory_use(asked, needed).min() <= 1.0)
