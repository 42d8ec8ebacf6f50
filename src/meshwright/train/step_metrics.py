"""The metrics of one step, gathered from the device and from all ranks."""

import math
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from meshwright.mesh import Mesh
from meshwright.models.decoder import Decoder
from meshwright.observe.metrics import StepMetrics
from meshwright.observe.rank_times import RankFigures
from meshwright.train.evaluate import sum_over_world
from meshwright.train.noise_scale import HalfBatchGradient, NoiseEstimate
from meshwright.train.state import TrainState
from meshwright.train.step import StepOutcome, Training


class StepMeter:
    """Reads the figures of a step; its clock is restarted after whatever is not part of a step."""

    def __init__(
        self, training: Training, mesh: Mesh, state: TrainState, *, wait_seconds: Callable[[], float]
    ) -> None:
        """`wait_seconds` returns how long this rank has waited for batches so far."""
        self._training, self._mesh, self._wait_seconds = training, mesh, wait_seconds
        self._num_skipped = state.num_skipped
        self.ranks: RankFigures | None = None
        """Figures of each rank at the step that was read last."""
        self.restart_clock(state)

    def restart_clock(self, state: TrainState) -> None:
        """Measure the time of steps from here."""
        self._started_at, self._first_step, self._first_tokens = (
            time.perf_counter(),
            state.step,
            state.tokens,
        )
        self._first_wait, self._first_reduce = self._wait_seconds(), self._reduce_seconds()

    def read(
        self,
        state: TrainState,
        outcome: StepOutcome,
        *,
        lr: float,
        half_batch: HalfBatchGradient | None = None,
    ) -> tuple[StepMetrics, TrainState]:
        """Wait for the step: its metrics, and the state with what they say; all ranks call it. Host sync.

        Times and tokens are averages over the steps since the clock was restarted.
        """
        loss = float(sum_over_world(outcome.loss, self._mesh))
        grad_norm = float(outcome.grad_norm)
        seconds = time.perf_counter() - self._started_at
        num_steps = state.step - self._first_step
        self.ranks = self._figures_of_ranks(seconds, num_steps)
        is_finite = math.isfinite(loss) and math.isfinite(grad_norm)
        estimate = half_batch.estimate(grad_norm) if half_batch is not None and is_finite else None
        if estimate is not None:
            state = state.after_estimate(signal=estimate.signal, noise=estimate.noise)
        metrics = StepMetrics(
            step=state.step,
            loss=loss,
            grad_norm=grad_norm,
            lr=lr,
            tokens=state.tokens,
            step_tokens=(state.tokens - self._first_tokens) // num_steps,
            step_seconds=seconds / num_steps,
            peak_bytes=int(self.ranks.peak_bytes.max()),
            data_wait_seconds=float(self.ranks.data_wait_seconds.max()),
            reduce_wait_seconds=self._exposed_seconds(seconds / num_steps),
            **self._loss_scale(state),
            **_expert_metrics(self._training),
            **pair_metrics(self._training),
            **_noise_metrics(state, estimate),
        )
        return metrics, state.after_observation(loss=loss, seconds=seconds)

    def _reduce_seconds(self) -> float:
        clock = self._training.program.reduction_wait
        return math.nan if clock is None else clock.read_seconds()

    def _figures_of_ranks(self, seconds: float, num_steps: int) -> RankFigures:
        """Own time, data wait and peak memory of every rank. Communicates."""
        own = seconds - (self._reduce_seconds() - self._first_reduce)
        waited = self._wait_seconds() - self._first_wait
        mine = [own / num_steps, waited / num_steps, float(_local_peak_bytes(self._mesh.device))]
        return RankFigures(*_gathered(mine))

    def _exposed_seconds(self, step_seconds: float) -> float | None:
        """Wait of the rank that waited least; None where it is not measured."""
        assert self.ranks is not None
        slowest = float(self.ranks.own_seconds.max())
        return None if math.isnan(slowest) else max(0.0, step_seconds - slowest)

    def _loss_scale(self, state: TrainState) -> dict[str, Any]:
        """fp16: the scale after this step, and whether batches were skipped since the last reading."""
        scale = self._training.loss_scale
        if scale is None:
            return {}
        is_skipped = state.num_skipped > self._num_skipped
        self._num_skipped = state.num_skipped
        return {"loss_scale": scale.scale, "skipped": is_skipped}


def _expert_metrics(training: Training) -> dict[str, Any]:
    if training.experts is None:
        return {}
    figures = training.experts.figures()
    return {
        "aux_loss": figures.aux_loss,
        "expert_load_max": figures.load_max,
        "expert_load_min": figures.load_min,
    }


def pair_metrics(training: Training) -> dict[str, Any]:
    """Means over the pairs since the last reading. Communicates."""
    heads = [stage.head for stage in training.program.stages if isinstance(stage, Decoder) and stage.head]
    if not training.has_pairs:
        return {}
    sums = torch.zeros(3, dtype=torch.float64, device=training.device)
    for head in heads:
        sums += 0.0 if head.pair_figures is None else head.pair_figures
        head.pair_figures = None
    dist.all_reduce(sums)
    margin, accuracy, weight = sums.tolist()
    return {"reward_margin": margin / weight, "reward_accuracy": accuracy / weight} if weight else {}


def _noise_metrics(state: TrainState, estimate: NoiseEstimate | None) -> dict[str, Any]:
    if estimate is None:
        return {}
    return {
        "gradient_signal": estimate.signal,
        "gradient_noise": estimate.noise,
        "noise_scale_tokens": state.noise_scale_tokens,
    }


def _gathered(mine: list[float]) -> np.ndarray:
    """These figures of all ranks, as [figure, rank]. Communicates."""
    of_ranks = torch.empty(dist.get_world_size(), len(mine), dtype=torch.float64)
    dist.all_gather(list(of_ranks.unbind()), torch.tensor(mine, dtype=torch.float64))
    return of_ranks.T.numpy()


def _local_peak_bytes(device: torch.device) -> int:
    """The most memory this process has used: on CUDA what torch allocated, else resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return resident if sys.platform == "darwin" else resident * 1024  # Linux counts KiB
