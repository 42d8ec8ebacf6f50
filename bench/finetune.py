"""A step of fine-tuning 8B by LoRA, ours and Hugging Face + peft: tokens per second and peak memory.

    python -m bench.finetune --out DIR                       every contender, one after the other
    python -m bench.finetune --out DIR --only lora,hf-blocks
    python -m bench.finetune --out DIR --case tiny --device cpu      the same program in a minute, for a try

Every contender has a process of its own, the same random weights, random tokens and hyper-parameters: rank
16, alpha 32, adapters on all linears, AdamW on the adapters. A step is forward, backward, clipping and update
on a batch that is on the device. The losses of the first steps must agree. DIR gets finetune.json and
finetune.md, which are written again after every row.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.finetune_step import step_rows

from meshwright.spec import (
    AdapterSpec,
    DataSpec,
    MemorySpec,
    OptimSpec,
    PrecisionSpec,
    RunSpec,
    ScheduleSpec,
    SyntheticSpec,
)
from meshwright.spec.families import family

ROOT = Path(__file__).resolve().parents[1]
TINY = {"num_layers": 2, "width": 64, "vocab_size": 512, "max_positions": 256}


@dataclass(frozen=True)
class Contender:
    """One way to train: ours with changes of the run, or Hugging Face + peft with settings."""

    title: str
    microbatch: int = 2
    recompute: str = "none"
    base: str = "bf16"
    length: int | None = None
    """Tokens of a sequence, where it is not that of the case."""
    precision: dict[str, Any] = field(default_factory=dict)
    offload: tuple[str, ...] = ()
    cuda_graphs: bool = False
    hf: dict[str, Any] | None = None
    """Settings of Hugging Face + peft; None: ours."""


CONTENDERS = {
    "lora": Contender("ours, LoRA, bf16 base"),
    "lora-4": Contender("ours, LoRA, bf16 base", microbatch=4),
    "lora-selective": Contender("ours, LoRA, bf16 base, selective recompute", recompute="selective"),
    "lora-full": Contender("ours, LoRA, bf16 base, full recompute", recompute="full"),
    "lora-fp8": Contender(
        "ours, LoRA, fp8 matmuls",
        precision={"fp8": {"recipe": "current", "bf16_layers_each_end": 0, "cast_weights": "per_step"}},
    ),
    "lora-graphs": Contender("ours, LoRA, bf16 base, CUDA graphs", cuda_graphs=True),
    "lora-fp8-base": Contender("ours, LoRA, base stored in fp8", base="fp8"),
    "qlora": Contender("ours, QLoRA, NF4 base", base="nf4"),
    "qlora-2k": Contender("ours, QLoRA, NF4 base, full recompute", base="nf4", recompute="full", length=2048),
    "qlora-2k-offload": Contender(
        "ours, QLoRA, nested NF4 base, full recompute, activations offloaded",
        base="nf4_nested",
        recompute="full",
        length=2048,
        offload=("activations",),
    ),
    "qlora-2k-embedding": Contender(
        "ours, QLoRA, NF4 base, full recompute, embedding in host memory",
        base="nf4",
        recompute="full",
        length=2048,
        offload=("embedding",),
    ),
    "lora-2k": Contender("ours, LoRA, bf16 base, full recompute", recompute="full", length=2048),
    "hf-eager": Contender("Hugging Face + peft, eager", hf={"compile": False}),
    "hf-blocks": Contender("Hugging Face + peft, blocks compiled", hf={"compile": True}),
    "hf-blocks-4": Contender("Hugging Face + peft, blocks compiled", microbatch=4, hf={"compile": True}),
    "hf-blocks-bf16": Contender(
        "Hugging Face + peft, blocks compiled, adapters in bf16", hf={"compile": True, "adapters": "bf16"}
    ),
}


def run_of(contender: Contender, options: argparse.Namespace) -> RunSpec:
    """The run of a contender; Hugging Face reads model, batch and optimizer from it."""
    model, length = family("llama-3.1-8b"), 4096
    if options.case == "tiny":
        attention = model.attention.with_(num_heads=8, num_kv_heads=4, head_width=8)
        model, length = model.with_(**TINY, attention=attention, mlp=model.mlp.with_(width=128)), 128
    return RunSpec(
        device=options.device,
        compile=options.device == "cuda",
        cuda_graphs=contender.cuda_graphs and options.device == "cuda",
        model=model,
        adapter=AdapterSpec.model_validate({"rank": 16, "alpha": 32, "base": contender.base}),
        precision=PrecisionSpec.model_validate({"compute": "bf16", **contender.precision}),
        memory=MemorySpec.model_validate({"recompute": contender.recompute, "offload": contender.offload}),
        optim=OptimSpec(lr=2e-4, weight_decay=0.0),
        schedule=ScheduleSpec(num_steps=1000, kind="constant"),
        data=DataSpec(
            synthetic=SyntheticSpec(),
            sequence_length=options.sequence_length
            or (contender.length if options.case == "8b" else None)
            or length,
            batch_sequences=contender.microbatch,
            microbatch_sequences=contender.microbatch,
            documents="joined",
        ),
    )


def measured(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The row of one contender, measured in a process of its own; with its error where it failed."""
    command = [sys.executable, "-m", "bench.finetune", "--worker", name, "--device", options.device]
    command += ["--case", options.case, "--steps", str(options.steps)]
    command += ["--sequence-length", str(options.sequence_length)] if options.sequence_length else []
    found = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    row = {"contender": name, "title": CONTENDERS[name].title, "microbatch": CONTENDERS[name].microbatch}
    try:
        return {**row, **json.loads(found.stdout.splitlines()[-1])}
    except (IndexError, ValueError):
        return {**row, "error": found.stderr.strip()[-2000:] or f"exit code {found.returncode}"}


def page(rows: list[dict[str, Any]]) -> str:
    """The results as a Markdown table."""
    lines = [
        "| contender | batch | tokens/s | ms per step | peak allocated GiB | first loss |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        if "error" in row:
            lines.append(
                f"| {row['title']} | {row['microbatch']} | failed: {row['error'].splitlines()[-1]} | | | |"
            )
            continue
        lines.append(
            f"| {row['title']} | {row['microbatch']} x {row['sequence_length']} | "
            f"{row['tokens_per_second']:,.0f} | {1e3 * row['step_seconds']:.1f} | "
            f"{row['allocated_bytes'] / 2**30:.1f} | {row['first_loss']:.4f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure the contenders one after the other; with --worker one of them in this process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("bench/results"), help="folder of the results")
    parser.add_argument("--only", default=",".join(CONTENDERS), help="contenders, separated by commas")
    parser.add_argument("--case", choices=("8b", "tiny"), default="8b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=12, help="timed steps of each contender")
    parser.add_argument("--sequence-length", type=int, help="tokens of a sequence")
    parser.add_argument("--worker", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        contender = CONTENDERS[options.worker]
        print(json.dumps(step_rows(run_of(contender, options), contender.hf, num_steps=options.steps)))
        return
    rows: list[dict[str, Any]] = []
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.only.split(","):
        rows.append(measured(name, options))
        print(json.dumps(rows[-1]), flush=True)
        (options.out / "finetune.json").write_text(json.dumps(rows, indent=1) + "\n")
        (options.out / "finetune.md").write_text(page(rows))
    print(page(rows))


if __name__ == "__main__":
    main()
