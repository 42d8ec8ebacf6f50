"""Fine-tuning: what `plan --finetune` sets in a run, and the longest context that fits."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any, Literal, NamedTuple, get_args

from meshwright.errors import SpecError
from meshwright.plan.search.meshes import Table, meshes
from meshwright.plan.search.pins import Pins
from meshwright.plan.search.question import MIN_CP_POSITIONS_TO_SAVE, Question, memory_use, price_memory
from meshwright.plan.search.space import least_memory_layouts
from meshwright.spec.adapter import NF4_FORMATS

FineTuning = Literal["full", "lora", "qlora"]
BASES: dict[FineTuning, str] = {"lora": "bf16", "qlora": "nf4"}
"""Format of the frozen weights by the kind of fine-tuning with adapters."""
BASE = "adapter.base"
RANK, ALPHA = 16, 32
LEARNING_RATES: dict[FineTuning, float] = {"full": 1e-5, "lora": 2e-4, "qlora": 2e-4}
"""Adapters take about ten times the rate of full fine-tuning; the default of pre-training ruins a model."""
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


def set_adapter(tree: dict[str, Any], finetune: FineTuning | None, pins: Pins) -> Iterator[str]:
    """Make `adapter` in the tree of a run that of this kind, and list what was filled in or changed."""
    if finetune is None:
        return
    _reject_pins(finetune, pins)
    if finetune == "full":
        yield from _leave_out(tree)
    else:
        yield from _set_values(tree, pins)
        yield from _set_base(tree, finetune, pins)
    checkpoint: dict[str, Any] = tree.get("checkpoint") or {}
    if not checkpoint.get("start_from") and pins.override_of("checkpoint.start_from") is None:
        yield "pre-trained weights, until checkpoint.start_from=FOLDER names them"


def _reject_pins(finetune: FineTuning, pins: Pins) -> None:
    """Refuse pins that make another kind of it than the one that is asked for."""
    pinned, base = [text for text in pins.overrides if text.startswith("adapter.")], pins.override_of(BASE)
    if finetune == "full" and pinned:
        fact = f"--finetune full with {' '.join(pinned)}: full fine-tuning has no adapters"
        raise SpecError(fact, where="--finetune", hint="leave these pins out, or use --finetune lora")
    if finetune == "qlora" and base is not None and _value(base) not in NF4_FORMATS:
        fact = f"--finetune qlora with {base}: QLoRA has frozen weights in 4 bits"
        hint = "use --finetune lora, or one of " + ", ".join(f"{BASE}={name}" for name in NF4_FORMATS)
        raise SpecError(fact, where=f"command line {BASE}", hint=hint)


def _value(pin: str) -> str:
    return pin.partition("=")[2].strip()


def _leave_out(tree: dict[str, Any]) -> Iterator[str]:
    """Take the adapters of a run file out, and what was trained beside them: all weights are trained."""
    if tree.get("adapter"):
        tree.update(adapter=None, train_only=[])
        yield "no adapters, unlike the run file (--finetune full); its learning rate stays (optim.lr)"


def _set_values(tree: dict[str, Any], pins: Pins) -> Iterator[str]:
    """Rank and alpha of a run that has no adapters."""
    if tree.get("adapter"):
        return
    tree["adapter"] = {"rank": RANK, "alpha": ALPHA}
    filled = {"rank": RANK, "alpha": ALPHA, "targets": "all-linear"}
    rest = [name for name in filled if pins.override_of(f"adapter.{name}") is None]
    if rest:
        values = ", ".join(f"{name} {filled[name]}" for name in rest)
        yield f"adapters of {values} ({', '.join(f'adapter.{name}' for name in rest)})"


def _set_base(tree: dict[str, Any], finetune: FineTuning, pins: Pins) -> Iterator[str]:
    """The format of the frozen weights, where it is open or where the run file has that of the other kind."""
    adapter, given = tree["adapter"], tree["adapter"].get("base")
    if pins.override_of(BASE) is not None:
        return
    if given is not None and (given in NF4_FORMATS) == (finetune == "qlora"):
        return
    in_bf16 = tree["precision"].get("compute", "bf16") == "bf16"  # a base in bf16 has matmuls in bf16
    adapter["base"] = BASES[finetune] if in_bf16 or finetune == "qlora" else "weights"
    form = adapter["base"] if adapter["base"] != "weights" else "the format of precision.weights"
    instead = "" if given is None else f" instead of {given}: --finetune {finetune}"
    yield f"frozen weights in {form}{instead} ({BASE})"


def set_rate(tree: dict[str, Any], finetune: FineTuning | None, pins: Pins) -> Iterator[str]:
    """Set the learning rate and no weight decay in the tree of a run that leaves them open."""
    if finetune is None:
        return
    optim: dict[str, Any] = tree["optim"] if isinstance(tree.get("optim"), dict) else {}
    rate, used = LEARNING_RATES[finetune], "full fine-tuning" if finetune == "full" else "adapters"
    if "lr" not in optim and pins.override_of("optim.lr") is None:
        yield f"a learning rate of {rate:g}, usual for {used} (optim.lr)"
    if "weight_decay" not in optim and pins.override_of("optim.weight_decay") is None:
        yield "no weight decay (optim.weight_decay)"
    tree["optim"] = {"lr": rate, "weight_decay": 0, **optim}


def longest_context(question: Question) -> LongestContext:
    """The longest sequences that fit on all devices, one per data rank, whatever the model's positions."""
    at_length = cache(partial(_at_length, question))  # both searches ask for most lengths
    on_device = _longest(question, partial(_fits, at_length, offloads=False))
    if not question.may_offload:
        return LongestContext(on_device, on_device)
    return LongestContext(on_device, _longest(question, partial(_fits, at_length, offloads=True)))


def _longest(question: Question, fits_at: Callable[[int], bool]) -> int:
    model, power = question.run.model, SHORTEST_CONTEXT
    limit = LONGEST_CONTEXT if model.positions == "rope" else model.max_positions
    if not fits_at(power):
        return 0
    while 2 * power <= limit and fits_at(2 * power):
        power *= 2
    fits, too_long = CONTEXT_STEPS, 2 * CONTEXT_STEPS
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        is_fitting = fits_at(power * middle // CONTEXT_STEPS)
        fits, too_long = (middle, too_long) if is_fitting else (fits, middle)
    return min(limit, power * fits // CONTEXT_STEPS)


def _fits(at_length: Callable[[int], tuple[Question, Table]], length: int, *, offloads: bool) -> bool:
    asked, table = at_length(length)
    if len(table["tp"]) == 0:
        return False
    needed = price_memory(asked, least_memory_layouts(asked, table, offloads=offloads))
    return bool(memory_use(asked, needed).min() <= 1.0)


def _at_length(question: Question, length: int) -> tuple[Question, Table]:
    """The question with sequences of this length, one per device, and its meshes on all devices."""
    run, devices = question.run, question.cluster.num_devices
    data = run.data.with_(sequence_length=length, batch_sequences=devices, microbatch_sequences=1)
    model = run.model.with_(max_positions=max(length, run.model.max_positions))
    asked = replace(
        question,
        run=run.with_(data=data, model=model),
        # No more cp ranks than devices.
        min_cp_positions=max(min(length, MIN_CP_POSITIONS_TO_SAVE), length // devices),
    )
    return asked, meshes(asked, range(devices, devices + 1))
