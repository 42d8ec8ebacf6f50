"""Optimizers compared: seconds of one update, bytes per parameter, and the loss they reach.

    python -m bench.optimizers --out FILE         on CUDA: 1.2 B parameters of a Llama's shapes
    python -m bench.optimizers --quality-steps 0  only time and bytes
    python -m bench.optimizers --layers 1 --vocabulary 512 --width 256 --quality-steps 9   small, on a CPU

Persistent bytes are those of weights, gradients and states; temporary bytes are what an update allocates
besides (on CUDA). First come time and bytes of all optimizers, then, in the same order, the loss of a small
training. `--out FILE` is written after every row, with device and versions. After `--limit` seconds nothing
further is begun, and the page names what is missing; a row takes up to 25 s, most of it compiling. torchao's
AdamW8bit is compared where torchao is installed.
"""

import argparse
import gc
import importlib.util
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.bench.machine_facts import machine_facts
from meshwright.bench.timing import measure
from meshwright.data.batches import Batch, build_batches
from meshwright.models.decoder import build_decoder
from meshwright.models.initialise import initialise
from meshwright.optim.build import build_optimizer, set_learning_rate
from meshwright.optim.rounding import WeightFormat
from meshwright.parallel.program import model_arguments
from meshwright.spec import AttentionSpec, DataSpec, MlpSpec, ModelSpec, OptimSpec, RopeSpec, SyntheticSpec

Build = Callable[[dict[str, nn.Parameter]], torch.optim.Optimizer]
LR, BETA1, BETA2, DECAY = 1e-3, 0.9, 0.95, 0.1
WARMUP_STEPS = 20


@dataclass(frozen=True)
class Contender:
    """One optimizer with its weight format."""

    name: str
    weights: WeightFormat
    build: Build

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and gradients."""
        return torch.float32 if self.weights == "fp32" else torch.bfloat16


def ours(name: str, weights: WeightFormat = "fp32", **settings: Any) -> Contender:
    """An optimizer of ours."""
    optim = OptimSpec(lr=LR, beta1=BETA1, weight_decay=DECAY, **settings)
    return Contender(name, weights, lambda named: build_optimizer(named, optim, weights=weights))


PLAIN = ours("adamw (torch, fused)")
EIGHT_BITS = [
    ours("adamw_8bit", kind="adamw_8bit"),
    ours("adamw_8bit, bf16 stochastic", "bf16_stochastic", kind="adamw_8bit"),
]
OTHERS = [
    ours("adamw, bf16 exact", "bf16_exact"),
    ours("adamw, bf16 stochastic, bf16 moments", "bf16_stochastic", state="bf16"),
    ours("adafactor", kind="adafactor"),
    ours("muon", kind="muon"),
    ours("lamb", kind="lamb"),
    ours("adamw, bf16 exact, bf16 moments", "bf16_exact", state="bf16"),
    ours("adamw, bf16 moments", state="bf16"),
]
NO_TORCHAO = "torchao is not installed, so its AdamW8bit is missing (pip install torchao)"


def torchao_contenders() -> list[Contender]:
    """torchao's 8-bit AdamW; empty where torchao is not installed."""
    # Its compiled extensions are not needed here.
    os.environ.setdefault("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "1")
    if importlib.util.find_spec("torchao") is None:
        return []
    from torchao.optim import AdamW8bit  # noqa: PLC0415  # pyright: ignore[reportMissingImports]  optional

    def build(named: dict[str, nn.Parameter], *, stochastic: bool) -> torch.optim.Optimizer:
        return AdamW8bit(
            list(named.values()),
            lr=LR,
            betas=(BETA1, BETA2),
            weight_decay=DECAY,
            bf16_stochastic_round=stochastic,
        )

    return [
        Contender("torchao AdamW8bit", "fp32", lambda named: build(named, stochastic=False)),
        Contender(
            "torchao AdamW8bit, bf16 stochastic",
            "bf16_stochastic",
            lambda named: build(named, stochastic=True),
        ),
    ]


def llama_shapes(layers: int, vocabulary: int, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a 1B Llama's parameters."""
    yield "embedding.tokens.weight", (vocabulary, width)
    for layer in range(layers):
        block = f"blocks.{layer}."
        yield block + "attention_norm.weight", (width,)
        for name, rows in (("query", width), ("key", width // 4), ("value", width // 4), ("output", width)):
            yield f"{block}attention.{name}.weight", (rows, width)
        for name in ("gate", "up"):
            yield f"{block}mlp.{name}.weight", (4 * width, width)
        yield block + "mlp.down.weight", (width, 4 * width)


@dataclass
class Row:
    """The figures of one optimizer so far."""

    contender: Contender
    seconds: float
    persistent_bytes: float
    """Bytes per parameter of weight, gradient and states."""
    temporary_bytes: float | None
    """Bytes per parameter that an update allocates and frees; None on a CPU, which does not count them."""
    seconds_per_parameter: float
    losses: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        temporary = "-" if self.temporary_bytes is None else f"{self.temporary_bytes:.2f}"
        losses = " / ".join(f"{loss:.4f}" for loss in self.losses) or "-"
        times = f"{1e3 * self.seconds:9.2f} | {1e12 * self.seconds_per_parameter:8.1f}"
        name, persistent = self.contender.name, self.persistent_bytes
        return f"| {name:<38} | {persistent:7.2f} | {temporary:>7} | {times} | {losses} |"


def measured(contender: Contender, shapes: dict[str, tuple[int, ...]], device: torch.device) -> Row:
    """Time and bytes of one update; the first update, which may compile, is not timed."""
    named = {
        name: nn.Parameter(0.02 * torch.randn(shape, device=device, dtype=contender.dtype))
        for name, shape in shapes.items()
    }
    optimizer = contender.build(named)
    for weight in named.values():
        weight.grad = 1e-3 * torch.randn_like(weight)
    optimizer.step()
    num_parameters = sum(weight.numel() for weight in named.values())
    seconds = measure(optimizer.step, device, seconds=0.5).median
    states = (value for weight in named.values() for value in optimizer.state[weight].values())
    persistent = sum(_bytes(value) for value in states if isinstance(value, Tensor))
    persistent += sum(2 * weight.nbytes for weight in named.values())
    temporary = _temporary_bytes(optimizer) / num_parameters if device.type == "cuda" else None
    return Row(contender, seconds, persistent / num_parameters, temporary, seconds / num_parameters)


def _temporary_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Peak bytes that an update allocates temporarily; CUDA only."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _bytes(value: Tensor) -> int:
    """Bytes of a plain tensor, or of the tensors inside a quantised one."""
    if type(value) in (Tensor, nn.Parameter):
        return value.nbytes if value.ndim else 0
    names, _ = value.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]  torch's own protocol
    return sum(_bytes(getattr(value, name)) for name in names)


MODEL = ModelSpec(
    vocab_size=257,
    num_layers=4,
    width=256,
    max_positions=256,
    attention=AttentionSpec(num_heads=4, num_kv_heads=4, head_width=64),
    mlp=MlpSpec(width=768),
    rope=RopeSpec(),
)
DATA = DataSpec(synthetic=SyntheticSpec(), sequence_length=256, batch_sequences=16, microbatch_sequences=16)


def final_loss(contender: Contender, num_steps: int, device: torch.device, seed: int) -> float:
    """Mean loss over the last tenth of a small bf16 training; data and initial weights are fixed."""
    model = build_decoder(MODEL, dtype=contender.dtype)
    initialise(model, seed, device=device)
    named = dict(model.named_parameters())
    optimizer = contender.build(named)
    batches = build_batches(DATA, seed=seed, vocab_size=MODEL.vocab_size, device=device)
    losses = []
    for step in range(num_steps):
        warm = min(1.0, (step + 1) / WARMUP_STEPS)
        _set_rate(optimizer, LR * warm * (1.0 - 0.9 * step / num_steps))
        losses.append(_train_step(model, next(batches), optimizer))
    batches.close()
    return float(torch.stack(losses[-max(1, num_steps // 10) :]).mean())


def _set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate, also of an optimizer whose compiled update reads it from a tensor."""
    first = optimizer.param_groups[0]["lr"]
    if isinstance(first, Tensor):
        first.fill_(rate)
    else:
        set_learning_rate(optimizer, rate)


def _train_step(model: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer) -> Tensor:
    (microbatch,) = batch.microbatches
    with torch.autocast(microbatch.tokens_BS.device.type, dtype=torch.bfloat16):
        loss = model(microbatch.tokens_BS, **model_arguments(microbatch))
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@dataclass
class Page:
    """The table so far; the file is written whenever something is added."""

    device: torch.device
    out: Path | None
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, what: Row | str) -> None:
        """Print a row or a note, and write the page."""
        print(what, flush=True)
        if isinstance(what, str):
            self.notes.append(what)
        elif what not in self.rows:
            self.rows.append(what)
        if self.out:
            facts = [f"- {key}: {value}" for key, value in machine_facts(self.device).items()]
            lines = ["# Optimizers", "", *facts, "", *HEADER, *map(str, self.rows), "", *self.notes]
            self.out.write_text("\n".join(lines).rstrip() + "\n")


HEADER = [
    "| optimizer | B/param persistent | temporary | ms | ps/param | final loss by seed |",
    "|---|---|---|---|---|---|",
]


def contenders(page: Page, only: str) -> list[Contender]:
    """All optimizers; ours and torchao's 8-bit AdamW stand next to each other."""
    theirs = torchao_contenders()
    if not theirs:
        page.add(NO_TORCHAO)
    pairs = [one for pair in zip_longest(EIGHT_BITS, theirs) for one in pair if one is not None]
    return [one for one in (PLAIN, *pairs, *OTHERS) if only in one.name]


def main() -> None:
    """Measure all optimizers and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--quality-steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", default="", help="optimizers whose name contains this")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds after which nothing is begun")
    parser.add_argument("--out", type=Path, help="Markdown file of the page")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    page, until = Page(device, args.out), time.monotonic() + args.limit
    print("\n".join(HEADER))
    shapes = dict(llama_shapes(args.layers, args.vocabulary, args.width))
    skipped: list[str] = []
    for contender in contenders(page, args.only):
        if time.monotonic() > until:
            skipped.append(contender.name)
            continue
        page.add(measured(contender, shapes, device))
        free_memory(device)
    for row in page.rows if args.quality_steps else ():
        if time.monotonic() > until:
            skipped.append(f"the loss of {row.contender.name}")
            continue
        row.losses = [
            final_loss(row.contender, args.quality_steps, device, seed) for seed in range(args.seeds)
        ]
        page.add(row)
    if skipped:
        page.add(f"Not measured for lack of time: {'; '.join(skipped)}.")


def free_memory(device: torch.device) -> None:
    """Free the tensors of the last optimizer."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
