"""`meshwright rehearse`: trace any rank of a run on this machine, and prove the run on a few local ranks."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.cli.check import AsJson, On, Overrides, Quiet, Run
from meshwright.errors import SpecError

Log = Callable[[str], None]


def rehearse(
    run: Run,
    overrides: Overrides = None,
    on: On = "",
    rank: Annotated[
        int | None,
        typer.Option("--rank", help="Trace this rank; by default one of the first, a middle and last stage."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to trace; the report is of the last one.")] = 2,
    imbalance: Annotated[
        float, typer.Option(min=1.0, help="Rows that this rank's experts receive, over the mean.")
    ] = 1.0,
    extrapolate: Annotated[
        bool, typer.Option(help="Trace long steps with fewer layers and micro-batches, and extrapolate.")
    ] = True,
    measure: Annotated[
        bool, typer.Option("--measure", help="Also run the rank's step on this machine's GPU.")
    ] = False,
    directory: Annotated[
        Path | None,
        typer.Option("--dir", help="Write what --measure found here, for `plan --calibrate`; one rank only."),
    ] = None,
    proof: Annotated[bool, typer.Option(help="Prove the run on local ranks after the trace.")] = True,
    all_pairs: Annotated[
        bool,
        typer.Option(
            "--all-pairs", help="Prove in as many small worlds as it takes to run every pair of axes."
        ),
    ] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Trace a rank of the full run on this machine, then prove the run on a few local ranks.

    The trace runs the step of `train` on fake tensors, as one rank of the full world. It reports peak memory
    by item, the bytes that the allocator reserves, collectives and FLOPs. It needs no GPU. Exit code 3: the
    rank does not fit the device named by --on.

    The proof shrinks the run to at most 8 local ranks: fewer layers, smaller widths, every axis at its
    smallest degree, the same schedule and settings. Three steps in float64 must equal one device: loss, every
    gradient, weights and optimizer states. With a CUDA device the proof also runs on NCCL ranks. Exit code 4:
    something differs, and the worst parameter is named.
    """
    from meshwright.hardware.catalogue import parse_cluster
    from meshwright.spec.text import read_run

    loaded = read_run(run, overrides or [])
    loaded.require_valid()
    cluster = parse_cluster(on) if on else None
    _check_options(loaded.run, rank, imbalance, measure=measure, proof=proof, all_pairs=all_pairs)
    if directory is not None and not measure:
        fact = "--dir has no effect without --measure"
        raise SpecError(fact, where="--dir", hint="add --measure, or leave it out")
    log = _no_log if quiet else _log
    reports = _trace(loaded.run, rank, steps, imbalance, extrapolate=extrapolate, log=log)
    measured = _measure(loaded.run, reports, imbalance, log) if measure else []
    if directory is not None:
        from meshwright.rehearse.measure import write_measured

        write_measured(loaded.run, measured, directory)
    if not as_json:
        _print_reports(reports, measured, cluster)
    proved = list(_prove(loaded.run, all_pairs=all_pairs, as_json=as_json, log=log)) if proof else []
    if as_json:
        typer.echo(json.dumps({**_document(reports, measured, cluster), "proof": proved}))
    if cluster is not None:
        _require_fit(loaded.run, reports, cluster)


def _check_options(
    run: Any, rank: int | None, imbalance: float, *, measure: bool, proof: bool, all_pairs: bool
) -> None:
    """Refuse options that cannot work before the trace, which takes seconds."""
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
    if all_pairs and not proof:
        raise SpecError(
            "--all-pairs has no effect with --no-proof: it is an option of the proof",
            where="--all-pairs",
            hint="leave one of the two out",
        )


def _trace(
    run: Any, rank: int | None, steps: int, imbalance: float, *, extrapolate: bool, log: Log
) -> list[Any]:
    from meshwright.rehearse.parallel_traces import rehearse_ranks
    from meshwright.rehearse.rank_report import ranks_to_rehearse

    ranks = ranks_to_rehearse(run.parallel) if rank is None else [rank]
    named = ", ".join(map(str, ranks))
    log(f"tracing rank{'s' * (len(ranks) > 1)} {named} of {run.parallel.num_ranks}")
    return rehearse_ranks(
        run,
        ranks,
        num_steps=steps,
        imbalance=imbalance,
        extrapolate=extrapolate,
        log=lambda line: log(f"  {line}"),
    )


def _measure(run: Any, reports: list[Any], imbalance: float, log: Log) -> list[Any]:
    from meshwright.rehearse.measure import log_prediction, measure_rank

    measured = [measure_rank(run, report.rank, imbalance=imbalance) for report in reports]
    line = log_prediction(run, measured)
    if line is not None:
        log(line)
    return measured


def _print_reports(reports: list[Any], measured: list[Any], cluster: Any) -> None:
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


def _prove(run: Any, *, all_pairs: bool, as_json: bool, log: Log) -> Iterator[dict[str, Any]]:
    """Prove the run on local ranks; one document per verdict. A failed proof is raised, exit code 4."""
    import torch

    from meshwright.rehearse.prove import layout_text, prove, require_proved
    from meshwright.rehearse.shrink import shrink

    smalls = shrink(run, all_pairs=all_pairs)
    has_cuda = torch.cuda.is_available() and run.device != "cpu"
    for small in smalls:
        log(f"proving {layout_text(small.run.parallel)} in float64 against one device")
        if small.changes:
            log(f"  smaller or left out: {', '.join(small.changes)}")
    for verdict in prove(smalls, ranks=("cpu", "cuda") if has_cuda else ("cpu",)):
        require_proved(verdict)
        if not as_json:
            typer.echo(f"proved: {verdict.line}")
        yield _proof_document(verdict)


def _proof_document(verdict: Any) -> dict[str, Any]:
    name, error = verdict.worst
    return {
        "layout": verdict.shrunken.run.parallel.model_dump(mode="json"),
        "ranks": verdict.ranks,
        "left_out": list(verdict.shrunken.changes),
        "optimizers": list(verdict.optimizers),
        "num_gradients": verdict.num_gradients,
        "worst_error": error,
        "worst": name,
        "tolerance": verdict.tolerance,
        "seconds": verdict.seconds,
        "line": verdict.line,
    }


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


def _log(line: str) -> None:
    """One line on stderr, at once."""
    typer.echo(line, err=True)


def _no_log(line: str) -> None:
    """Prints nothing (--quiet)."""
    del line
