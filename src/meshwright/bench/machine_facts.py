"""What a measurement was made on: device and versions, and the clock and power while it ran."""

import datetime
import importlib.metadata
import platform
import shutil
import statistics
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_SAMPLED = ("clocks.sm", "power.draw", "temperature.gpu")
_SAMPLE_MILLISECONDS = 200


def machine_facts(device: torch.device) -> dict[str, Any]:
    """Device, date and versions, which every result carries."""
    is_cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if is_cuda else _processor(),
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if is_cuda else None,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "driver": _driver() if is_cuda else None,
    }


def package_versions(names: Iterable[str]) -> dict[str, str | None]:
    """Versions of packages; None for one that is not installed."""
    found: dict[str, str | None] = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def _driver() -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    asked = [program, "--id=0", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip() or None


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.machine() or "CPU"


@contextmanager
def sampled_clock(device: torch.device) -> Iterator[dict[str, float]]:
    """Medians of clock, power and temperature while the block runs, from nvidia-smi.

    The mapping is filled when the block ends; it stays empty on a CPU.
    """
    found: dict[str, float] = {}
    program = shutil.which("nvidia-smi") if device.type == "cuda" else None
    if program is None:
        yield found
        return
    command = [
        program,
        f"--id={device.index or 0}",
        f"--query-gpu={','.join(_SAMPLED)}",
        "--format=csv,noheader,nounits",
        f"--loop-ms={_SAMPLE_MILLISECONDS}",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as sampler:
        try:
            yield found
        finally:
            sampler.terminate()
            lines = sampler.communicate()[0].splitlines()
    found.update(read_samples(lines))


def read_samples(lines: list[str]) -> dict[str, float]:
    """Medians by name; lines with text instead of numbers are skipped."""
    rows = []
    for line in lines:
        try:
            rows.append([float(cell) for cell in line.split(",")])
        except ValueError:
            continue
    complete = [row for row in rows if len(row) == len(_SAMPLED)]
    if not complete:
        return {}
    names = ("clock_mhz", "power_watts", "temperature_celsius")
    return dict(zip(names, map(statistics.median, zip(*complete, strict=True)), strict=True))
