"""`meshwright train`: run a run file here, with as many ranks as it asks for."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.check import Overrides, Run


def train(
    run: Run,
    overrides: Overrides = None,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="The run directory; by default runs/<name>.")
    ] = None,
    stop_after: Annotated[
        int | None,
        typer.Option(
            metavar="STEP", min=1, help="Save and stop at this step; the same command without it goes on."
        ),
    ] = None,
) -> None:
    """Run a run file: starts local ranks, or joins those that a launcher started.

    The run directory gets run.yaml, metrics.jsonl, events, and checkpoints. Started again with the same
    directory, a run goes on from its last checkpoint; another run is refused there. Ctrl-C saves and
    stops (exit 130).
    """
    from meshwright.launch.local import is_rank, run_local
    from meshwright.spec.text import read_run

    loaded = read_run(run, overrides or [])
    loaded.require_valid()
    spec = loaded.run
    run_dir = directory or Path("runs") / spec.name
    if spec.parallel.num_ranks > 1 and not is_rank():
        arguments = ["train", run, *(overrides or []), "--dir", str(run_dir)]
        arguments += ["--stop-after", str(stop_after)] if stop_after else []
        sys.exit(run_local(arguments, num_ranks=spec.parallel.num_ranks))
    from meshwright.train.session import run_rank

    sys.exit(run_rank(spec, run_dir, stop_after=stop_after))
