"""Run directories for `watch`, and the verb itself as a process."""

import json
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.observe.events import EventWriter
from meshwright.observe.histograms import (
    LOWEST_EXPONENT,
    NUM_BINS,
    Histogram,
    Histograms,
    HistogramWriter,
    Place,
)
from meshwright.observe.metrics import MetricsWriter, StepMetrics, WorkRate
from meshwright.observe.rank_times import RankFigures, RankTimesWriter
from meshwright.observe.watch.pipeline import timeline_path
from meshwright.plan.time.timeline import StageSeconds, simulate
from meshwright.plan.workload.schedules import PipelineShape
from meshwright.spec.text import dump_run, load_run

NUM_RANKS = 8


def write_run(run_dir: Path, *, num_steps: int = 60, slow_rank: int = 5) -> Path:
    """A run of 8 ranks on H100s that was left at `num_steps` of 100 steps, with one slow rank."""
    run_dir.mkdir(parents=True)
    (run_dir / "run.yaml").write_text(
        dump_run(load_run("llama-3.1-8b-8gpu", ["schedule.num_steps=100", "schedule.warmup_steps=10"]))
    )
    with EventWriter(run_dir, 0) as events:
        events.write("start", num_ranks=NUM_RANKS, device="NVIDIA H100 80GB HBM3")
        events.write("checkpoint", step=20, folder="step-20")
        events.write("warning", step=30, text="<img src=x onerror=alert(1)>")
    write_steps(run_dir, 1, num_steps)
    clock = iter(range(0, 10**6, 60))
    own = np.full(NUM_RANKS, 4.0)
    own[slow_rank] = 6.0
    with RankTimesWriter(run_dir, clock=lambda: next(clock)) as ranks:
        for step in range(1, num_steps + 1):
            figures = RankFigures(own, np.full(NUM_RANKS, 0.02), 7e10 + 1e9 * np.arange(NUM_RANKS))
            ranks.write(step, figures)
    return run_dir


def write_steps(run_dir: Path, first: int, last: int) -> None:
    """Append steps to metrics.jsonl; a loss of 10 / step."""
    with MetricsWriter(run_dir, WorkRate(4.8e10, NUM_RANKS, 989e12), restored_step=first - 1) as metrics:
        for step in range(first, last + 1):
            line = StepMetrics(
                step=step,
                loss=10.0 / step,
                grad_norm=1.0 + 0.1 * math.sin(step),
                lr=1e-4,
                tokens=524288 * step,
                step_tokens=524288,
                step_seconds=6.25,
                peak_bytes=77 * 10**9,
                data_wait_seconds=0.02,
                reduce_wait_seconds=0.25,
                eval_loss=11.0 / step if step % 20 == 0 else None,
            )
            metrics.write(line)


def write_timeline(run_dir: Path, *, pp: int, num_microbatches: int = 6) -> dict[str, Any]:
    """The `profile/timeline.json` of a 1F1B pipeline that took a fifth longer than its schedule predicts."""
    shape = PipelineShape(pp, 1, num_microbatches)
    seconds = StageSeconds.uniform(pp, forward=1.0, backward_input=1.0, backward_weight=1.0)
    predicted = simulate("1f1b", shape, seconds)
    rows = [[[*timed.action, timed.start, timed.end] for timed in rank] for rank in predicted.ranks]
    document = {
        "version": 1,
        "schedule": "1f1b",
        "pp": pp,
        "virtual_stages": 1,
        "num_microbatches": num_microbatches,
        "measured_seconds": 1.2 * predicted.finish_seconds,
        "predicted_seconds": predicted.finish_seconds,
        "ranks": [
            {
                "rank": rank,
                "pp_rank": rank,
                "measured": [[*row[:3], 1.2 * row[3], 1.2 * row[4]] for row in actions],
                "predicted": actions,
            }
            for rank, actions in enumerate(rows)
        ],
    }
    path = timeline_path(run_dir)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))
    return document


@contextmanager
def watching(*words: str) -> Iterator[str]:
    """`meshwright watch <words>` as a process; its address."""
    command = [sys.executable, "-m", "meshwright", "watch", *words, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            address = process.stdout.readline().strip()
            assert address, process.stderr.read()
            yield address
        finally:
            process.terminate()
            process.wait(timeout=120)


def write_histograms(run_dir: Path, *, num_layers: int = 8, steps: Sequence[int] = (20, 40, 60)) -> None:
    """Histograms whose magnitudes grow with the layer and fall with the steps."""
    exponents = np.arange(LOWEST_EXPONENT, LOWEST_EXPONENT + NUM_BINS) + 0.5
    middles = {"activation": -2.0, "output_gradient": -24.0, "weight_gradient": -22.0}
    names = ("attention.qkv", "attention.output", "mlp.gate_up", "mlp.down")
    with HistogramWriter(run_dir) as writer:
        for number, step in enumerate(steps):
            found: Histograms = {}
            for kind, layer, (index, name) in product(middles, range(num_layers), enumerate(names)):
                middle = middles[kind] + 4.0 * layer / num_layers - 3.0 * number / len(steps) + 0.7 * index
                density = np.exp(-0.5 * ((exponents - middle) / 2.5) ** 2)
                counts = (1e6 * density / density.sum()).astype(np.int64)
                amax = float(2.0 ** (LOWEST_EXPONENT + np.flatnonzero(counts)[-1] + 0.5))
                found[Place(kind, layer, name)] = Histogram(
                    counts, 12_000, 0, int(counts[73:].sum()), 0, amax
                )
            writer.write(step, found)
