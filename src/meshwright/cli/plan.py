"""`meshwright plan`: which layout, whether it fits, how fast, how long, and why."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from meshwright.cli.check import AsJson, On
from meshwright.cli.plan_options import (
    Allow,
    BatchTokens,
    Budget,
    Calibrate,
    Deadline,
    FineTune,
    Force,
    Model,
    Objective,
    Output,
    Pins,
    Precision,
    Price,
    Report,
    SequenceLength,
    Tokens,
    Top,
    Verify,
)

OBJECTIVES = ("speed", "cost", "memory")
PIPED_WIDTH = 140
MAX_GAINS, MAX_NEIGHBOURS = 3, 6


def plan(
    model: Model,
    pins: Pins = None,
    on: On = "",
    seq: SequenceLength = None,
    batch_tokens: BatchTokens = None,
    tokens: Tokens = None,
    precision: Precision = None,
    allow: Allow = None,
    finetune: FineTune = None,
    objective: Objective = "speed",
    deadline: Deadline = None,
    top: Top = 5,
    output: Output = None,
    report: Report = None,
    force: Force = False,
    price: Price = None,
    verify: Verify = None,
    calibrate: Calibrate = False,
    budget: Budget = None,
    as_json: AsJson = False,
) -> None:
    """Decide how to train a model on a cluster, and explain why.

    Prices every layout of data, tensor, context, pipeline and expert parallelism that the rules allow,
    and writes the best as a run file. Exit code 3: nothing fits, with what would.
    """
    from meshwright.api.external import external_of
    from meshwright.errors import PlanError
    from meshwright.plan.choose_finetune import fill_finetune
    from meshwright.plan.make_plan import make_plan

    if calibrate:
        from meshwright.cli.plan_calibrate import calibrate as run_calibration

        unused = {"--seq": seq, "--batch-tokens": batch_tokens, "--tokens": tokens, "--precision": precision}
        unused |= {"--allow": allow, "--deadline": deadline, "--report": report, "--price": price}
        unused |= {"--verify": verify, "--finetune": finetune}
        _reject_with("--calibrate", unused | {"--budget": budget})
        run_calibration([model, *(pins or [])], on=on, output=output, force=force, as_json=as_json)
        return
    if budget is not None:
        from meshwright.cli.plan_budget import plan_budget

        unused = {"--seq": seq, "--batch-tokens": batch_tokens, "--tokens": tokens, "--deadline": deadline}
        unused |= {"--allow": allow, "-o": output, "--report": report, "--verify": verify}
        _reject_with("--budget", unused | {"--finetune": finetune, "KEY=VALUE": pins or None})
        plan_budget(model, budget, on=on, precision=precision or "bf16", price=price, as_json=as_json)
        return
    if price is not None and report is None:
        raise _error("--price has no effect without --report", "--price", "add --report plan.html")
    _require_new(output, report, force=force)
    external = external_of(model)
    if external is not None:
        _reject_for_module({"-o": output, "--report": report, "--verify": verify, "--allow": allow})
        _reject_for_module({"--finetune": finetune})
    _reject_auto_with_deadline(finetune, deadline)
    options = {"on": on, "seq": seq, "batch_tokens": batch_tokens, "tokens": tokens, "precision": precision}
    options |= {"allow": allow, "objective": objective}
    filled = None
    try:
        filled, reasons = fill_finetune(
            finetune,
            pins or [],
            lambda kind, pinned: _filled_request(model, external, list(pinned), **options, finetune=kind),
        )
        for reason in reasons:
            typer.echo(f"finetune: {reason}", err=True)
        question = filled.question if deadline is None else _sized(filled, on, deadline)
        found = make_plan(question, top=max(top, verify or 1))
        found, verified = _verified(found, verify)
    except PlanError as error:
        if as_json:
            assumed = list(filled.assumed) if filled is not None else []
            typer.echo(json.dumps({"fits": False, "error": vars(error), "assumed": assumed}))
        raise
    files = {"output": output, "report": report}
    _deliver(found, filled, verified, **files, reasons=reasons, price=price, as_json=as_json)
    if external is not None and not as_json:
        typer.echo(f"\n{external.text}\ntrain it as a module: {external.fit_text(found.best.run)}")


def _reject_with(mode: str, unused: dict[str, Any]) -> None:
    """Options that have no effect beside one that replaces the plan."""
    for option, value in unused.items():
        if value is not None:
            raise _error(f"{option} has no effect with {mode}", option, "leave it out")


def _reject_auto_with_deadline(finetune: str | None, deadline: object) -> None:
    if finetune == "auto" and deadline is not None:
        fact = "--finetune auto with --deadline: which kind fits depends on the number of devices"
        raise _error(fact, "--finetune", "name the kind: full, lora or qlora")


def _reject_for_module(given: dict[str, Any]) -> None:
    for option, value in given.items():
        if value is not None:
            hint = "leave it out: the plan is printed, with the call of meshwright.fit"
            raise _error(f"{option} has no effect for a model that is trained as a module", option, hint)


def _verified(found: Any, count: int | None) -> tuple[Any, dict[str, Any] | None]:
    """The plan after the trace of its best layouts, where --verify asks for it."""
    if count is None:
        return found, None
    from meshwright.cli.plan_verify import verify as trace

    return trace(found, count)


def _deliver(
    found: Any,
    filled: Any,
    verified: dict[str, Any] | None,
    *,
    output: Path | None,
    report: Path | None,
    reasons: Sequence[str],
    price: float | None,
    as_json: bool,
) -> None:
    """Write the files that were asked for, and print the plan."""
    from meshwright.plan.draw.document import plan_document, run_file
    from meshwright.plan.explain.failures import failure_sentences
    from meshwright.plan.explain.gains import gains
    from meshwright.plan.explain.neighbours import neighbours
    from meshwright.plan.explain.reasons import explain
    from meshwright.plan.explain.storage import checkpoint_sentences

    views: dict[str, Any] = {
        "why": [*explain(found), *checkpoint_sentences(found.question), *failure_sentences(found)],
        "neighbours": neighbours(found),
        "gains": gains(found) if found.question.module_runtime is None else [],
    }
    # The text has the reasons for the kind of fine-tuning on stderr already.
    kept = {**views, "why": [*reasons, *views["why"]]}
    if output is not None:
        _write(output, run_file(found, kept["why"]))
    if report is not None:
        from meshwright.plan.draw.plan_report import report_html

        _write(report, report_html(found, tokens=filled.tokens, price=price, **kept))
    if as_json:
        document = plan_document(found, tokens=filled.tokens, assumed=filled.assumed, **kept)
        typer.echo(json.dumps(document if verified is None else {**document, "verified": verified}))
    else:
        _print(found, filled, verified, **views)


def _require_new(*files: Path | None, force: bool) -> None:
    """Refuse, before anything is searched, to overwrite a file without --force."""
    if force and not any(files):
        raise _error("--force has no effect without -o or --report", "--force", "leave it out")
    for file in files:
        if file is not None and file.exists() and not force:
            raise _error(
                f"{file} already exists", str(file), "name another file, or overwrite it with --force"
            )


def _error(fact: str, where: str, hint: str) -> Exception:
    from meshwright.errors import SpecError

    return SpecError(fact, where=where, hint=hint)


def _filled_request(model: str, external: Any | None, pins: list[str], **options: Any) -> Any:
    """The question in numbers, with defaults for everything that was not given."""
    from meshwright.hardware import cluster_of
    from meshwright.plan.external import fill_external
    from meshwright.plan.search.finetune import require_known
    from meshwright.plan.search.pins import parse_pins
    from meshwright.plan.search.request import Request, fill_request
    from meshwright.spec.violations import nearest
    from meshwright.units import parse_count

    on, objective = options["on"], options["objective"]
    if not on:
        raise _error("no cluster is given", "--on", "such as --on h100:8x16, --on leonardo:16 or --on h100:1")
    if objective not in OBJECTIVES:
        hint = f"{nearest(objective, OBJECTIVES)} use {', '.join(OBJECTIVES)}".strip()
        raise _error(f"--objective is {objective!r}", "--objective", hint)
    request = Request(
        model=model,
        cluster=cluster_of(on),
        pins=parse_pins(pins if external is None else external.with_pins(pins)),
        sequence_length=_number("--seq", options["seq"], parse_count),
        batch_tokens=_number("--batch-tokens", options["batch_tokens"], parse_count),
        tokens=_number("--tokens", options["tokens"], parse_count),
        precision=options["precision"],
        allow=options["allow"],
        objective=objective,
        finetune=require_known(options.get("finetune")),
    )
    filled = fill_request(request) if external is None else fill_external(external, request)
    return replace(filled, assumed=(*_thousands(options["seq"], request.sequence_length), *filled.assumed))


def _thousands(text: str | None, length: int | None) -> list[str]:
    """What `--seq 8k` was taken for: sequences usually are powers of two."""
    if text is None or length is None or not text.strip().lower().endswith("k") or length % 1024 == 0:
        return []
    return [f"--seq {text} is {length:,} tokens; {text.strip()[:-1]}Ki is {length * 1024 // 1000:,}"]


def _number(option: str, text: str | None, parse: Callable[[object], object]) -> Any:
    if text is None:
        return None
    try:
        return parse(text)
    except ValueError as error:
        raise _error(str(error), option, "such as 8192, 4M or 300B") from None


def _sized(filled: Any, on: str, deadline: str) -> Any:
    """The question on the smallest cluster that meets the deadline."""
    from meshwright.plan.search.sizing import size_for_deadline
    from meshwright.units import parse_seconds

    try:
        seconds = float(parse_seconds(deadline))  # pyright: ignore[reportArgumentType]
    except ValueError as error:
        raise _error(str(error), "--deadline", "such as 30d, 12h or 2w") from None
    if not 0 < seconds < 1e12:
        raise _error(f"--deadline is {deadline}", "--deadline", "such as 30d, 12h or 2w")
    question = filled.question
    if question.objective != "speed":
        fact = f"--objective {question.objective} with --deadline: the deadline is the objective"
        raise _error(fact, "--objective", "leave one of them out")
    open_ended = ":" not in on
    limit = question.cluster.max_nodes
    if open_ended and limit is not None:
        question, open_ended = replace(question, cluster=replace(question.cluster, num_nodes=limit)), False
    return size_for_deadline(question, tokens=filled.tokens, deadline_seconds=seconds, open_ended=open_ended)


def _write(path: Path, content: str) -> None:
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise _error(
            f"cannot write {path}: {error.strerror}", str(path), "name a file that can be written"
        ) from None
    typer.echo(f"wrote {path}", err=True)


def _print(
    found: Any,
    filled: Any,
    verified: dict[str, Any] | None,
    *,
    why: list[str],
    neighbours: Sequence[Any],
    gains: Sequence[Any],
) -> None:
    """The plan for people: the table of layouts and the reasons on stdout, the rest on stderr."""
    from rich.console import Console

    from meshwright.hardware.prediction_log import observed_line, read_pairs
    from meshwright.units import show_range

    # A file or a pipe has no width; the layouts need this one.
    console = Console() if sys.stdout.isatty() else Console(width=PIPED_WIDTH)
    device, result = found.question.cluster.device, found.result
    for value in filled.assumed:
        typer.echo(f"assumed: {value}", err=True)
    console.print(_headline(found, filled.tokens), highlight=False)
    console.print(_layout_table(found, filled.tokens))
    interval = show_range(*found.best.interval_seconds)
    console.print(f"\nstep time of 1: {interval}; {found.best.interval_source}", highlight=False)
    if verified is not None:
        from meshwright.cli.plan_verify import verified_lines

        console.print("\nTraced, in the order before", style="bold")
        for line in verified_lines(verified):
            console.print(line, highlight=False)
    instead = [gain.text for gain in gains[:MAX_GAINS]]
    instead += [f"{each.change}: {each.reason}" for each in neighbours[:MAX_NEIGHBOURS]]
    for title, sentences in (("Why", why), ("Instead", instead)):
        console.print(f"\n{title}", style="bold")
        for sentence in sentences:
            console.print(f"- {sentence}", highlight=False)
    observed = observed_line(read_pairs(device.name), device.title)
    if observed is not None:
        typer.echo(observed, err=True)
    typer.echo(f"priced {result.num_considered} layouts in {found.search_seconds:.2f} s", err=True)


def _headline(found: Any, tokens: int) -> str:
    from meshwright.plan.draw.document import format_text
    from meshwright.units import show_count

    run, cluster = found.question.run, found.question.cluster
    nodes = f"{cluster.num_nodes} node{'s' if cluster.num_nodes > 1 else ''} of {cluster.devices_per_node}"
    return (
        f"{run.model.family} on {cluster.num_devices} x {cluster.device.title} ({nodes}), "
        f"{show_count(tokens)} tokens in batches of {show_count(run.data.batch_tokens)}; {format_text(run)}"
    )


def _layout_table(found: Any, tokens: int) -> Any:
    from rich.table import Table

    from meshwright.plan.search.candidate import layout_text
    from meshwright.units import show_bytes, show_seconds

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("", "layout", "step", "tokens/s/GPU", "MFU", "memory", "duration", "GPU-hours"):
        left = name in ("", "layout")
        table.add_column(name, justify="left" if left else "right", no_wrap=not left, overflow="fold")
    for number, candidate in enumerate(found.top, start=1):
        table.add_row(
            str(number),
            layout_text(candidate.run),
            show_seconds(candidate.step_seconds),
            f"{candidate.tokens_per_second / candidate.num_ranks:,.0f}",
            f"{candidate.mfu:.1%}",
            show_bytes(candidate.device_bytes),
            show_seconds(candidate.days(tokens) * 86400),
            hours_text(candidate.device_hours(tokens)),
        )
    return table


def hours_text(hours: float) -> str:
    """Device-hours of a run as the table shows them."""
    from meshwright.units import show_count

    return show_count(round(hours)) if hours >= 10 else f"{hours:.2g}"
