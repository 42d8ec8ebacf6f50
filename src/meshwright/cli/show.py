"""`meshwright show`: pictures of a pipeline schedule, of the ranks of a mesh, of memory and of magnitudes."""

from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.cli.check import AsJson, Overrides, Run
from meshwright.cli.completion_values import complete_cluster, complete_run
from meshwright.cli.main import new_app

app = new_app(help="Draw a pipeline timeline, a rank map, memory or magnitudes.")


@app.callback()
def show() -> None:
    """Draw a pipeline timeline, a rank map, memory or magnitudes."""


@app.command()
def schedule(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN", help="A run file to take the schedule from.", autocompletion=complete_run
        ),
    ] = None,
    overrides: Overrides = None,
    name: Annotated[
        str | None, typer.Option("--schedule", help="gpipe, 1f1b (the default), interleaved_1f1b, ...")
    ] = None,
    pp: Annotated[int | None, typer.Option(help="Pipeline ranks (4).")] = None,
    microbatches: Annotated[int | None, typer.Option(help="Micro-batches of one step (8).")] = None,
    virtual_stages: Annotated[
        int | None, typer.Option(help="Stages per rank; by default what the schedule needs.")
    ] = None,
    forward: Annotated[
        str, typer.Option(help="Time of a stage's forward; 1,1,1,1.5 gives each stage its own.")
    ] = "1",
    backward: Annotated[
        str, typer.Option(help="Time of a stage's full backward, one value or one per stage.")
    ] = "2",
    weight: Annotated[
        str, typer.Option(help="The weight gradient's part of --backward, which some schedules delay.")
    ] = "1",
    hop: Annotated[float, typer.Option(min=0, help="Time of a message to another rank.")] = 0.0,
    svg: Annotated[Path | None, typer.Option(help="Write the picture to this SVG file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Draw the order in which pipeline ranks run forwards and backwards, and what each rank keeps.

    Stages are equal, and a full backward takes two forwards, unless --forward, --backward and --weight say
    otherwise.
    """
    from rich.console import Console

    from meshwright.plan.draw.schedule import draw_svg, draw_text, picture

    options = {
        "--schedule": name,
        "--pp": pp,
        "--virtual-stages": virtual_stages,
        "--microbatches": microbatches,
    }
    chosen, shape = _from_run(run, overrides or [], options) if run else _from_options(options)
    costs = _costs(forward, backward, weight, hop, shape.num_stages)
    drawn = picture(_possible(chosen, shape), shape, costs)
    if svg is not None:
        _write(svg, draw_svg(drawn))
    if as_json:
        typer.echo(_json(drawn))
        return
    console = Console()
    console.print(draw_text(drawn, width=console.width), soft_wrap=True)


@app.command()
def memory(
    run: Run,
    overrides: Overrides = None,
    on: Annotated[
        str,
        typer.Option(
            "--on",
            help="The cluster or device, such as h100:8 or leonardo:16.",
            autocompletion=complete_cluster,
        ),
    ] = "",
    svg: Annotated[Path | None, typer.Option(help="Write the picture to this SVG file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Draw the memory of the first, a middle and the last pipeline rank, item by item."""
    import json

    from rich.console import Console

    from meshwright.errors import SpecError
    from meshwright.hardware import cluster_of
    from meshwright.plan.draw.memory import memory_chart, memory_table, stage_items
    from meshwright.plan.search.candidate import candidate_of
    from meshwright.spec.text import load_run

    if not on:
        raise SpecError("no device is given", where="--on", hint="such as --on h100:8 or --on leonardo:16")
    candidate = candidate_of(load_run(run, overrides or []), cluster_of(on))
    if svg is not None:
        _write(svg, memory_chart(candidate).document())
    if as_json:
        document = {
            "fits": candidate.fits,
            "device_bytes": candidate.device_bytes,
            "stages": stage_items(candidate),
            "host": stage_items(candidate, on_host=True),
        }
        typer.echo(json.dumps(document))
    else:
        Console().print(memory_table(candidate))


@app.command()
def mesh(
    run: Run,
    overrides: Overrides = None,
    per_node: Annotated[int, typer.Option(min=1, max=64, help="Devices on one node.")] = 8,
    svg: Annotated[Path | None, typer.Option(help="Write the picture to this SVG file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Draw the coordinates of every rank on every axis, and its node; tp is innermost."""
    import json

    from meshwright.plan.draw.rank_map import RankMap, coordinates, draw_svg, draw_text
    from meshwright.spec.text import load_run

    parallel = load_run(run, overrides or []).parallel
    drawn = RankMap(parallel, min(per_node, parallel.num_ranks))
    if svg is not None:
        _write(svg, draw_svg(drawn))
    if as_json:
        places = [
            {"rank": rank, "node": rank // drawn.ranks_per_node, **coordinates(parallel, rank)}
            for rank in range(parallel.num_ranks)
        ]
        typer.echo(json.dumps({"ranks_per_node": drawn.ranks_per_node, "ranks": places}))
        return
    typer.echo(draw_text(drawn))


@app.command()
def histograms(
    run_dir: Annotated[Path, typer.Argument(metavar="DIR", help="A run directory, such as runs/demo.")],
    kind: Annotated[
        str | None, typer.Option(help="activation, output_gradient or weight_gradient; by default all.")
    ] = None,
    matmul: Annotated[str | None, typer.Option(help="Such as mlp.down; by default all.")] = None,
    step: Annotated[int | None, typer.Option(help="The step; by default the newest.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Write the pictures to this SVG file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Draw the magnitudes of activations and gradients by layer, and how they fit into fp8.

    The run must have been trained with observe.histograms. "< e4m3" is the share of elements that are not
    zero, and would be in that format without a scale; "> e4m3" is above its largest number; "< scaled" would
    become zero with one scale for the tensor.
    """
    import json

    from rich.console import Console

    from meshwright.observe.draw_histograms import draw_svg, draw_text, histogram_pictures, to_json

    pictures = histogram_pictures(run_dir, kind=kind, matmul=matmul, step=step)
    if svg is not None:
        _write(svg, draw_svg(pictures))
    if as_json:
        typer.echo(json.dumps([to_json(one) for one in pictures]))
        return
    console = Console()
    for picture in pictures:
        console.print(draw_text(picture))
        console.print()


MAX_ACTIONS = 200_000


def _from_options(options: dict[str, Any]) -> tuple[str, Any]:
    from meshwright.errors import SpecError
    from meshwright.plan.workload.schedules import ONE_STAGE, SCHEDULES, PipelineShape
    from meshwright.spec.violations import nearest

    given = {option: value for option, value in options.items() if value is not None}
    name = given.pop("--schedule", "1f1b")
    if name not in SCHEDULES:
        hint = f"{nearest(name, SCHEDULES)} known: {', '.join(SCHEDULES)}".strip()
        raise SpecError(f"there is no schedule {name!r}", where="--schedule", hint=hint)
    for option, value in given.items():
        if value < 1:
            raise SpecError(f"{option} is {value}", where=option, hint="use at least 1")
    stages = given.get("--virtual-stages", 1 if name in ONE_STAGE else 2)
    return name, PipelineShape(given.get("--pp", 4), stages, given.get("--microbatches", 8))


def _from_run(run: str, overrides: list[str], options: dict[str, Any]) -> tuple[str, Any]:
    from meshwright.errors import SpecError
    from meshwright.plan.workload.schedules import PipelineShape
    from meshwright.spec.text import load_run

    for option, value in options.items():
        if value is not None:
            fact = f"{option} has no effect: the schedule is taken from {run}"
            raise SpecError(fact, where=option, hint="give a run file or options, not both")
    spec = load_run(run, overrides)
    parallel = spec.parallel
    if parallel.pp == 1:
        raise SpecError(
            f"{run} has no pipeline: pp is 1", where="parallel.pp", hint="name a schedule with --schedule"
        )
    return parallel.schedule, PipelineShape(parallel.pp, parallel.virtual_stages, spec.accumulation)


def _costs(forward: str, backward: str, weight: str, hop: float, num_stages: int) -> Any:
    """The times of the options; SpecError where one is no time, or --weight is not below --backward."""
    from meshwright.errors import SpecError
    from meshwright.plan.draw.schedule import Costs

    given = {"--forward": forward, "--backward": backward, "--weight": weight}
    costs = Costs(*(_times(option, text, num_stages) for option, text in given.items()), hop=hop)
    stages = costs.of_stages(num_stages)
    if (stages.backward_input <= 0).any():
        raise SpecError(
            f"--weight={weight} leaves no time for the input gradient of --backward={backward}",
            where="--weight",
            hint="it is a part of --backward: use a smaller one",
        )
    return costs


def _times(option: str, text: str, num_stages: int) -> tuple[float, ...]:
    from meshwright.errors import SpecError

    hint = f"one number above 0, or {num_stages} with commas between, one for each stage"
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise SpecError(f"{option}={text} has something that is no number", where=option, hint=hint) from None
    if len(found) not in (1, num_stages) or not all(0 < one < 1e6 for one in found):
        raise SpecError(f"{option}={text} does not fit {num_stages} stages", where=option, hint=hint)
    return found


def _possible(name: Any, shape: Any) -> Any:
    """The schedule; SpecError where it cannot run on this shape or is too large to draw."""
    from meshwright.errors import SpecError
    from meshwright.plan.workload.schedules import problem

    reason = problem(name, shape)
    if reason is not None:
        raise SpecError(reason, where="--schedule", hint="change --microbatches, --pp or --virtual-stages")
    if shape.num_stages * shape.num_microbatches > MAX_ACTIONS:
        raise SpecError(
            f"{shape.num_stages} stages x {shape.num_microbatches} micro-batches are too many to draw",
            where="--microbatches",
            hint=f"their product can be {MAX_ACTIONS} at most",
        )
    return name


def _write(path: Path, content: str) -> None:
    from meshwright.errors import SpecError

    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        fact, hint = f"cannot write {path}: {error.strerror}", "name a file that can be written"
        raise SpecError(fact, where=str(path), hint=hint) from None
    typer.echo(f"wrote {path}", err=True)


def _json(drawn: Any) -> str:
    import json
    from dataclasses import asdict

    timeline = drawn.timeline
    document = {
        "schedule": drawn.schedule,
        **asdict(drawn.shape),
        "bubble_overhead": timeline.bubble_overhead,
        "bubble_fraction": timeline.bubble_fraction,
        "in_flight_microbatches": [stages / drawn.shape.virtual_stages for stages in drawn.in_flight],
        "ranks": [
            [
                [timed.action.kind, timed.action.stage, timed.action.microbatch, timed.start, timed.end]
                for timed in rank
            ]
            for rank in timeline.ranks
        ],
    }
    return json.dumps(document)
