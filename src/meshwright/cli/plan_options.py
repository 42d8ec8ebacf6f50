"""The options of `meshwright plan`."""

from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.completion_values import complete_model

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A family (`meshwright models list`) or its hub id, a config.json or its folder, a run file "
        "or a recipe.",
        autocompletion=complete_model,
    ),
]
Pins = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="What is decided already: tp=8 recompute=none,full."),
]
SequenceLength = Annotated[str | None, typer.Option("--seq", help="Tokens per sequence, such as 8192.")]
BatchTokens = Annotated[str | None, typer.Option(help="Tokens per optimizer step, such as 4M.")]
Tokens = Annotated[str | None, typer.Option(help="Tokens of the whole run, such as 300B.")]
Precision = Annotated[
    str | None, typer.Option(help="bf16, fp16, tf32 or fp32; fp8: bf16 with linear layers in fp8.")
]
Allow = Annotated[
    str | None,
    typer.Option(
        help="Changes of formats and optimizer the plan may make: fp8, bf16_weights, bf16_gradients, "
        "bf16_moments, stochastic_weights, adamw_8bit, adafactor, sgd, or all (but the last two)."
    ),
]
FineTune = Annotated[
    str | None,
    typer.Option(
        "--finetune",
        help="Train a pre-trained model further: full, lora (adapters on frozen bf16 weights), qlora (4-bit "
        "weights), or auto: full where that fits without offload, else adapters.",
    ),
]
Objective = Annotated[str, typer.Option(help="speed, cost (device-hours) or memory (headroom).")]
Deadline = Annotated[
    str | None, typer.Option(help="Be done by then, such as 30d, on as few devices as possible.")
]
Top = Annotated[int, typer.Option(min=1, max=50, help="How many layouts to show.")]
Output = Annotated[Path | None, typer.Option("-o", "--output", help="Write the run file here.")]
Report = Annotated[Path | None, typer.Option(help="Write an HTML report here.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite the files of -o and --report.")]
Verify = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=20,
        metavar="N",
        help="Trace the N best layouts, and drop those that do not fit. Needs torch.",
    ),
]
Calibrate = Annotated[
    bool,
    typer.Option(
        "--calibrate",
        help="Instead of a model, name run directories: refit this machine's rates to them and write -o "
        "(machine.json), which --on reads.",
    ),
]
Price = Annotated[float | None, typer.Option(min=0, help="Money per device-hour, for --report and --budget.")]
Budget = Annotated[
    str | None,
    typer.Option(
        help="Instead of a plan, the sizes and tokens that this trains, with MODEL's proportions and the "
        "loss expected of each: `10000 gpu-hours`, `30 days`, `50000 money` (with --price)."
    ),
]
