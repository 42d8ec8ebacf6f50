"""What a run writes down about itself while it runs, and what it says on the terminal."""

import math
import platform
import resource
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch
import torch.distributed as dist

from meshwright import __version__
from meshwright.checkpoint.run_checkpoints import Checkpoints
from meshwright.data.batches import open_source
from meshwright.data.corpus import unigram_entropy
from meshwright.errors import CheckpointError, MeshwrightError, RunError
from meshwright.hardware.catalogue import find_device
from meshwright.observe.events import EventWriter
from meshwright.observe.metrics import MetricsWriter, StepMetrics, WorkRate
from meshwright.observe.prediction_check import Foretold, device_title
from meshwright.observe.progress import ProgressView, open_progress
from meshwright.observe.summary import RunSummary, write_summary
from meshwright.observe.tensorboard import TensorBoardMirror
from meshwright.parallel.compile import num_compiled_graphs
from meshwright.plan.workload.flops import flops_per_token
from meshwright.resilience.shortage import Shortage
from meshwright.spec import PrecisionSpec, RunSpec
from meshwright.spec.parameters import num_parameters
from meshwright.train.evaluate import sum_over_world
from meshwright.train.fp8_shadow import ShadowReport
from meshwright.train.job import Job, Workload
from meshwright.train.noise_scale import NoiseEstimate, PartGradient
from meshwright.train.oom_report import out_of_memory, smaller_microbatch
from meshwright.train.state import TrainState
from meshwright.train.step import StepOutcome

# A loss scale this small means that the gradients themselves are not finite.
SMALLEST_LOSS_SCALE = 2.0**-14
# The share of each token settles long before this many; reading them takes a fraction of a second.
ENTROPY_TOKENS = 2**24
NOT_COMPILED = (
    "compile has no effect here: torch's compiler passed over every block, as it does where one waits for "
    "the device or another rank inside recompute; compile=false trains the same"
)


class Recorder:
    """Gathers a step's facts from all ranks; rank 0 writes them down and speaks. Use as a context."""

    def __init__(self, job: Job, run_dir: Path, state: TrainState) -> None:
        self._run, self._mesh, self._run_dir, self._training = job.run, job.mesh, run_dir, job.training
        self._workload, self._rate = job.workload, work_rate(job)
        self._seen = state
        with ExitStack() as opening:  # whatever fails half-way closes what was opened
            self._open(state, opening)
            self._closing = opening.pop_all()
        if state.step:
            self._events.write("resume", step=state.step)
            self.say(_resumed(state.step, job.run.schedule.num_steps))
        else:
            self._events.write("start", num_ranks=job.mesh.parallel.num_ranks)
        self._known_graphs: int | None = None
        if job.run.compile:
            self._known_graphs = num_compiled_graphs()
            self.say("compiling: the first step takes up to a minute; kept on disk for the next run")
        self._restart_clock(state)

    def _open(self, state: TrainState, opening: ExitStack) -> None:
        self._events = opening.enter_context(EventWriter(self._run_dir, self._mesh.rank))
        self._metrics: MetricsWriter | None = None
        self._progress: ProgressView | None = None
        self._mirror: TensorBoardMirror | None = None
        self._foretold = Foretold(self._run, self._mesh.device)
        if self._mesh.rank != 0:
            return
        metrics = MetricsWriter(self._run_dir, self._rate, restored_step=state.step)
        self._metrics = opening.enter_context(metrics)
        progress = open_progress(
            self._run.name, total_steps=self._run.schedule.num_steps, counted=self._workload.counted
        )
        self._progress = opening.enter_context(progress)
        if self._run.observe.tensorboard:
            mirror = TensorBoardMirror(self._run_dir, restored_step=state.step)
            self._mirror = opening.enter_context(mirror)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the files; a run that ends by an error says so in its summary."""
        with self._closing:
            if error is not None:
                with suppress(OSError):  # a full disk must not hide what has happened
                    self._fail(error)

    def say(self, text: str) -> None:
        """One line for people; rank 0 only."""
        if self._progress is not None:
            self._progress.say(text)

    def record(
        self,
        state: TrainState,
        outcome: StepOutcome,
        rate: float,
        *,
        evaluation: Callable[[], float] | None = None,
        part: PartGradient | None = None,
    ) -> TrainState:
        """Wait for the step, gather its facts, write them down; all ranks call it.

        `part` is the gradient of a part of the batch, where the noise scale is estimated at this step.
        """
        loss = float(sum_over_world(outcome.loss, self._mesh))
        grad_norm = float(outcome.grad_norm)
        seconds, num_steps, tokens = self._lap(state)
        is_finite = math.isfinite(loss) and math.isfinite(grad_norm)
        estimate = part.estimate(grad_norm) if part is not None and is_finite else None
        if estimate is not None:
            state = state.after_estimate(signal=estimate.signal, noise=estimate.noise)
        metrics = StepMetrics(
            step=state.step,
            loss=loss,
            grad_norm=grad_norm,
            lr=rate,
            tokens=state.tokens,
            step_tokens=tokens // num_steps,
            step_seconds=seconds / num_steps,
            peak_bytes=self._peak_bytes(),
            **self._scaling(state),
            **self._expert_figures(),
            **_noise_figures(state, estimate),
        )
        state = state.after_observation(loss=loss, seconds=seconds)
        if evaluation is not None and is_finite:
            state = state.after_evaluation(evaluation())
            self._events.write("evaluate", step=state.step, eval_loss=state.last_eval_loss)
            metrics = replace(metrics, eval_loss=state.last_eval_loss)
        self._write(metrics)
        self._tell_of_compiling()
        self._seen = state
        if not is_finite:
            raise _not_finite(metrics, self._run_dir)
        self._restart_clock(state)
        return state

    def _tell_of_compiling(self) -> None:
        """After the first step: a compiler that gave up does so in silence."""
        if self._known_graphs is not None and num_compiled_graphs() == self._known_graphs:
            self._events.write("warning", step=self._seen.step, text=NOT_COMPILED)
            self.say(NOT_COMPILED)
        self._known_graphs = None

    def skip(self, state: TrainState) -> None:
        """An fp16 overflow: say so; give up when no scale helps."""
        scale = self._training.loss_scale.scale if self._training.loss_scale else 0.0
        self._events.write("overflow", step=state.step, loss_scale=scale)
        if scale < SMALLEST_LOSS_SCALE:
            raise RunError(
                f"gradients are not finite at step {state.step}, even with a loss scale of {scale:g}",
                where="precision.compute",
                hint="lower optim.lr, or use bf16",
            )

    def run_short(self, shortage: Shortage, state: TrainState) -> None:
        """A rank ran out of memory: raise what everyone must know, unless smaller micro-batches go on."""
        can_go_on = self._run.memory.on_oom == "halve_microbatch" and not shortage.is_final
        smaller = smaller_microbatch(self._run) if can_go_on else None
        if smaller is None:
            raise out_of_memory(
                self._run, self._mesh, self._training, shortage, step=state.step, run_dir=self._run_dir
            ) from None
        size = smaller.data.microbatch_sequences
        text = (
            f"rank {shortage.rank} ran out of memory: step {state.step + 1} again in micro-batches of {size}"
        )
        self._events.write("warning", step=state.step, text=text)
        self.say(text)

    def shadow(self, state: TrainState, report: ShadowReport) -> None:
        """fp8 beside bf16: written down, and told where a block falls back."""
        worst = report.worst_layer
        self._events.write(
            "shadow",
            step=state.step,
            loss_fp8=report.loss_fp8,
            loss_bf16=report.loss_bf16,
            layers=list(report.cosines),
            cosines=list(report.cosines.values()),
            norm_ratios=list(report.norm_ratios.values()),
            fallen=report.fallen,
        )
        if report.fallen:
            blocks = ", ".join(map(str, report.fallen))
            self.say(
                f"step {state.step}: block {blocks} back to bf16; gradients in fp8 and bf16 have a cosine of "
                f"{report.cosines[worst]:.3f} in block {worst}"
            )
        self._restart_clock(state)

    def attempt_save(self, checkpoints: Checkpoints, state: TrainState) -> None:
        """Save on the way; a failed save is told and does not end training."""
        try:
            folder = checkpoints.save(state)
            self._events.write("checkpoint", step=state.step, folder=folder.name)
        except CheckpointError as error:
            self._events.write("warning", step=state.step, text=str(error))
            self.say(f"checkpoint at step {state.step} failed, training goes on: {error.fact}")
        self._restart_clock(state)

    def save_last(self, checkpoints: Checkpoints, state: TrainState) -> None:
        """Save what the run was for; when that fails, the run has failed."""
        try:
            folder = checkpoints.save(state)
        except CheckpointError as error:
            hint = "make room, then start the same command again: it goes on from the last checkpoint"
            raise RunError(
                f"the last save failed: {error.fact}", where=str(checkpoints.root), hint=hint
            ) from None
        self._events.write("checkpoint", step=state.step, folder=folder.name)

    def end(self, outcome: Literal["finished", "interrupted"], state: TrainState) -> TrainState:
        """The last words of a run."""
        self._tell(self._foretold.tell())
        self._events.write("finish" if outcome == "finished" else "interrupt", step=state.step)
        if outcome == "interrupted":
            of_all = f"{state.step} of {self._run.schedule.num_steps}"
            self.say(f"stopped at step {of_all}, which is saved: started again, the run goes on from there")
        self._summarise(outcome, state)
        return state

    def _fail(self, error: BaseException) -> None:
        """Of the last step that was seen: after an error nothing may wait for other ranks."""
        if isinstance(error, KeyboardInterrupt):
            self._events.write("interrupt", step=self._seen.step)
            self._summarise("interrupted", self._seen)
            return
        fact = error.fact if isinstance(error, MeshwrightError) else f"{type(error).__name__}: {error}"
        self._events.write("failure", step=self._seen.step, text=fact)
        self._summarise("failed", self._seen)

    def _write(self, metrics: StepMetrics) -> None:
        if self._metrics is None or self._progress is None:
            return
        complete = self._metrics.write(metrics)
        self._progress.update(complete)
        if self._mirror is not None:
            self._mirror.write(complete)
        self._tell(self._foretold.see(metrics))

    def _tell(self, line: str | None) -> None:
        """How the prediction did, in the log and to people."""
        if line is not None:
            self._events.write("prediction", text=line)
            self.say(line)

    def _scaling(self, state: TrainState) -> dict[str, Any]:
        """fp16: the scale after this step, and whether batches were skipped since the last line."""
        scale = self._training.loss_scale
        if scale is None:
            return {}
        return {"loss_scale": scale.scale, "skipped": state.num_skipped > self._seen.num_skipped}

    def _expert_figures(self) -> dict[str, Any]:
        if self._training.experts is None:
            return {}
        figures = self._training.experts.figures()
        return {
            "aux_loss": figures.aux_loss,
            "expert_load_max": figures.load_max,
            "expert_load_min": figures.load_min,
        }

    def _lap(self, state: TrainState) -> tuple[float, int, int]:
        """Seconds, steps and tokens since the clock was last started."""
        seconds = time.perf_counter() - self._clock_at
        return seconds, state.step - self._clock_step, state.tokens - self._clock_tokens

    def _restart_clock(self, state: TrainState) -> None:
        self._clock_at, self._clock_step, self._clock_tokens = time.perf_counter(), state.step, state.tokens

    def _peak_bytes(self) -> int:
        """Largest over ranks: device memory on CUDA, resident memory on a CPU."""
        peak = torch.tensor([local_peak_bytes(self._mesh.device)], dtype=torch.int64)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        return int(peak.item())

    def _summarise(self, outcome: Literal["finished", "interrupted", "failed"], state: TrainState) -> None:
        if self._mesh.rank != 0:
            return
        summary = RunSummary(
            outcome=outcome,
            final_step=state.step,
            wall_seconds=state.train_seconds,
            num_ranks=self._mesh.parallel.num_ranks,
            device=device_title(self._mesh.device),
            num_parameters=self._workload.num_parameters,
            flops_per_token=self._workload.flops_per_token,
            fingerprint=self._run.fingerprint(),
            unigram_entropy=self._workload.entropy(),
            num_skipped=state.num_skipped,
            versions={
                "meshwright": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
        )
        write_summary(self._run_dir, summary)


def _resumed(step: int, num_steps: int) -> str:
    if step < num_steps:
        return f"resumed at step {step}"
    return f"finished before: this directory holds all {num_steps} steps, and there is nothing left to do"


def _noise_figures(state: TrainState, estimate: NoiseEstimate | None) -> dict[str, Any]:
    if estimate is None:
        return {}
    return {
        "gradient_signal": estimate.signal,
        "gradient_noise": estimate.noise,
        "noise_scale_tokens": state.noise_scale_tokens,
    }


def _not_finite(metrics: StepMetrics, run_dir: Path) -> RunError:
    return RunError(
        f"loss {metrics.loss:g} and gradient norm {metrics.grad_norm:g} at step {metrics.step}: "
        "no longer numbers",
        where=str(run_dir),
        hint="lower optim.lr, lengthen schedule.warmup_steps or set optim.max_grad_norm; "
        "earlier checkpoints are untouched",
    )


def corpus_entropy(run: RunSpec) -> float | None:
    """Nats per token of the data without context, from a bounded prefix; None where it cannot be read."""
    try:
        return unigram_entropy(open_source(run.data).tokens[:ENTROPY_TOKENS])
    except MeshwrightError:  # the data went away while the run ran: no reason to lose the summary
        return None


def local_peak_bytes(device: torch.device) -> int:
    """Most memory this process held: on CUDA what torch allocated, else resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return resident if sys.platform == "darwin" else resident * 1024  # Linux counts KiB


def token_workload(run: RunSpec) -> Workload:
    """Of a model of ours on tokens."""
    return Workload(
        num_parameters=num_parameters(run.model),
        flops_per_token=flops_per_token(run.model, run.data.sequence_length),
        entropy=lambda: corpus_entropy(run),
    )


def work_rate(job: Job) -> WorkRate:
    """What turns tokens per second into TFLOP/s and MFU on this device."""
    return WorkRate(
        flops_per_token=job.workload.flops_per_token,
        num_ranks=job.mesh.parallel.num_ranks,
        peak_flops_per_second=_peak_flops(job.run.precision, job.mesh.device),
    )


def _peak_flops(precision: PrecisionSpec, device: torch.device) -> float | None:
    """The catalogue's dense peak; None for a CPU or a device that is not listed."""
    if device.type != "cuda":
        return None
    try:
        return find_device(device_title(device)).peak(precision.compute)
    except MeshwrightError:
        return None
