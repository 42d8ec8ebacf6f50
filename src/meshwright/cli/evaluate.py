"""`meshwright evaluate`: the loss of a trained model on a dataset."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli.check import AsJson, Quiet

if TYPE_CHECKING:
    from meshwright.spec import RunSpec
    from meshwright.train.evaluate_checkpoint import Evaluation


def evaluate(
    run_dir: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_DIR",
            help="A run directory such as runs/demo, a checkpoint, or a Hugging Face folder.",
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Overrides of the run, such as data.sequence_length=512."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="A packed dataset.", show_default="the run's held-out sequences"),
    ] = None,
    checkpoint: Annotated[
        int | None,
        typer.Option(metavar="STEP", min=0, help="The checkpoint of this step.", show_default="the last"),
    ] = None,
    ema: Annotated[bool, typer.Option("--ema", help="Use the moving average of the weights.")] = False,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Data-parallel ranks to start.", show_default="the mesh of the run"),
    ] = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Compute the loss of a trained model on a dataset: loss, perplexity, number of tokens.

    Evaluates every sequence of --data, with the model, sequence length and precision of the run. Starts
    local ranks, or joins those that a launcher started, on the devices that `train` would use.
    """
    from meshwright.launch.launched import launched_rank
    from meshwright.launch.local import run_local
    from meshwright.train.evaluate_checkpoint import evaluation_run

    run = evaluation_run(run_dir, overrides or [], data=data, step=checkpoint, num_ranks=ranks)
    if launched_rank() is not None or run.parallel.num_ranks == 1:
        _evaluate_here(run, ema=ema, quiet=quiet, as_json=as_json)
        return
    options = {"--data": data, "--checkpoint": checkpoint, "--ranks": ranks}
    arguments = [word for name, value in options.items() if value is not None for word in (name, str(value))]
    flags = {"--ema": ema, "--quiet": quiet, "--json": as_json}
    arguments += [name for name, is_set in flags.items() if is_set]
    sys.exit(
        run_local(
            ["evaluate", str(run_dir), *(overrides or []), *arguments], num_ranks=run.parallel.num_ranks
        )
    )


def _evaluate_here(run: "RunSpec", *, ema: bool, quiet: bool, as_json: bool) -> None:
    """Evaluate as one rank; rank 0 prints."""
    from meshwright.cli.evaluate_as_rank import as_rank
    from meshwright.train.evaluate_checkpoint import evaluate_weights

    found = as_rank(run.device, lambda: evaluate_weights(run, averaged=ema))
    if found is not None:
        _print(found, run, quiet=quiet, as_json=as_json)


def _print(found: "Evaluation", run: "RunSpec", *, quiet: bool, as_json: bool) -> None:
    from meshwright.observe.metrics import json_value

    where = run.data.path or "the generated corpus"
    if as_json:
        document = {
            "loss": json_value(found.loss),
            "perplexity": json_value(found.perplexity),
            "tokens": found.tokens,
            "sequences": found.sequences,
            "data": where,
            "checkpoint": str(found.checkpoint),
            "step": found.step,
            **({} if found.pairs is None else {"pairs": found.pairs._asdict()}),
        }
        typer.echo(json.dumps(document, indent=2))
        return
    if not quiet:
        at = f" (step {found.step})" if found.step is not None else ""
        print(f"{found.checkpoint}{at} on {where}, {found.sequences} sequences", file=sys.stderr)
    if found.pairs is not None:
        count, margin, accuracy = found.pairs
        rewards = f"reward margin {margin:.6g}, reward accuracy {accuracy:.4f}"
        typer.echo(f"loss {found.loss:.6f}, {rewards}, {count} pairs")
        return
    typer.echo(f"loss {found.loss:.6f}, perplexity {found.perplexity:.6g}, {found.tokens} tokens")
