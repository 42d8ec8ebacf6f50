"""`meshwright predict`: memory, step time and MFU of the layout of a run file, or of a table of layouts."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.cli.check import AsJson, On, Overrides
from meshwright.cli.completion_values import complete_run


def predict(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="A run file, the name of a recipe, or the config of a Hugging Face model outside of our "
            "families.",
            autocompletion=complete_run,
        ),
    ] = None,
    overrides: Overrides = None,
    on: On = "",
    profile: Annotated[
        Path | None, typer.Option(help="Measurements of the machine, preferred over its data sheet.")
    ] = None,
    table: Annotated[
        Path | None, typer.Option(help="A CSV with the columns of published_runs.csv, instead of a run file.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the table with its predictions here.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Predict memory, step time and MFU of a run file on a cluster.

    Exit code 3: the run does not fit the device. A row of a table that cannot be predicted has
    the reason in its `error` column; the other rows are predicted.
    """
    from meshwright.errors import SpecError

    if (run is None) == (table is None):
        raise SpecError(
            "give a run file or --table, one of them", where="predict", hint="predict run.yaml --on h100:8x2"
        )
    if table is not None:
        _reject({"--on": on, "--profile": profile, "KEY=VALUE": overrides}, "a table names its own hardware")
        _predict_table(table, output, as_json=as_json)
        return
    _reject({"-o": output}, "only a table is written to a file")
    if not on:
        raise SpecError(
            "no cluster is named", where="--on", hint="for example --on h100:8x16 or --on leonardo:16"
        )
    _predict_run(str(run), overrides or [], on, profile, as_json=as_json)


def _reject(given: dict[str, Any], why: str) -> None:
    from meshwright.errors import SpecError

    for name, value in given.items():
        if value:
            raise SpecError(f"{name} has no effect here: {why}", where=name)


def _predict_table(table: Path, output: Path | None, *, as_json: bool) -> None:
    from meshwright.published.predict import predict_table

    text, cells = predict_table(table)
    if output is not None:
        output.write_text(text, encoding="utf-8")
    failed = sum(bool(row["error"]) for row in cells)
    if as_json:
        typer.echo(json.dumps({"rows": cells, "predicted": len(cells) - failed, "not_predicted": failed}))
        return
    if output is None:
        typer.echo(text, nl=False)
    typer.echo(f"{len(cells) - failed} rows predicted, {failed} not (see the error column)", err=True)


def _predict_run(name: str, overrides: list[str], on: str, profile: Path | None, *, as_json: bool) -> None:
    from meshwright.errors import EXIT_NO_FIT
    from meshwright.hardware import cluster_of, read_profile
    from meshwright.hardware.prediction_log import observed_line, read_pairs
    from meshwright.plan.explain.fixes import fixes_text, run_fixes

    cluster = cluster_of(on)
    if profile is not None:
        cluster = read_profile(profile).applied_to(cluster)
    run, external, found = _prediction(name, overrides, cluster)
    typer.echo(json.dumps(_document(found)) if as_json else _text(found, cluster.device.title))
    for value in found.assumed:
        typer.echo(f"assumed: {value}", err=True)
    observed = observed_line(read_pairs(cluster.device.name), cluster.device.title)
    if observed is not None:
        typer.echo(observed, err=True)
    if external is not None and not as_json:
        typer.echo(f"\n{external.text}\ntrain it as a module: {external.fit_text(run)}")
    if not found.fits:
        fixes = fixes_text(run_fixes(run, cluster), cluster) if external is None else ""
        typer.echo(fixes or f"`meshwright plan {name} --on {on}` finds a layout that fits", err=True)
        raise typer.Exit(EXIT_NO_FIT)


def _prediction(name: str, overrides: list[str], cluster: Any) -> tuple[Any, Any | None, Any]:
    """The run, the traced model where it is none of our families, and what is predicted."""
    from meshwright.api.external import external_of
    from meshwright.plan.external import predict_external
    from meshwright.plan.predict import predict_run
    from meshwright.spec.text import read_run

    external = external_of(name)
    if external is not None:
        run, found = predict_external(external, overrides, cluster)
        return run, external, found
    run = read_run(name, overrides).require_valid()
    return run, None, predict_run(run, cluster)


def _document(found: Any) -> dict[str, Any]:
    return {
        "step_seconds": found.step_seconds,
        "step_seconds_low": found.low_seconds,
        "step_seconds_high": found.high_seconds,
        "interval_source": found.interval_source,
        "seconds_by_item": dict(found.seconds_by_item),
        "tokens_per_second_per_device": found.tokens_per_second_per_device,
        "tflops_per_device": found.tflops_per_device,
        "mfu": found.mfu,
        "flop_convention": "strict: 6 per matmul parameter, causal attention once, recompute never",
        "assumed": list(found.assumed),
        "fits": found.fits,
        "capacity_bytes": found.capacity_bytes,
        "memory_margin": found.memory_margin and found.memory_margin._asdict(),
        "memory": [
            {
                "stage": stage.stage,
                "items": dict(stage.items),
                "allocated_bytes": stage.allocated_bytes,
                "reserved_bytes": stage.reserved_bytes,
                "device_bytes": stage.device_bytes,
                "host_items": dict(stage.host_items),
            }
            for stage in found.stages
        ],
    }


def _text(found: Any, device: str) -> str:
    lines = [*_time_lines(found), *_memory_lines(found), "", *_fit_lines(found, device)]
    return "\n".join(lines)


def _time_lines(found: Any) -> Iterator[str]:
    from meshwright.units import show_count, show_range, show_seconds

    width = max(found.high_seconds / found.step_seconds - 1.0, 0.0)
    interval = show_range(found.low_seconds, found.high_seconds)
    per_device = found.tokens_per_second_per_device
    yield f"step      {show_seconds(found.step_seconds)}  (90%: {interval}, {width:+.0%})"
    yield f"          {found.interval_source}"
    in_all = show_count(per_device * found.num_devices)
    yield f"tokens/s  {show_count(per_device)} per device, {in_all} in all"
    tflops = f"{found.tflops_per_device:.3g} per device, MFU {found.mfu:.1%}"
    yield f"TFLOP/s   {tflops} (strict: causal attention once)"
    yield ""
    yield "where the step goes"
    for name, seconds in sorted(found.seconds_by_item.items(), key=lambda item: -item[1]):
        if seconds > 0.001 * found.step_seconds:
            yield f"  {name:<14} {show_seconds(seconds):>9}  {seconds / found.step_seconds:6.1%}"


def _memory_lines(found: Any) -> Iterator[str]:
    from meshwright.units import show_bytes

    for stage in found.stages:
        yield ""
        yield f"memory of {stage.stage} pipeline rank" if len(found.stages) > 1 else "memory of a rank"
        for name, size in sorted(stage.items.items(), key=lambda item: -item[1]):
            yield f"  {name:<14} {show_bytes(size):>10}"
        yield (
            f"  allocated {show_bytes(stage.allocated_bytes)}, reserved {show_bytes(stage.reserved_bytes)}, "
            f"on the device {show_bytes(stage.device_bytes)}"
        )
        for name, size in stage.host_items.items():
            yield f"  {name:<14} {show_bytes(size):>10}  in host memory"


def _fit_lines(found: Any, device: str) -> Iterator[str]:
    from meshwright.units import show_bytes

    verdict = "fits" if found.fits else "does NOT fit"
    excess = "" if found.fits else f": {show_bytes(found.excess_bytes)} too much"
    yield f"{verdict} {device} ({show_bytes(found.capacity_bytes)}){excess}"
    if found.memory_margin is not None:
        doubt = "; too close to tell, so let `rehearse` trace it" if found.is_uncertain else ""
        yield f"allocated memory {found.memory_margin.words}{doubt}"
