"""What a launcher needs for a job: files with their text, and the commands that start it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from meshwright.configs.export import Exported
from meshwright.configs.export_accelerate import export_accelerate
from meshwright.configs.export_deepspeed import export_deepspeed
from meshwright.errors import LaunchError
from meshwright.launch.docker import docker_lines
from meshwright.launch.hosts import Host, hostfile_text, hosts_of, require_alive
from meshwright.launch.job import Job
from meshwright.launch.kubernetes import manifest_text
from meshwright.launch.mpi import mpirun_line
from meshwright.launch.other_frameworks import accelerate_lines, deepspeed_line
from meshwright.launch.slurm import sbatch_text
from meshwright.launch.torchrun import Rendezvous, ssh_script, torchrun_lines
from meshwright.spec.run import RunSpec
from meshwright.spec.text import dump_run
from meshwright.spec.yaml_text import dump_json, dump_yaml


@dataclass(frozen=True)
class Choices:
    """What the user chose beside the job itself."""

    hosts: tuple[Host, ...] = ()
    hosts_from: str = "--hosts"
    """Where the hosts are named, for errors."""
    rendezvous: Rendezvous = "static"
    kind: str = "jobset"
    """Kind of Kubernetes object."""
    queue: str | None = None
    volume: str | None = None
    must_answer: bool = False
    """Whether every host must answer before anything is written."""


@dataclass(frozen=True)
class Prepared:
    """Files by name, in the job's folder, and the commands to run."""

    files: dict[str, str]
    commands: list[str]
    notes: list[str] = field(default_factory=list[str])


Preparer = Callable[[Job, RunSpec, Choices], Prepared]


def prepare_job(via: str, job: Job, run: RunSpec, choices: Choices) -> Prepared:
    """The files and commands of one launcher, with the run file; nothing is written."""
    if via not in LAUNCHERS:
        raise LaunchError(f"there is no launcher {via!r}", where="--via", hint=", ".join(LAUNCHERS))
    prepared = LAUNCHERS[via](job, run, choices)
    return Prepared({"run.yaml": dump_run(run), **prepared.files}, prepared.commands, prepared.notes)


def write_files(folder: Path, files: dict[str, str]) -> list[Path]:
    """Write the files; LaunchError where the folder cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise LaunchError(
            f"the files cannot be written: {error.strerror}",
            where=str(error.filename or folder),
            hint="name another folder with -o",
        ) from None
    return [folder / name for name in files]


def _hosts(job: Job, choices: Choices) -> list[str]:
    names = hosts_of(job, list(choices.hosts), choices.hosts_from)
    if choices.must_answer:
        require_alive(names)
    return names


def _slurm(job: Job, run: RunSpec, choices: Choices) -> Prepared:
    notes: list[str] = []
    if job.seconds is None and job.time_limit_seconds is None:
        notes.append("the time of the run is not known: the limit is the longest of the site (--time, --on)")
    if job.num_jobs > 1:
        notes.append(f"the run needs about {job.num_jobs} time limits: it saves, requeues and goes on")
    return Prepared({"job.sbatch": sbatch_text(job)}, [f"sbatch {job.folder}/job.sbatch"], notes)


def _mpi(job: Job, run: RunSpec, choices: Choices) -> Prepared:
    hosts = _hosts(job, choices)
    line = mpirun_line(job, hosts, f"{job.folder}/hosts")
    return Prepared({"hosts": hostfile_text(job, hosts)}, [line], _host_notes(choices))


def _torchrun(job: Job, run: RunSpec, choices: Choices) -> Prepared:
    hosts = _hosts(job, choices)
    lines = torchrun_lines(job, hosts, rendezvous=choices.rendezvous)
    notes = _host_notes(choices)
    if choices.rendezvous == "c10d" and job.num_nodes > 1:
        notes.append("c10d numbers nodes in the order of their arrival: use static where order matters")
    return Prepared({"start.sh": ssh_script(job, hosts, lines)}, lines, notes)


def _kubernetes(job: Job, run: RunSpec, choices: Choices) -> Prepared:
    text = manifest_text(job, dump_run(run), kind=choices.kind, queue=choices.queue, volume=choices.volume)
    notes = [] if choices.volume else ["without --volume checkpoints are lost with the pods"]
    return Prepared({"job.yaml": text}, [f"kubectl create -f {job.folder}/job.yaml"], notes)


def _docker(job: Job, run: RunSpec, choices: Choices) -> Prepared:
    return Prepared({}, docker_lines(job, _hosts(job, choices)), _host_notes(choices))


def _accelerate(job: Job, run: RunSpec, choices: Choices) -> Prepared:
    exported = export_accelerate(run, num_nodes=job.num_nodes)
    lines = accelerate_lines(job, _hosts(job, choices), f"{job.folder}/accelerate.yaml")
    notes = [*_host_notes(choices), *_refused_notes(exported)]
    return Prepared({"accelerate.yaml": dump_yaml(exported.document)}, lines, notes)


def _deepspeed(job: Job, run: RunSpec, choices: Choices) -> Prepared:
    hosts = _hosts(job, choices)
    exported = export_deepspeed(run)
    files = {"ds_config.json": dump_json(exported.document), "hosts": hostfile_text(job, hosts)}
    line = deepspeed_line(job, hosts, f"{job.folder}/hosts")
    return Prepared(files, [line], [*_host_notes(choices), *_refused_notes(exported)])


def _refused_notes(exported: Exported) -> list[str]:
    """Parts of the layout that the other framework's file cannot say; the ranks read them from run.yaml."""
    refused = [entry.key for entry in exported.entries if entry.is_blocking]
    return [f"not in the config file, only in run.yaml: {', '.join(refused)}"] if refused else []


def _host_notes(choices: Choices) -> list[str]:
    return (
        []
        if choices.hosts
        else ["no hosts are named: node1, node2, ... stand for them (--hosts, --hostfile)"]
    )


LAUNCHERS: dict[str, Preparer] = {
    "slurm": _slurm,
    "mpi": _mpi,
    "torchrun": _torchrun,
    "kubernetes": _kubernetes,
    "docker": _docker,
    "accelerate": _accelerate,
    "deepspeed": _deepspeed,
}
