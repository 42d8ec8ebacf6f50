"""Submitting a job, and asking where it is."""

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from meshwright.errors import LaunchError, RunError, read_trouble

RECORD = "job.json"
"""The file beside a job's other files that says what was submitted."""
_SECONDS = 60
_STATE = re.compile(r"JobState=(\S+)")
_REASON = re.compile(r"Reason=(\S+)")


@dataclass(frozen=True)
class Submitted:
    """A job that a scheduler has accepted."""

    via: str
    job_id: str
    folder: str
    log: str
    """Path of its output, where the scheduler writes a file."""


def submit_slurm(script: Path, folder: Path) -> Submitted:
    """Submit an sbatch file. LaunchError without sbatch, RunError with its message where it is refused."""
    out = _run(["sbatch", "--parsable", str(script)], "sbatch")
    job_id = out.strip().split(";")[0]
    submitted = Submitted("slurm", job_id, str(folder), str(folder / f"{job_id}.log"))
    return _recorded(submitted, folder)


def submit_kubernetes(manifest: Path, folder: Path) -> Submitted:
    """Create the objects of a manifest with kubectl."""
    lines = _run(["kubectl", "create", "-f", str(manifest), "-o", "name"], "kubectl").split()
    return _recorded(Submitted("kubernetes", lines[-1] if lines else "", str(folder), ""), folder)


def _recorded(submitted: Submitted, folder: Path) -> Submitted:
    (folder / RECORD).write_text(json.dumps(asdict(submitted), indent=1) + "\n", encoding="utf-8")
    return submitted


def read_submitted(name: str) -> Submitted:
    """The job of a folder that `launch` wrote, or a SLURM job by its number."""
    if name.isdecimal():
        return Submitted("slurm", name, "", "")
    record = Path(name) / RECORD
    try:
        return Submitted(**json.loads(record.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise LaunchError(
            f"no job was submitted from here: {read_trouble(error)}",
            where=str(record),
            hint="name the folder of `launch --submit`, or the number of a job",
        ) from None


def status_text(job: Submitted) -> str:
    """`4711 RUNNING`: the scheduler's own words; ended jobs that it has forgotten are GONE."""
    if job.via == "kubernetes":
        return _run(["kubectl", "get", job.job_id], "kubectl").rstrip()
    try:
        out = _run(["scontrol", "show", "job", job.job_id], "scontrol")
    except RunError as error:
        if "Invalid job id" in error.fact:
            return f"{job.job_id} GONE: SLURM no longer knows it, so it has ended"
        raise
    state, reason = _STATE.search(out), _REASON.search(out)
    shown = f" ({reason[1]})" if reason and reason[1] != "None" else ""
    return f"{job.job_id} {state[1] if state else 'UNKNOWN'}{shown}"


def log_text(job: Submitted, num_lines: int) -> str:
    """The last lines of the job's output."""
    if job.via == "kubernetes":
        selector = f"jobset.sigs.k8s.io/jobset-name={job.job_id.rpartition('/')[2]}"
        return _run(["kubectl", "logs", "-l", selector, f"--tail={num_lines}"], "kubectl")
    path = Path(job.log or _log_of(job.job_id))
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        hint = "the job has not started; `launch status` tells why"
        raise LaunchError(
            f"there is no output yet: {read_trouble(error)}", where=str(path), hint=hint
        ) from None
    return "\n".join(lines[-num_lines:])


def _log_of(job_id: str) -> str:
    out = _run(["scontrol", "show", "job", job_id], "scontrol")
    match = re.search(r"StdOut=(\S+)", out)
    return match[1] if match else f"slurm-{job_id}.out"


def _run(words: Sequence[str], program: str) -> str:
    """What a program of the scheduler prints; its own message where it fails."""
    if shutil.which(program) is None:
        raise LaunchError(
            f"{program} is not installed here",
            where="--submit" if program in ("sbatch", "kubectl") else program,
            hint="run this on a login node, or submit the written file yourself",
        )
    try:
        done = subprocess.run(list(words), capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise RunError(f"{program} did not answer in {_SECONDS} s", where=program) from None
    if done.returncode != 0:
        message = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
        hint = "see partition, account, time and nodes in the written file" if program == "sbatch" else ""
        raise RunError(f"{program} refused: {message}", where=" ".join(words), hint=hint)
    return done.stdout
