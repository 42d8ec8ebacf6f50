"""`meshwright launch`: start a run on a cluster, and follow it."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from meshwright.cli.check import AsJson, On, Overrides, Run
from meshwright.cli.main import new_app


class _Launch(TyperGroup):
    """`launch RUN` is short for `launch write RUN`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in {*self.commands, "-h", "--help"}:
            args = ["write", *args]
        return super().parse_args(ctx, args)


app = new_app(
    cls=_Launch,
    help="Write, and submit, what a launcher needs to start a run; follow the job.\n\n"
    "`launch RUN --via slurm` is short for `launch write RUN --via slurm`.",
)
Job = Annotated[
    str,
    typer.Argument(metavar="JOB", help="The folder that `launch --submit` wrote, or a SLURM job's number."),
]


@app.command()
def write(
    run: Run,
    overrides: Overrides = None,
    via: Annotated[
        str,
        typer.Option(
            metavar="LAUNCHER", help="slurm, mpi, torchrun, kubernetes, docker, accelerate or deepspeed."
        ),
    ] = "slurm",
    site: Annotated[
        str, typer.Option(help="generic, leonardo, lisa, berzelius, or a TOML file of your own.")
    ] = "generic",
    on: On = "",
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Nodes.", show_default="as few as hold the ranks")
    ] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option(min=1, help="GPUs of a node.", show_default="the site's")
    ] = None,
    partition: Annotated[str | None, typer.Option(help="SLURM partition.")] = None,
    account: Annotated[str | None, typer.Option(help="Account that is charged.")] = None,
    qos: Annotated[str | None, typer.Option(help="SLURM quality of service.")] = None,
    time: Annotated[
        str | None, typer.Option(help="Time limit, such as 4h.", show_default="predicted, with a margin")
    ] = None,
    image: Annotated[str | None, typer.Option(help="Container image.")] = None,
    container: Annotated[
        str | None, typer.Option(metavar="KIND", help="pyxis, enroot, apptainer or docker.")
    ] = None,
    module: Annotated[list[str] | None, typer.Option(help="A module to load; may be repeated.")] = None,
    hosts: Annotated[str, typer.Option(help="Host names, separated by commas.")] = "",
    hostfile: Annotated[Path | None, typer.Option(help="A file with lines `host slots=4`.")] = None,
    check_hosts: Annotated[
        bool, typer.Option("--check-hosts", help="Refuse hosts that do not answer on their ssh port.")
    ] = False,
    rendezvous: Annotated[str, typer.Option(help="torchrun: static or c10d.")] = "static",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port on the first host.")] = 29500,
    kind: Annotated[str, typer.Option(help="Kubernetes: jobset, trainjob or pytorchjob.")] = "jobset",
    queue: Annotated[str | None, typer.Option(help="Kubernetes: queue of Kueue.")] = None,
    volume: Annotated[
        str | None, typer.Option(help="Kubernetes: claim of the volume for data and runs.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Folder for the files.", show_default="launch/<name>"),
    ] = None,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="The run directory.", show_default="runs/<name>")
    ] = None,
    submit: Annotated[bool, typer.Option("--submit", help="Submit the job (slurm, kubernetes).")] = False,
    as_json: AsJson = False,
) -> None:
    """Write the files that a launcher needs and print the command that starts the run.

    For SLURM the time limit follows from the predicted time of the run where the site or --on names a known
    cluster. The run is asked to save before the limit, and the job goes back into the queue.
    """
    from meshwright.launch.files import prepare_job, write_files
    from meshwright.spec.text import load_run

    spec = load_run(run, overrides or [])
    changes = {"partition": partition, "account": account, "qos": qos, "gpus_per_node": gpus_per_node}
    changes |= {"modules": module, "container": _container(image, container, via)}
    job = _job(
        spec, _site(site, changes), on, nodes=nodes, time=time, folder=output, run_dir=directory, port=port
    )
    choices = _choices(hosts, hostfile, rendezvous, kind=kind, queue=queue, volume=volume, check=check_hosts)
    prepared = prepare_job(via, job, spec, choices)
    _require_submittable(via, submit=submit)
    folder = Path(job.folder)
    written = write_files(folder, prepared.files)
    for note in prepared.notes:
        typer.echo(f"note: {note}", err=True)
    submitted = _submit(via, folder) if submit else None
    if as_json:
        typer.echo(json.dumps(_document(via, job, written, prepared.commands, submitted)))
        return
    typer.echo(f"written: {', '.join(map(str, written))}", err=True)
    typer.echo(submitted.job_id if submitted else "\n".join(prepared.commands))


@app.command()
def status(job: Job) -> None:
    """Print the state of a submitted job, as its scheduler says it."""
    from meshwright.launch.submit import read_submitted, status_text

    typer.echo(status_text(read_submitted(job)))


@app.command()
def logs(
    job: Job, lines: Annotated[int, typer.Option("-n", "--lines", min=1, help="The last so many lines.")] = 50
) -> None:
    """Print the last lines of a submitted job's output."""
    from meshwright.launch.submit import log_text, read_submitted

    typer.echo(log_text(read_submitted(job), lines))


def _container(image: str | None, kind: str | None, via: str) -> dict[str, Any] | None:
    """The container of the command line; docker and Kubernetes need no kind."""
    from meshwright.errors import LaunchError

    if image is None and kind is not None:
        raise LaunchError(
            "--container without --image", where="--container", hint="name the image with --image"
        )
    if image is None:
        return None
    return {"kind": kind or ("pyxis" if via == "slurm" else "docker"), "image": image}


def _site(name: str, changes: dict[str, Any]) -> Any:
    from meshwright.launch.sites import changed_site, find_site

    return changed_site(find_site(name), changes)


def _job(
    spec: Any,
    site: Any,
    on: str,
    *,
    nodes: int | None,
    time: str | None,
    folder: Path | None,
    run_dir: Path | None,
    port: int,
) -> Any:
    from meshwright.launch.job import Job as JobOfRun
    from meshwright.launch.job import nodes_of

    num_nodes, per_node = nodes_of(spec.parallel.num_ranks, site.gpus_per_node, nodes)
    place = folder or Path("launch") / spec.name
    return JobOfRun(
        name=spec.name,
        run_file=str(place / "run.yaml"),
        run_dir=str(run_dir or Path("runs") / spec.name),
        folder=str(place),
        working_dir=str(Path.cwd()),
        num_nodes=num_nodes,
        ranks_per_node=per_node,
        site=site,
        seconds=_predicted_seconds(spec, on or site.cluster, num_nodes, per_node),
        time_limit_seconds=_seconds(time),
        is_on_gpus=spec.device != "cpu",
        port=port,
        python="python" if site.container is not None else sys.executable,
    )


def _seconds(text: str | None) -> float | None:
    from meshwright.errors import LaunchError
    from meshwright.units import parse_seconds

    if text is None:
        return None
    try:
        return float(str(parse_seconds(text)))
    except ValueError as error:
        raise LaunchError(str(error), where="--time", hint="such as 4h or 90min") from None


def _predicted_seconds(spec: Any, cluster: str | None, num_nodes: int, per_node: int) -> float | None:
    """Predicted time of all steps; None where no known cluster is named."""
    from dataclasses import replace

    from meshwright.hardware import cluster_of
    from meshwright.plan.predict import predict_run

    if cluster is None:
        return None
    found = replace(cluster_of(cluster), num_nodes=num_nodes, devices_per_node=per_node)
    prediction = predict_run(spec, found)
    if not prediction.fits:
        typer.echo(
            f"note: the run does not fit {found.device.title}; `meshwright predict` tells more", err=True
        )
    return prediction.step_seconds * spec.schedule.num_steps


def _choices(
    hosts: str,
    hostfile: Path | None,
    rendezvous: str,
    *,
    kind: str,
    queue: str | None,
    volume: str | None,
    check: bool,
) -> Any:
    from meshwright.errors import LaunchError
    from meshwright.launch.files import Choices
    from meshwright.launch.hosts import parse_hosts, read_hosts

    if hosts and hostfile is not None:
        raise LaunchError(
            "hosts are named twice", where="--hosts", hint="use --hosts or --hostfile, one of them"
        )
    if rendezvous not in ("static", "c10d"):
        raise LaunchError(
            f"there is no rendezvous {rendezvous!r}", where="--rendezvous", hint="static or c10d"
        )
    named = read_hosts(hostfile) if hostfile is not None else parse_hosts(hosts) if hosts else []
    return Choices(
        hosts=tuple(named),
        hosts_from=str(hostfile) if hostfile is not None else "--hosts",
        rendezvous=rendezvous,
        kind=kind,
        queue=queue,
        volume=volume,
        must_answer=check,
    )


def _require_submittable(via: str, *, submit: bool) -> None:
    from meshwright.errors import LaunchError

    if submit and via not in ("slurm", "kubernetes"):
        hint = "run the printed command on the first node"
        raise LaunchError(f"{via} has no queue to submit to", where="--submit", hint=hint)


def _submit(via: str, folder: Path) -> Any:
    from meshwright.launch.submit import submit_kubernetes, submit_slurm

    if via == "slurm":
        return submit_slurm(folder / "job.sbatch", folder)
    return submit_kubernetes(folder / "job.yaml", folder)


def _document(via: str, job: Any, written: list[Path], commands: list[str], submitted: Any) -> dict[str, Any]:
    return {
        "via": via,
        "nodes": job.num_nodes,
        "ranks_per_node": job.ranks_per_node,
        "limit_minutes": job.limit_minutes,
        "predicted_seconds": job.seconds,
        "files": [str(path) for path in written],
        "commands": commands,
        "job_id": submitted.job_id if submitted else None,
    }
