"""The program of a pipeline rank: torch's schedules over our stages."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.microbatch import sum_reducer

from meshwright.data.batches import Microbatch
from meshwright.mesh import Mesh
from meshwright.parallel.dp import Reducer
from meshwright.parallel.fp8_weights import Fp8Weights
from meshwright.parallel.pp.forward import forward_losses
from meshwright.parallel.pp.microbatch_reduce import StepReduction
from meshwright.parallel.pp.stages import StageModule
from meshwright.parallel.pp.tied import TiedTable
from meshwright.parallel.program import model_arguments
from meshwright.parallel.shards import ParameterShard

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "looped_bfs": ScheduleLoopedBFS,
    "interleaved_zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}
ONE_STAGE_SCHEDULES = ("gpipe", "1f1b")


class StageIO(NamedTuple):
    """What crosses the borders of stages for one micro-batch, as meta tensors.

    Told in advance, so that torch need not run every stage once on made-up numbers to find out.
    """

    tokens_BS: Tensor
    x_BSD: Tensor
    loss: Tensor


class PipelineProgram:
    """This rank's stages under a schedule; one call runs all micro-batches of a step."""

    def __init__(
        self,
        stages: list[StageModule],
        *,
        mesh: Mesh,
        border: StageIO,
        shards: list[ParameterShard],
        tied: TiedTable,
        reducer: Reducer,
        narrow: Fp8Weights,
        localise: Callable[[Microbatch, float], Microbatch],
    ) -> None:
        self.stages: list[nn.Module] = [stage.module for stage in stages]
        self._numbered = stages
        self.shards = [one for one in shards if not any(one is other for other in tied.followers)]
        self._mesh, self._tied, self._localise = mesh, tied, localise
        self._narrow = narrow
        self._has_first = any(stage.index == 0 for stage in stages)
        self._has_last = any(stage.index == mesh.parallel.num_stages - 1 for stage in stages)
        self._border = border
        self._schedules: dict[int, Any] = {}
        if self._has_last:
            self.stages[-1].register_forward_hook(_keep_graph)
        self._reducer, self._reduction = reducer, StepReduction(self.stages, reducer)

    def accumulate(self, microbatches: Sequence[Microbatch], *, scale: float = 1.0) -> Tensor:
        """See Program."""
        whole = joined([self._localise(microbatch, scale) for microbatch in microbatches])
        losses: list[Tensor] = []
        with self._reduction.of_step(len(microbatches)):
            self._run_schedule(whole, losses, num_microbatches=len(microbatches))
        self._tied.sum_gradients()
        parts = losses if self._has_last else [torch.zeros((), device=self._mesh.device)]
        return torch.stack([part.detach().double() for part in parts]).sum() / scale

    def evaluate(self, microbatches: Sequence[Microbatch]) -> Tensor:
        """See Program."""
        for stage in self.stages:
            stage.eval()
        with torch.no_grad():
            local = [self._localise(microbatch, 1.0) for microbatch in microbatches]
            loss = forward_losses(self._numbered, self._mesh, local)
        for stage in self.stages:
            stage.train()
        return loss

    def gather_parameters(self) -> None:
        """See Program."""
        self._tied.follow()
        self._reducer.gather_parameters()
        self._narrow.write()

    def _run_schedule(self, whole: Microbatch, losses: list[Tensor], *, num_microbatches: int) -> None:
        """One call of the schedule, which cuts the joined micro-batches apart again along B."""
        inputs = (whole.tokens_BS,) if self._has_first else ()
        # The target is only there because a schedule with a loss wants one: the last stage has its own.
        target = whole.sequence_weights_B if self._has_last else None
        schedule = self._schedule_of(num_microbatches)
        schedule.step(*inputs, target=target, losses=losses, **model_arguments(whole))

    def _schedule_of(self, num_microbatches: int) -> Any:
        """One for each number of micro-batches: batches grow during a ramp."""
        if num_microbatches not in self._schedules:
            self._schedules[num_microbatches] = _build_schedule(
                self._numbered, self._mesh, num_microbatches, self._border
            )
        return self._schedules[num_microbatches]


def joined(microbatches: Sequence[Microbatch]) -> Microbatch:
    """All sequences of a step as one batch."""
    first = microbatches[0]
    columns = {
        name: torch.cat([getattr(one, name) for one in microbatches])
        for name, part in first._asdict().items()
        if part is not None
    }
    return first._replace(**columns)


def _keep_graph(_module: nn.Module, _inputs: tuple[Tensor, ...], loss: Tensor) -> Tensor:
    """Between the two passes of a split backward torch detaches outputs in place, except views.

    In torch 2.11 the node of head and loss, a Python one, would be gone when the weight pass comes to it.
    """
    return loss.view_as(loss)


def _last_output(output: Tensor, target: Tensor) -> Tensor:
    """The last stage's output is the loss already; a copy, because torch lets go of what it starts from."""
    return output.clone()


def _build_schedule(stages: list[StageModule], mesh: Mesh, num_microbatches: int, border: StageIO) -> Any:
    parallel = mesh.parallel
    last = parallel.num_stages - 1
    built = [
        PipelineStage(
            stage.module,
            stage.index,
            parallel.num_stages,
            mesh.device,
            input_args=border.tokens_BS if stage.index == 0 else border.x_BSD,
            output_args=border.loss if stage.index == last else border.x_BSD,
            group=mesh.group("pp"),
        )
        for stage in stages
    ]
    one_stage = parallel.schedule in ONE_STAGE_SCHEDULES
    # scale_grads divides by the micro-batches; our loss weights have divided already.
    return SCHEDULES[parallel.schedule](
        built[0] if one_stage else built,
        num_microbatches,
        loss_fn=_last_output,
        output_merge_spec=sum_reducer,
        scale_grads=False,
    )
