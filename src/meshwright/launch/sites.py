"""Profiles of sites: partition, account, GPUs and cores per node, container, modules."""

import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from meshwright.errors import LaunchError, read_trouble
from meshwright.spec.base import NonNegative, Positive, PositiveNumber, Spec
from meshwright.spec.violations import nearest

ContainerKind = Literal["pyxis", "enroot", "apptainer", "docker"]
GpuRequest = Literal["gpus-per-node", "gres", "none"]
_BUILT_IN = Path(__file__).with_name("sites.toml")


class ContainerSpec(Spec):
    """The container that ranks run in."""

    kind: ContainerKind
    """pyxis is an option of srun; enroot and apptainer are commands before the program; docker is for
    `--via docker` and `--via kubernetes`."""
    image: str
    """Name or file of the image, such as nvidia+pytorch+26.01-py3.sqsh (enroot, pyxis) or pytorch.sif."""
    mounts: tuple[str, ...] = ()
    """Folders of the host that are mounted, FROM:TO; the working directory is always mounted."""


class SiteSpec(Spec):
    """What a launcher needs to know about a site."""

    title: str = ""
    """One line about the site."""
    cluster: str | None = None
    """Its name in the hardware catalogue, from which the planner estimates the time."""
    gpus_per_node: Positive = 8
    """GPUs of one node; one rank runs on each."""
    cpus_per_gpu: Positive = 8
    """Cores of one rank."""
    partition: str | None = None
    """SLURM partition."""
    account: str | None = None
    """Account that is charged."""
    qos: str | None = None
    """Quality of service."""
    constraint: str | None = None
    """Features that nodes must have."""
    gpu_request: GpuRequest = "gpus-per-node"
    """How GPUs are requested: --gpus-per-node=N, --gres=gpu:N, or not at all."""
    memory: str | None = None
    """Host memory per node as SLURM writes it, such as 494000 (MB) or 0 (all of it)."""
    max_hours: PositiveNumber = 24.0
    """Longest time of one job; a longer run is requeued."""
    signal_seconds: NonNegative = 180
    """The run is asked to save and stop so many seconds before the time limit."""
    is_exclusive: bool = False
    """Request whole nodes."""
    modules: tuple[str, ...] = ()
    """Modules that the job loads."""
    setup: tuple[str, ...] = ()
    """Shell lines before the run starts, such as `source venv/bin/activate`."""
    environment: dict[str, str] = Field(default_factory=dict[str, str])
    """Variables of every rank, such as NCCL_SOCKET_IFNAME."""
    container: ContainerSpec | None = None
    """The container that ranks run in; null runs on the host."""
    sbatch_options: tuple[str, ...] = ()
    """Further options of sbatch, such as --reservation=course."""
    srun_options: tuple[str, ...] = ()
    """Further options of srun, such as --mpi=none."""
    sources: dict[str, str] = Field(default_factory=dict[str, str])
    """Where values come from, by key; what nobody has published is marked as to be filled in by the site."""


def built_in_sites() -> dict[str, SiteSpec]:
    """The ready profiles by name."""
    tables = tomllib.loads(_BUILT_IN.read_text(encoding="utf-8"))
    return {name: SiteSpec.model_validate(table) for name, table in tables.items()}


def find_site(name: str) -> SiteSpec:
    """The profile of this name, or of a TOML file."""
    sites = built_in_sites()
    if name in sites:
        return sites[name]
    if not name.endswith(".toml"):
        hint = nearest(name, sites) or f"known are {', '.join(sites)}, or a TOML file"
        raise LaunchError(f"there is no site {name!r}", where="--site", hint=hint)
    return _site_of_file(Path(name))


def _site_of_file(path: Path) -> SiteSpec:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise LaunchError(f"the profile cannot be read: {read_trouble(error)}", where=str(path)) from None
    return validated_site(table, str(path))


def validated_site(table: dict[str, Any], where: str) -> SiteSpec:
    """The profile of a table; LaunchError for the first key that is wrong."""
    try:
        return SiteSpec.model_validate(table)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        hint = nearest(key, SiteSpec.model_fields) if first["type"] == "extra_forbidden" else ""
        fact = (
            f"{key} is not a key of a profile"
            if first["type"] == "extra_forbidden"
            else f"{key}: {first['msg']}"
        )
        raise LaunchError(fact, where=where, hint=hint or _all_keys()) from None


def changed_site(site: SiteSpec, changes: dict[str, Any]) -> SiteSpec:
    """The profile with the values that are not None replaced."""
    given = {name: value for name, value in changes.items() if value is not None}
    return validated_site({**site.model_dump(), **given}, "command line")


def _all_keys() -> str:
    return f"its keys are {', '.join(SiteSpec.model_fields)}"
