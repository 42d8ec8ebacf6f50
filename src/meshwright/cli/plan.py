"""`meshwright plan`: which layout, will it fit, how fast, how long, and why."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.cli.check import AsJson, On

OBJECTIVES = ("speed", "cost", "memory")
PIPED_WIDTH = 140
MOST_OFFERS, MOST_REJECTED = 3, 6


def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A family (`meshwright models list`), a config.json or its folder, a YAML."
        ),
    ],
    pins: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="What is decided already: tp=8 recompute=none,full."),
    ] = None,
    on: On = "",
    seq: Annotated[str | None, typer.Option(help="Tokens per sequence, such as 8192.")] = None,
    batch_tokens: Annotated[str | None, typer.Option(help="Tokens per optimizer step, such as 4M.")] = None,
    tokens: Annotated[str | None, typer.Option(help="Tokens of the whole run, such as 300B.")] = None,
    precision: Annotated[
        str | None, typer.Option(help="bf16, fp16, tf32 or fp32; fp8: bf16 with linear layers in fp8.")
    ] = None,
    allow: Annotated[
        str | None,
        typer.Option(
            help="Changes of formats and optimizer the plan may make: fp8, bf16_weights, bf16_gradients, "
            "bf16_moments, stochastic_weights, adamw_8bit, adafactor, sgd, or all (but the last two)."
        ),
    ] = None,
    objective: Annotated[
        str, typer.Option(help="speed, cost (device-hours) or memory (headroom).")
    ] = "speed",
    deadline: Annotated[
        str | None, typer.Option(help="Be done by then, such as 30d, on as few devices as possible.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, max=50, help="How many layouts to show.")] = 5,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the run file here.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write an HTML report here.")] = None,
    price: Annotated[float | None, typer.Option(min=0, help="Money per device-hour, for --report.")] = None,
    as_json: AsJson = False,
) -> None:
    """Decide how to train a model on a cluster, and say why.

    Prices every layout of data, tensor, context, pipeline and expert parallelism that the rules allow,
    and writes the best as a run file. Exit code 3: nothing fits, with what would.
    """
    from meshwright.plan.draw.document import plan_document, run_file
    from meshwright.plan.explain.offers import offers
    from meshwright.plan.explain.reasons import explain
    from meshwright.plan.explain.rejected import rejected
    from meshwright.plan.explain.relax import plan_or_relax

    if price is not None and report is None:
        raise _error("--price has no effect without --report", "--price", "add --report plan.html")
    asked = _asked(
        model, pins or [], on=on, seq=seq, batch_tokens=batch_tokens, tokens=tokens, precision=precision,
        allow=allow, objective=objective, deadline=deadline,
    )  # fmt: skip
    question = _sized(asked, on, deadline) if deadline is not None else asked.question
    made = plan_or_relax(question, top=top)
    why, against, offered = explain(made), rejected(made.best), offers(made)
    if output is not None:
        _write(output, run_file(made, why))
    if report is not None:
        from meshwright.plan.draw.plan_report import report_html

        _write(
            report,
            report_html(made, tokens=asked.tokens, why=why, rejected=against, offers=offered, price=price),
        )
    if as_json:
        document = plan_document(
            made, tokens=asked.tokens, assumed=asked.assumed, why=why, rejected=against, offers=offered
        )
        typer.echo(json.dumps(document))
    else:
        _print(made, asked, why, [*(each.text for each in offered[:MOST_OFFERS]), *_words(against)])


def _error(fact: str, where: str, hint: str) -> Exception:
    from meshwright.errors import SpecError

    return SpecError(fact, where=where, hint=hint)


def _asked(model: str, pins: list[str], **said: Any) -> Any:
    """The question in numbers."""
    from meshwright.hardware import cluster_of
    from meshwright.plan.search.pins import parse_pins
    from meshwright.plan.search.request import Request, fill_request
    from meshwright.spec.violations import nearest
    from meshwright.units import parse_count

    if not said["on"]:
        raise _error("no cluster is given", "--on", "such as --on h100:8x16, --on leonardo:16 or --on h100:1")
    if said["objective"] not in OBJECTIVES:
        hint = f"{nearest(said['objective'], OBJECTIVES)} use {', '.join(OBJECTIVES)}".strip()
        raise _error(f"--objective is {said['objective']!r}", "--objective", hint)
    request = Request(
        model=model,
        cluster=cluster_of(said["on"]),
        pins=parse_pins(pins),
        sequence_length=_number("--seq", said["seq"], parse_count),
        batch_tokens=_number("--batch-tokens", said["batch_tokens"], parse_count),
        tokens=_number("--tokens", said["tokens"], parse_count),
        precision=said["precision"],
        allow=said["allow"],
        objective=said["objective"],
    )
    return fill_request(request)


def _number(option: str, text: str | None, parse: Callable[[object], object]) -> Any:
    if text is None:
        return None
    try:
        return parse(text)
    except ValueError as error:
        raise _error(str(error), option, "such as 8192, 4M or 300B") from None


def _sized(asked: Any, on: str, deadline: str) -> Any:
    """The question on the smallest cluster that meets the deadline."""
    from dataclasses import replace

    from meshwright.plan.search.sizing import size_for_deadline
    from meshwright.units import parse_seconds

    try:
        seconds = float(parse_seconds(deadline))  # pyright: ignore[reportArgumentType]
    except ValueError as error:
        raise _error(str(error), "--deadline", "such as 30d, 12h or 2w") from None
    if not 0 < seconds < 1e12:
        raise _error(f"--deadline is {deadline}", "--deadline", "such as 30d, 12h or 2w")
    question = asked.question
    if question.objective != "speed":
        fact = f"--objective {question.objective} with --deadline: the deadline is the objective"
        raise _error(fact, "--objective", "leave one of them out")
    open_ended = ":" not in on
    limit = question.cluster.max_nodes
    if open_ended and limit is not None:
        question, open_ended = replace(question, cluster=replace(question.cluster, num_nodes=limit)), False
    return size_for_deadline(question, tokens=asked.tokens, deadline_seconds=seconds, open_ended=open_ended)


def _write(path: Path, content: str) -> None:
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise _error(
            f"cannot write {path}: {error.strerror}", str(path), "name a file that can be written"
        ) from None
    typer.echo(f"wrote {path}", err=True)


def _words(rejected: list[Any]) -> list[str]:
    return [f"{each.change}: {each.reason}" for each in rejected[:MOST_REJECTED]]


def _print(made: Any, asked: Any, why: list[str], instead: list[str]) -> None:
    from rich.console import Console
    from rich.table import Table

    from meshwright.hardware.prediction_log import observed_line, read_pairs
    from meshwright.plan.draw.document import format_words, layout_words
    from meshwright.units import show_bytes, show_count, show_seconds

    question, best = made.question, made.best
    # A file or pipe has no width: give the table room for its layouts.
    console = Console() if sys.stdout.isatty() else Console(width=PIPED_WIDTH)
    data, cluster = question.run.data, question.cluster
    for filled in asked.assumed:
        typer.echo(f"assumed: {filled}", err=True)
    nodes = f"{cluster.num_nodes} node{'s' if cluster.num_nodes > 1 else ''} of {cluster.devices_per_node}"
    console.print(
        f"{question.run.model.family} on {cluster.num_devices} x {cluster.device.title} ({nodes}), "
        f"{show_count(asked.tokens)} tokens in batches of {show_count(data.batch_tokens)}; "
        f"{format_words(question.run)}",
        highlight=False,
    )
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("", "layout", "step", "tokens/s/GPU", "MFU", "memory", "duration", "GPU-hours"):
        left = name in ("", "layout")
        table.add_column(name, justify="left" if left else "right", no_wrap=not left, overflow="fold")
    for number, candidate in enumerate(made.top, start=1):
        table.add_row(
            str(number),
            layout_words(candidate.run),
            show_seconds(candidate.step_seconds),
            f"{candidate.tokens_per_second / candidate.num_ranks:,.0f}",
            f"{candidate.mfu:.1%}",
            show_bytes(candidate.device_bytes),
            show_seconds(candidate.days(asked.tokens) * 86400),
            _hours(candidate.device_hours(asked.tokens)),
        )
    console.print(table)
    low, high = best.interval_seconds
    console.print(
        f"\nstep time of 1: nine of ten measured between {show_seconds(low)} and {show_seconds(high)}",
        highlight=False,
    )
    console.print("\nWhy", style="bold")
    for sentence in why:
        console.print(f"- {sentence}", highlight=False)
    console.print("\nInstead", style="bold")
    for sentence in instead:
        console.print(f"- {sentence}", highlight=False)
    found = made.found
    observed = observed_line(read_pairs(cluster.device.name), cluster.device.title)
    if observed is not None:
        typer.echo(observed, err=True)
    typer.echo(
        f"priced {found.num_considered} layouts, {found.num_fitting} fit, in {made.search_seconds:.2f} s",
        err=True,
    )


def _hours(hours: float) -> str:
    from meshwright.units import show_count

    return show_count(round(hours)) if hours >= 100 else f"{hours:.2g}"
