"""The newest figures of watched runs in the text format that Prometheus scrapes."""

from collections.abc import Iterator, Sequence
from typing import Any

_LATEST = {
    "loss": "Training loss of the newest step, nats per token.",
    "eval_loss": "Loss of the newest evaluation.",
    "grad_norm": "Global gradient norm before clipping.",
    "lr": "Learning rate.",
    "tokens": "Positions trained on since the start of the run.",
    "step_seconds": "Wall time of a step.",
    "tokens_per_second": "Tokens per second of all ranks together.",
    "tflops_per_gpu": "Model TFLOP/s of one device.",
    "mfu": "Model FLOPs utilisation.",
    "peak_bytes": "Peak memory, the largest over ranks.",
    "data_wait_seconds": "Part of a step that the slowest loader took.",
    "reduce_wait_seconds": "Exposed gradient reduction of a step.",
}


def exposition(snapshots: Sequence[dict[str, Any]]) -> str:
    """All runs as gauges with the labels `run` and `directory`."""
    return "".join(f"{line}\n" for line in _lines(snapshots))


def _lines(snapshots: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield from _gauge("meshwright_up", "1 while the run goes on.", snapshots, lambda run: _is_up(run))
    yield from _gauge("meshwright_step", "Optimizer updates done.", snapshots, lambda run: run["step"])
    yield from _gauge(
        "meshwright_goodput", "Time of steps / wall time.", snapshots, lambda run: run["goodput"]
    )
    for name, text in _LATEST.items():
        yield from _gauge(
            f"meshwright_{name}", text, snapshots, lambda run, name=name: run["latest"].get(name)
        )


def _is_up(run: dict[str, Any]) -> int:
    return int(run["state"] == "running")


def _gauge(name: str, text: str, snapshots: Sequence[dict[str, Any]], value_of: Any) -> Iterator[str]:
    values = [(run, value_of(run)) for run in snapshots]
    if all(value is None for _, value in values):
        return
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} gauge"
    for run, value in values:
        if value is not None:
            labels = f'run="{_escaped(run["name"])}",directory="{_escaped(run["directory"])}"'
            yield f"{name}{{{labels}}} {value!r}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
