"""A job: one run on so many nodes of a site, as every launcher needs it."""

import math
import shlex
from dataclasses import dataclass

from meshwright.errors import LaunchError
from meshwright.launch.sites import SiteSpec

MARGIN = 1.25
"""Factor on the predicted time of a run."""
START_SECONDS = 600.0
"""Time for the start, the first compilation and the last checkpoint."""
_ROUNDED_MINUTES = 15


@dataclass(frozen=True)
class Job:
    """One run on nodes of a site. Paths are relative to the working directory, or absolute."""

    name: str
    run_file: str
    """The resolved run file that the ranks read."""
    run_dir: str
    folder: str
    """Where the files of the launcher and the logs are."""
    working_dir: str
    num_nodes: int
    ranks_per_node: int
    site: SiteSpec
    seconds: float | None = None
    """Predicted time of the run; None where it is not known."""
    time_limit_seconds: float | None = None
    """Time limit that the user sets, instead of the predicted one."""
    is_on_gpus: bool = True
    port: int = 29500
    python: str = "python"

    @property
    def num_ranks(self) -> int:
        """World size."""
        return self.num_nodes * self.ranks_per_node

    @property
    def train_words(self) -> list[str]:
        """The arguments of meshwright in every rank."""
        return ["train", self.run_file, "--dir", self.run_dir]

    @property
    def command(self) -> str:
        """What every rank runs, as a shell line."""
        return shlex.join([self.python, "-m", "meshwright", *self.train_words])

    @property
    def limit_minutes(self) -> int:
        """Time limit of one job in minutes: the prediction with a margin, at most what the site allows."""
        most = self.site.max_hours * 60
        if self.time_limit_seconds is not None:
            return max(1, math.ceil(self.time_limit_seconds / 60))
        if self.seconds is None:
            return math.floor(most)
        minutes = (MARGIN * self.seconds + START_SECONDS) / 60
        return math.floor(min(most, _ROUNDED_MINUTES * math.ceil(minutes / _ROUNDED_MINUTES)))

    @property
    def num_jobs(self) -> int:
        """Time limits that the run needs one after the other; 1 where its time is not known."""
        if self.seconds is None:
            return 1
        usable = max(60.0, self.limit_minutes * 60 - self.site.signal_seconds - START_SECONDS)
        return max(1, math.ceil(self.seconds / usable))


def nodes_of(num_ranks: int, gpus_per_node: int, num_nodes: int | None) -> tuple[int, int]:
    """(nodes, ranks per node) of a mesh; LaunchError where the ranks cannot be spread evenly."""
    nodes = num_nodes if num_nodes is not None else -(-num_ranks // gpus_per_node)
    if num_ranks % nodes == 0 and num_ranks // nodes <= gpus_per_node:
        return nodes, num_ranks // nodes
    fits = [n for n in range(1, num_ranks + 1) if num_ranks % n == 0 and num_ranks // n <= gpus_per_node]
    gpus = nodes * gpus_per_node
    raise LaunchError(
        f"the mesh has {num_ranks} ranks, and {nodes} nodes of {gpus_per_node} GPUs have {gpus}",
        where="--nodes" if num_nodes is not None else "parallel",
        hint=f"use {_shown(fits)} nodes, or another mesh",
    )


def _shown(counts: list[int]) -> str:
    return " or ".join(map(str, counts[:3]))


def clock(minutes: int) -> str:
    """1500 -> `1-01:00:00`, as SLURM writes times."""
    days, rest = divmod(minutes, 24 * 60)
    hours, minutes = divmod(rest, 60)
    return f"{days}-{hours:02}:{minutes:02}:00" if days else f"{hours:02}:{minutes:02}:00"
