"""`meshwright rehearse`: be any rank of a run on this machine, before anything is queued."""

import json
from typing import Annotated, Any

import typer

from meshwright.cli.check import AsJson, Overrides, Run
from meshwright.cli.proof import tell_proof
from meshwright.errors import SpecError


def rehearse(
    run: Run,
    overrides: Overrides = None,
    rank: Annotated[
        int | None,
        typer.Option("--rank", help="One rank; by default one of the first, a middle and the last stage."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to trace; the last one counts.")] = 2,
    on: Annotated[str, typer.Option("--on", help="The device it must fit, such as h100:8x16.")] = "",
    imbalance: Annotated[
        float, typer.Option(min=1.0, help="Rows that the experts of this rank get, over the mean.")
    ] = 1.0,
    whole: Annotated[
        bool, typer.Option("--whole", help="Trace every layer and micro-batch, also those that repeat.")
    ] = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="Run the rank for real on this machine's GPU too.")
    ] = False,
    proof: Annotated[bool, typer.Option(help="Prove the numbers on a small world of this machine.")] = True,
    full: Annotated[
        bool, typer.Option("--full", help="As many small worlds as it takes to run every two axes together.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Build one rank of the full world on this machine, and prove the numbers on a small one.

    The very step of the run is traced on the CPU: what each rank allocates, at its fullest phase and by
    item, what it sends and what it computes. No GPU is needed. Exit code 3: it does not fit the device
    named by --on.

    Then the run shrinks until local ranks can train it: fewer layers, narrow widths, every axis at its
    smallest degree, the same schedule and rules. Three steps in float64 must equal one device: loss, every
    gradient, weights and optimizer states. Where there is a CUDA card, NCCL ranks on it are proved too.
    Exit code 4: something differs, and the worst parameter is named.
    """
    from meshwright.hardware.catalogue import parse_cluster
    from meshwright.spec.text import read_run

    loaded = read_run(run, overrides or [])
    loaded.require_valid()
    cluster = parse_cluster(on) if on else None
    _require_sense(loaded.run, rank, imbalance, measure=measure, proof=proof, full=full)
    reports = _traced(loaded.run, rank, steps, imbalance, is_full=whole)
    measured = _measured(loaded.run, reports, imbalance) if measure else []
    if not as_json:
        _print(reports, measured, cluster)
    proved = list(tell_proof(loaded.run, full=full, quiet=as_json)) if proof else []
    if as_json:
        typer.echo(json.dumps({**_document(reports, measured, cluster), "proof": proved}))
    if cluster is not None:
        _require_fit(loaded.run, reports, cluster)


def _require_sense(
    run: Any, rank: int | None, imbalance: float, *, measure: bool, proof: bool, full: bool
) -> None:
    """What the options ask for is refused before seconds of tracing, not after."""
    from meshwright.rehearse.measure import measuring_device
    from meshwright.rehearse.world import require_rank

    if rank is not None:
        require_rank(run.parallel, rank)
    if measure:
        measuring_device(run)
    if imbalance != 1.0 and run.model.moe is None:
        raise SpecError(
            f"--imbalance {imbalance:g} has no effect: {run.model.family} has no experts",
            where="--imbalance",
            hint="leave it out",
        )
    if full and not proof:
        raise SpecError(
            "--full has no effect with --no-proof: it is about the worlds of the proof",
            where="--full",
            hint="leave one of the two out",
        )


def _traced(run: Any, rank: int | None, steps: int, imbalance: float, *, is_full: bool) -> list[Any]:
    from meshwright.rehearse.parallel_traces import rehearse_ranks
    from meshwright.rehearse.rank_report import ranks_to_rehearse

    ranks = ranks_to_rehearse(run.parallel) if rank is None else [rank]
    named = ", ".join(map(str, ranks))
    typer.echo(f"tracing rank{'s' * (len(ranks) > 1)} {named} of {run.parallel.num_ranks}", err=True)
    return rehearse_ranks(
        run,
        ranks,
        num_steps=steps,
        imbalance=imbalance,
        is_full=is_full,
        tell=lambda words: typer.echo(f"  {words}", err=True),
    )


def _measured(run: Any, reports: list[Any], imbalance: float) -> list[Any]:
    from meshwright.rehearse.measure import log_prediction, measure_rank

    measured = [measure_rank(run, report.rank, imbalance=imbalance) for report in reports]
    line = log_prediction(run, measured)
    if line is not None:
        typer.echo(line, err=True)
    return measured


def _print(reports: list[Any], measured: list[Any], cluster: Any) -> None:
    from rich.console import Console

    from meshwright.rehearse.tables import draw_collectives, draw_measured, draw_memory, peak_lines

    console = Console()
    console.print(draw_memory(reports, cluster, width=console.width))
    console.print()
    for line in peak_lines(reports):
        console.print(line, highlight=False)
    console.print()
    console.print(draw_collectives(reports))
    if measured:
        console.print()
        console.print(draw_measured(reports, measured))


def _document(reports: list[Any], measured: list[Any], cluster: Any) -> dict[str, Any]:
    from dataclasses import asdict

    ranks = [{**asdict(report), "allocated_bytes": report.allocated_bytes} for report in reports]
    document: dict[str, Any] = {"ranks": ranks}
    if measured:
        document["measured"] = [asdict(one) for one in measured]
    if cluster is not None:
        document["capacity_bytes"] = cluster.device.memory_bytes
    return document


def _require_fit(run: Any, reports: list[Any], cluster: Any) -> None:
    from meshwright.rehearse.fits_device import require_fit

    require_fit(run, reports, cluster)
