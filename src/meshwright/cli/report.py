"""`meshwright report`: one HTML file about a run."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    run_dir: Annotated[Path, typer.Argument(metavar="DIR", help="A run directory, such as runs/demo.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The file to write.", show_default="DIR/report.html")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="The run's figures as one JSON document on stdout.")
    ] = False,
) -> None:
    """Write one self-contained HTML file about a run, and print where.

    Curves of loss, gradient norm, learning rate, throughput, step time and memory, the headline
    figures, events, sample text and the resolved run. The file loads nothing from a network, so it can
    be sent to anyone. A run that is still in progress can be reported too; files that its directory
    does not have are named as absent.
    """
    from meshwright.observe.run_report import write_report

    written = write_report(run_dir, output)
    typer.echo(written.to_json() if as_json else str(written.path))
