"""What a run writes while it runs: metrics, events and checkpoints' outcomes, and lines on the terminal."""

from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from meshwright.checkpoint.run_checkpoints import Checkpoints
from meshwright.errors import MeshwrightError
from meshwright.launch.heartbeat import heartbeat_path, read_heartbeat
from meshwright.launch.launched import is_local_rank, launched_rank
from meshwright.observe.events import EventWriter
from meshwright.observe.goodput import read_goodput
from meshwright.observe.histograms import HISTOGRAMS_NAME, Histograms, HistogramWriter
from meshwright.observe.metrics import MetricsWriter, StepMetrics
from meshwright.observe.prediction_check import PredictionCheck, device_title
from meshwright.observe.progress import ProgressView, open_progress
from meshwright.observe.rank_times import RankTimesWriter
from meshwright.observe.stragglers import Straggler, StragglerWatch
from meshwright.observe.tensorboard import TensorBoardMirror
from meshwright.observe.trackers.trackers import Trackers
from meshwright.optim.schedule import learning_rate
from meshwright.parallel.torch_graph_count import num_compiled_graphs
from meshwright.resilience.memory_creep import MemoryCreep
from meshwright.resilience.watchdog import HeartbeatWriter, Watchdog
from meshwright.spec.violations import show_value
from meshwright.train import messages
from meshwright.train.early_stopping import min_delta
from meshwright.train.fp8_comparison import Fp8Report
from meshwright.train.job import Job
from meshwright.train.noise_scale import HalfBatchGradient
from meshwright.train.run_summary import Ending, summarise
from meshwright.train.save_record import SaveRecord
from meshwright.train.state import TrainState
from meshwright.train.step import StepOutcome
from meshwright.train.step_metrics import StepMeter
from meshwright.train.tracked_run import tracked_run
from meshwright.train.workload import work_rate


class Recorder:
    """Records a run. Use as a context; all ranks have one and call its methods together.

    Every rank writes events; rank 0 also writes metrics and the summary, and prints.
    """

    def __init__(
        self,
        job: Job,
        run_dir: Path,
        state: TrainState,
        *,
        resumed_from: Checkpoints | None = None,
        quiet: bool = False,
    ) -> None:
        self._job, self._run, self._run_dir = job, job.run, run_dir
        self._recorded, self.recorded_step = state, state.step
        """The state at the last step whose metrics were read, and its step."""
        self.step = state.step
        """Optimizer updates done."""
        with ExitStack() as opening:  # whatever fails half-way closes what was opened
            self._open(state, opening, quiet=quiet)
            self._closing = opening.pop_all()
        self._saves = SaveRecord(
            self._events, self.print, asks_for_background=job.run.checkpoint.asynchronous
        )
        self.print(messages.opening(job, run_dir))
        if state.step:
            self._record_resume(state, resumed_from)
        else:
            began_at, device = self._heartbeat.clock.began_at, device_title(job.mesh.device)
            num_ranks = job.mesh.parallel.num_ranks
            self._events.write("start", num_ranks=num_ranks, device=device, began_at=began_at)
        self._num_graphs = num_compiled_graphs() if job.run.compile else None
        if job.run.compile:
            self.print(messages.COMPILING)
        self._meter = StepMeter(job.training, job.mesh, state, wait_seconds=lambda: job.batches.wait_seconds)

    def _record_resume(self, state: TrainState, resumed_from: Checkpoints | None) -> None:
        """Write and print the step, and the settings that differ from those of the checkpoint."""
        self._events.write("resume", step=state.step, began_at=self._heartbeat.clock.began_at)
        self.print(f"resumed at step {state.step}")
        if resumed_from is None:
            return
        for folder, error in resumed_from.damaged.items():
            text = f"{folder.name} is damaged and was skipped: {error.fact}"
            self._events.write("warning", step=state.step, text=text)
        for change in resumed_from.changes:
            old, new = show_value(change.old), show_value(change.new)
            self._events.write("change", step=state.step, setting=change.key, old=old, new=new)
        if resumed_from.restarts_data:
            self._events.write("change", step=state.step, setting="data position", old="kept", new="0")
        run = self._run
        batch_tokens = run.data.batch_tokens_of(state.num_batches)
        lr = learning_rate(run.optim, run.schedule, state.step, batch_tokens=batch_tokens)
        restarts_data = resumed_from.restarts_data
        for line in messages.changed(resumed_from.changes, learning_rate=lr, restarts_data=restarts_data):
            self.print(line)

    def _open(self, state: TrainState, opening: ExitStack, *, quiet: bool) -> None:
        job, run = self._job, self._run
        self._events = opening.enter_context(EventWriter(self._run_dir, job.mesh.rank))
        self._heartbeat, self._memory_creep = self._open_heartbeat(state, opening), MemoryCreep()
        self._metrics: MetricsWriter | None = None
        self._progress: ProgressView | None = None
        self._mirror: TensorBoardMirror | None = None
        self._trackers: Trackers | None = None
        self._histograms: HistogramWriter | None = None
        self._prediction = PredictionCheck(run, job.mesh.device)
        if job.mesh.rank != 0:
            return
        rate = work_rate(job.workload, job.mesh, run.precision)
        metrics = MetricsWriter(self._run_dir, rate, restored_step=state.step)
        self._metrics = opening.enter_context(metrics)
        ranks = RankTimesWriter(self._run_dir, restored_step=state.step)
        self._rank_times = opening.enter_context(ranks)
        if run.observe.histograms is not None or (self._run_dir / HISTOGRAMS_NAME).exists():
            histograms = HistogramWriter(self._run_dir, restored_step=state.step)
            self._histograms = opening.enter_context(histograms)
        self._stragglers = StragglerWatch(run.resilience.straggler_factor)
        counted, num_steps = job.workload.counted, run.schedule.num_steps
        progress = open_progress(run.name, total_steps=num_steps, counted=counted, quiet=quiet)
        self._progress = opening.enter_context(progress)
        if run.observe.tensorboard:
            mirror = TensorBoardMirror(self._run_dir, restored_step=state.step)
            self._mirror = opening.enter_context(mirror)
        trackers = Trackers(run.observe, tracked_run(job, self._run_dir), warn=self._warn)
        self._trackers = opening.enter_context(trackers)

    def _warn(self, text: str) -> None:
        """Write and print a warning."""
        self._events.write("warning", step=self.step, text=text)
        self.print(f"warning: {text}")

    def _open_heartbeat(self, state: TrainState, opening: ExitStack) -> HeartbeatWriter:
        """Heartbeats of this rank, and a watchdog where another launcher has started several ranks."""
        mesh, run_dir = self._job.mesh, self._run_dir
        num_ranks = mesh.parallel.num_ranks
        writer = HeartbeatWriter(
            run_dir, rank=mesh.rank, num_ranks=num_ranks, step=state.step, after_save=self._write_times
        )
        opening.enter_context(writer)
        if num_ranks > 1 and launched_rank() is not None and not is_local_rank():
            opening.enter_context(Watchdog(writer, run_dir, self._run.resilience, num_ranks))
        return writer

    def _write_times(self, step: int) -> None:
        """Write where the time of this rank went since it was started."""
        clock = self._heartbeat.clock
        self._events.write(
            "time",
            step=step,
            build_seconds=clock.build_seconds,
            first_step_seconds=clock.seconds("start"),
            step_seconds=clock.seconds("step"),
            data_seconds=self._job.batches.wait_seconds,
            save_seconds=clock.seconds("save"),
            evaluate_seconds=clock.seconds("evaluate"),
        )
        growth = self._memory_creep.look()
        if growth is not None:
            self._warn(growth)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the files; a run that ends with an error writes it to its events and summary."""
        with self._closing:
            if error is not None:
                with suppress(OSError):  # a full disk must not hide what has happened
                    self._record_failure(error)

    def print(self, text: str) -> None:
        """Print one line on the terminal; rank 0 only."""
        if self._progress is not None:
            self._progress.print(text)

    def record(
        self,
        state: TrainState,
        outcome: StepOutcome,
        *,
        lr: float,
        is_saved: bool,
        half_batch: HalfBatchGradient | None = None,
    ) -> TrainState:
        """After a step: write its metrics where they are due, and evaluate where that is due.

        No host sync unless due. They are due before every save as well (`is_saved`), so that no loss or
        gradient that is not finite gets into a checkpoint. `half_batch` is measured at steps that estimate
        the noise scale.
        """
        observe = self._run.observe
        is_evaluated = observe.evaluate is not None and state.step % observe.evaluate.every_steps == 0
        if is_evaluated or is_saved or half_batch or state.step % observe.every_steps == 0:
            state = self._record(state, outcome, lr, half_batch, is_evaluated=is_evaluated)
        self.step = state.step
        self._heartbeat.enter("step", state.step)
        return state

    def _record(
        self,
        state: TrainState,
        outcome: StepOutcome,
        lr: float,
        half_batch: HalfBatchGradient | None,
        *,
        is_evaluated: bool,
    ) -> TrainState:
        metrics, state = self._meter.read(state, outcome, lr=lr, half_batch=half_batch)
        if is_evaluated and metrics.is_finite:
            self._heartbeat.enter("evaluate", state.step)
            state = state.after_evaluation(self._job.evaluate(), min_delta=min_delta(self._run.observe))
            self._events.write("evaluate", step=state.step, eval_loss=state.last_eval_loss)
            metrics = replace(metrics, eval_loss=state.last_eval_loss)
        self._write(metrics)
        if metrics.eval_loss is not None:
            self.print(f"step {state.step}: evaluation loss {metrics.eval_loss:.4f}")
        self._warn_if_not_compiled(state)
        self._recorded, self.recorded_step = state, state.step
        if not metrics.is_finite:
            raise messages.not_finite(metrics, self._run_dir)
        self._meter.restart_clock(state)
        return state

    def _write(self, metrics: StepMetrics) -> None:
        if self._metrics is None or self._progress is None:
            return
        complete = self._metrics.write(metrics)
        if self._meter.ranks is not None:
            self._rank_times.write(metrics.step, self._meter.ranks)
            self._report_stragglers(metrics.step, self._stragglers.look(self._meter.ranks))
        self._progress.update(complete)
        if self._mirror is not None:
            self._mirror.write(complete)
        if self._trackers is not None:
            self._trackers.write(complete)
        self._report_prediction(self._prediction.after_step(metrics))

    def _report_stragglers(self, step: int, found: list[Straggler]) -> None:
        """Write and print which ranks hold the others up."""
        for one in found:
            heartbeat = read_heartbeat(heartbeat_path(self._run_dir, one.rank))
            host = heartbeat.host if heartbeat else "an unknown host"
            text, ratio = one.text(host), round(one.ratio, 3)
            self._events.write(
                "straggler", step=step, slow_rank=one.rank, slow_host=host, ratio=ratio, text=text
            )
            self.print(f"warning: {text}")

    def _report_prediction(self, line: str | None) -> None:
        """Write and print how good the prediction was."""
        if line is not None:
            self._events.write("prediction", text=line)
            self.print(line)

    def _warn_if_not_compiled(self, state: TrainState) -> None:
        """After the first step: torch's compiler does not say when it gave up."""
        if self._num_graphs is not None and num_compiled_graphs() == self._num_graphs:
            self._events.write("warning", step=state.step, text=messages.NOT_COMPILED)
            self.print(messages.NOT_COMPILED)
        self._num_graphs = None

    def record_skip(self, state: TrainState) -> None:
        """An fp16 overflow: write it; end the run when no loss scale helps."""
        self._heartbeat.enter("step", state.step)
        loss_scale = self._job.training.loss_scale
        scale = loss_scale.scale if loss_scale else 0.0
        self._events.write("overflow", step=state.step, loss_scale=scale)
        if scale < messages.SMALLEST_LOSS_SCALE:
            raise messages.overflow(state, scale)

    def record_replay(self, outcome: StepOutcome) -> None:
        """Write and print what differed between the two runs of a step, where something did."""
        if outcome.replay_difference:
            self._warn(outcome.replay_difference)

    def record_data_retry(self, text: str) -> None:
        """Write and print that a batch is read again; the wait for it is not a hang."""
        self._warn(text)
        self._heartbeat.enter("step", self.step)

    def record_bad_step(self, state: TrainState, *, grad_norm: float, loss: float | None) -> None:
        """A step without an update: its gradients were not finite, or their norm or the loss was a spike."""
        self._heartbeat.enter("step", state.step)
        self._events.write("skip", step=state.step, batch=state.num_batches, grad_norm=grad_norm, loss=loss)
        self.print(messages.skipped(state, grad_norm, loss))

    def record_early_stop(self, state: TrainState) -> None:
        """The evaluation loss no longer falls, so this is the last step."""
        loss, count = state.stopping_eval_loss, state.evaluations_without_gain
        self._events.write("early_stop", step=state.step, eval_loss=loss, evaluations=count)
        self.print(messages.stopped_early(state))

    def record_rollback(self, state: TrainState, *, from_step: int) -> None:
        """The run is back at the step of a checkpoint, after the data that it skips."""
        self._events.write("rollback", step=state.step, from_step=from_step, batch=state.num_batches)
        self.print(messages.rolled_back(state, from_step))
        self._recorded, self.recorded_step, self.step = state, state.step, state.step
        if self._metrics is not None:
            self._metrics.rewind(state.step)
            self._rank_times.rewind(state.step)
        if self._histograms is not None:
            self._histograms.rewind(state.step)
        self._meter.restart_clock(state)

    def record_fp8(self, state: TrainState, report: Fp8Report) -> None:
        """Write how fp8 compares with bf16, and print it where a block falls back."""
        self._events.write(
            "fp8_comparison",
            step=state.step,
            loss_fp8=report.loss_fp8,
            loss_bf16=report.loss_bf16,
            layers=list(report.cosines),
            cosines=list(report.cosines.values()),
            norm_ratios=list(report.norm_ratios.values()),
            fallback_layers=report.fallback_layers,
        )
        if report.fallback_layers:
            self.print(messages.fallen_back(state, report))
        self._meter.restart_clock(state)

    def record_histograms(self, state: TrainState, histograms: Histograms) -> None:
        """Write the histograms of the step that follows `state`."""
        if self._histograms is not None:
            self._histograms.write(state.step + 1, histograms)
        if self._mirror is not None:
            self._mirror.write_histograms(state.step + 1, histograms)
        self._meter.restart_clock(state)

    def save(self, checkpoints: Checkpoints, state: TrainState) -> None:
        """Start a save during training; a save that fails is printed and does not end training."""
        self._heartbeat.enter("save", state.step)
        for outcome in checkpoints.start_save(state):
            self._saves.started(outcome)
        self._heartbeat.enter("step", state.step)
        self._meter.restart_clock(state)

    def record_saved(self, checkpoints: Checkpoints) -> None:
        """Write that a save has ended on all ranks since the last step, if one has; does not wait."""
        for outcome in checkpoints.poll():
            self._saves.ended(outcome)
        uploaded = checkpoints.poll_upload()
        if uploaded is not None:
            self._saves.uploaded(uploaded)

    def wait_for_save(self, checkpoints: Checkpoints) -> None:
        """Wait for the save that is being written, if there is one, and write that it has ended."""
        for outcome in checkpoints.wait():
            self._saves.ended(outcome)

    def save_last(self, checkpoints: Checkpoints, state: TrainState) -> None:
        """Save the result of the run, unless it is saved; when that fails, the run has failed."""
        self._heartbeat.enter("save", state.step)
        self.wait_for_save(checkpoints)
        if checkpoints.saved_step != state.step:
            self._heartbeat.enter("save", state.step)
            outcome = checkpoints.save(state)[-1]
            if outcome.error is not None:
                raise messages.last_save_failed(outcome.error, checkpoints.root) from None
            self._saves.ended(outcome)
        self._heartbeat.enter("save", state.step)
        uploaded = checkpoints.finish_upload()
        if uploaded is not None and uploaded.error is not None:
            raise messages.last_upload_failed(uploaded.error, checkpoints.root) from None
        if uploaded is not None:
            self._saves.uploaded(uploaded)

    def end(self, ending: Literal["finished", "interrupted"], state: TrainState) -> None:
        """Write the last event and the summary."""
        self._heartbeat.enter("end", state.step)
        self._write_times(state.step)
        self._report_prediction(self._prediction.report())
        self._events.write("finish" if ending == "finished" else "interrupt", step=state.step)
        if ending == "interrupted":
            self.print(messages.interrupted(state, self._run.schedule.num_steps))
        self._summarise(ending, state)
        if self._progress is not None and (goodput := read_goodput(self._run_dir)) is not None:
            self.print(goodput.line())

    def _record_failure(self, error: BaseException) -> None:
        """Up to the last step whose metrics were read: after an error nothing may wait for other ranks."""
        step = self._recorded.step
        if isinstance(error, KeyboardInterrupt):
            self._events.write("interrupt", step=step)
            self._summarise("interrupted", self._recorded)
            return
        fact = error.fact if isinstance(error, MeshwrightError) else f"{type(error).__name__}: {error}"
        self._events.write("failure", step=step, text=fact)
        self._summarise("failed", self._recorded)

    def _summarise(self, ending: Ending, state: TrainState) -> None:
        """Write summary.json, and let trackers know how the run ended."""
        summarise(self._job, self._run_dir, ending, state)
        if self._trackers is not None:
            self._trackers.end(ending)
