"""`meshwright bench`: measure this machine."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.cli.bench_scaling import require_room, scaling
from meshwright.cli.check import AsJson, Overrides, Run
from meshwright.cli.main import new_app

if TYPE_CHECKING:
    from meshwright.spec import RunSpec

app = new_app(
    help="Measure this machine on random data, after a warm-up, by device events; median and spread."
)

DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
SecondsOption = Annotated[
    float, typer.Option("--seconds", min=0.001, max=60, help="Seconds that each measurement is repeated.")
]
FolderOption = Annotated[
    Path | None, typer.Option("-o", "--output", help="Write JSON, a Markdown page and charts to this folder.")
]
_DEVICES = ("auto", "cpu", "cuda")
GEMM_SECTIONS = ("squares", "layers", "widths", "vocabulary")


@app.command()
def gemm(
    section: Annotated[
        str, typer.Option(help="squares, layers, widths, vocabulary, or all of them.")
    ] = "all",
    device: DeviceOption = "auto",
    seconds: SecondsOption = 0.2,
    as_json: AsJson = False,
    output: FolderOption = None,
) -> None:
    """Matmuls of real layers by precision, the cost of odd widths, and of an unpadded vocabulary."""
    from meshwright.bench.gemm import layers, squares, vocabulary_sizes, width_sweep
    from meshwright.bench.measurement_report import width_bars

    wanted = GEMM_SECTIONS if section == "all" else (_one_of(section, GEMM_SECTIONS, "--section"),)
    makers = {"squares": squares, "layers": layers, "widths": width_sweep, "vocabulary": vocabulary_sizes}
    with _measurement("gemm", device, as_json=as_json, output=output) as bench:
        for name in wanted:
            bench.section(name, makers[name](bench.device, seconds=seconds))
        if "widths" in wanted:
            bench.log(width_bars(bench.sections["widths"]))


@app.command()
def attention(
    device: DeviceOption = "auto",
    seconds: SecondsOption = 0.2,
    as_json: AsJson = False,
    output: FolderOption = None,
) -> None:
    """Causal attention by kernel, head width and sequence length, and torch's default kernel."""
    from meshwright.bench.attention import attention_rows

    with _measurement("attention", device, as_json=as_json, output=output) as bench:
        bench.section("attention", attention_rows(bench.device, seconds=seconds))


@app.command()
def copy(
    device: DeviceOption = "auto",
    seconds: SecondsOption = 0.3,
    as_json: AsJson = False,
    output: FolderOption = None,
) -> None:
    """Bandwidth of device memory, and of the link to the host with pinned and pageable memory."""
    from meshwright.bench.copy import copy_rows

    with _measurement("copy", device, as_json=as_json, output=output) as bench:
        bench.section("copies", copy_rows(bench.device, seconds=seconds))


@app.command()
def comm(
    run: Annotated[
        str | None,
        typer.Argument(metavar="[RUN]", help="A run: the axes of its mesh are measured, all groups at once."),
    ] = None,
    overrides: Overrides = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            min=2,
            max=1024,
            help="Ranks to start here; under a launcher, its ranks are used.",
            show_default="2, or those of the run",
        ),
    ] = None,
    size: Annotated[
        list[str] | None,
        typer.Option(help="Size of a message, such as 256MB; may be repeated.", show_default="a sweep"),
    ] = None,
    device: DeviceOption = "auto",
    seconds: SecondsOption = 0.2,
    as_json: AsJson = False,
    output: FolderOption = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing; for use with -o.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Start more ranks than cores without asking.")] = False,
) -> None:
    """Collectives by message size, and by number of ranks and nodes or by axis of a mesh: bus bandwidth.

    `hardware probe --comm FOLDER` takes the results of several nodes into a profile.
    """
    from meshwright.launch.launched import launched_rank
    from meshwright.launch.local import run_local
    from meshwright.spec.text import load_run

    sizes = tuple(_bytes(one) for one in size or ())
    spec = load_run(run, overrides or []) if run is not None else None
    if launched_rank() is None:
        num_ranks = ranks or (spec.parallel.num_ranks if spec else 2)
        require_room(num_ranks, yes=yes)
        words = ["bench", "comm", *([run] if run else []), *(overrides or [])]
        words += ["--device", device, "--seconds", str(seconds)]
        words += [word for one in size or () for word in ("--size", one)]
        words += ["--json"] if as_json else []
        words += ["-o", str(output)] if output else []
        words += ["--quiet"] if quiet else []
        sys.exit(run_local(words, num_ranks=num_ranks))
    _comm_here(spec, sizes, device, seconds, as_json=as_json, output=output, quiet=quiet)


def _comm_here(
    spec: "RunSpec | None",
    sizes: tuple[int, ...],
    device: str,
    seconds: float,
    *,
    as_json: bool,
    output: Path | None,
    quiet: bool,
) -> None:
    """Measure as one of the ranks; the first one prints."""
    from meshwright.bench.comm import axis_rows, comm_rows
    from meshwright.launch.launched import launched_rank
    from meshwright.mesh import build_mesh, join_world, leave_world

    launched = launched_rank()
    world = join_world(device, launch=spec.launch if spec else None)
    here = launched.num_local_ranks if launched else None
    try:
        if spec is None:
            name, rows = "collectives", comm_rows(world, seconds=seconds, sizes=sizes, ranks_per_node=here)
        else:
            mesh = build_mesh(spec.parallel, world)
            rows = axis_rows(mesh, world, seconds=seconds, sizes=sizes, ranks_per_node=here)
            name = "axes"
        if world.is_first:
            with _measurement("comm", device, as_json=as_json, output=output, quiet=quiet) as bench:
                bench.section(name, rows)
        else:
            for _ in rows:
                pass
    finally:
        leave_world()


app.command()(scaling)


@app.command()
def data(
    path: Annotated[
        Path | None, typer.Argument(metavar="PATH", help="A packed dataset; random tokens by default.")
    ] = None,
    device: DeviceOption = "auto",
    seconds: SecondsOption = 1.0,
    as_json: AsJson = False,
    output: FolderOption = None,
) -> None:
    """Tokens per second that the data loader brings to the device."""
    from meshwright.bench.storage import data_rows

    with _measurement("data", device, as_json=as_json, output=output) as bench:
        bench.section("data", data_rows(bench.device, seconds=seconds, path=path))


@app.command()
def checkpoint(
    folder: Annotated[
        Path, typer.Option("--dir", exists=True, file_okay=False, help="Folder to write to and clean up.")
    ] = Path("."),
    size: Annotated[str, typer.Option(help="Size of the checkpoint, such as 1GiB.")] = "256MiB",
    device: DeviceOption = "auto",
    as_json: AsJson = False,
    output: FolderOption = None,
) -> None:
    """Bytes per second of saving, verifying and loading a checkpoint."""
    from meshwright.bench.storage import checkpoint_rows
    from meshwright.mesh import join_world, leave_world

    with _measurement("checkpoint", device, as_json=as_json, output=output) as bench:
        join_world(device)
        try:
            bench.section("checkpoint", checkpoint_rows(bench.device, folder=folder, sizes=(_bytes(size),)))
        finally:
            leave_world()


@app.command()
def step(
    run: Run,
    overrides: Overrides = None,
    seconds: Annotated[float, typer.Option(min=0.01, help="Length of the timed window.")] = 5.0,
    warmup_steps: Annotated[int, typer.Option(min=1, help="Steps before the timed window.")] = 4,
    profile: Annotated[bool, typer.Option("--profile", help="Also print time by class of kernel.")] = False,
    documents: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Separate documents of so many tokens on average, with a heavy tail; joined by default.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Training steps of a run file on one device, on random tokens: time, rates, memory, attention kernel.

    The step is that of `train`. `python -m bench.step` of the source tree compares it with other frameworks.
    """
    from meshwright.bench.step import measure_step, on_random_tokens
    from meshwright.spec.text import load_run

    spec = load_run(run, overrides or [])
    _require_one_rank(spec)
    with on_random_tokens(spec, mean_tokens=documents) as prepared:
        result = measure_step(prepared, seconds=seconds, warmup_steps=warmup_steps)
    if as_json:
        typer.echo(json.dumps(result))
        return
    typer.echo(_step_text(result))
    if profile:
        from meshwright.bench.kernel_time import KernelBudget, show_budget

        total = sum(result["kernel_seconds"].values())
        typer.echo(show_budget(KernelBudget(total, result["kernel_seconds"], result["largest_kernels"])))


def _require_one_rank(spec: Any) -> None:
    from meshwright.errors import SpecError

    if spec.parallel.num_ranks > 1:
        raise SpecError(
            f"the run has {spec.parallel.num_ranks} ranks, and bench step measures one device",
            where="parallel",
            hint="override the layout, such as parallel.dp_shard=1, or train the run and read its metrics",
        )


def _step_text(result: dict[str, Any]) -> str:
    from meshwright.units import show_bytes, show_seconds

    spread = f"{show_seconds(result['p10_seconds'])} to {show_seconds(result['p90_seconds'])}"
    facts = {
        "device": f"{result['device']}, torch {result['torch']}",
        "step": f"median {show_seconds(result['step_seconds'])}, p10 to p90 {spread}",
        "tokens": f"{result['tokens_per_second']:.0f} per second",
        "model": f"{result['teraflops']:.4g} TFLOP/s",
        "loss": f"{result['first_loss']:.4f} in the first step, {result['last_loss']:.4f} after the window",
        "first step": f"{show_seconds(result['compile_seconds'])} longer than the median",
    }
    if "allocated_bytes" in result:
        allocated, reserved = show_bytes(result["allocated_bytes"]), show_bytes(result["reserved_bytes"])
        facts["memory"] = f"{allocated} allocated, {reserved} reserved"
    if result["attention_kernels"]:
        facts["attention"] = result["attention_kernels"][0]
    if "clock_mhz" in result:
        facts["clock"] = f"{result['clock_mhz']:.0f} MHz, {result['power_watts']:.0f} W"
    return "\n".join(f"{name:<11} {text}" for name, text in facts.items())


def _one_of(name: str, known: tuple[str, ...], where: str) -> str:
    from meshwright.errors import SpecError
    from meshwright.spec.violations import nearest

    if name in known:
        return name
    raise SpecError(
        f"{name!r} is unknown", where=where, hint=nearest(name, known) or f"known: {', '.join(known)}"
    )


def _bytes(text: str) -> int:
    from meshwright.errors import SpecError
    from meshwright.units import parse_bytes

    try:
        size = parse_bytes(text)
    except ValueError as error:
        raise SpecError(str(error), where="--size", hint="such as 256MiB") from None
    if not isinstance(size, int) or size < 1024:
        raise SpecError(f"{text} is too small for a checkpoint", where="--size", hint="use at least 1KiB")
    return size


def _measurement(bench: str, device: str, *, as_json: bool, output: Path | None, quiet: bool = False) -> Any:
    """A measurement on the given device; with --json its progress goes to stderr."""
    from meshwright.bench.measurement import Measurement
    from meshwright.mesh import choose_device

    def log(text: str) -> None:
        if not quiet:
            typer.echo(text, err=as_json)

    chosen = choose_device(_one_of(device, _DEVICES, "--device"), 0)
    return Measurement(bench, chosen, log=log, as_json=as_json, output=output)
