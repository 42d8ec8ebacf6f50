"""The program of a pipeline rank: torch's schedules over our stages."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.microbatch import sum_reducer

from meshwright.data.microbatch import Microbatch
from meshwright.mesh import Mesh
from meshwright.parallel.dp import Reducer
from meshwright.parallel.fp8_weights import Fp8Weights
from meshwright.parallel.pp.forward import forward_losses
from meshwright.parallel.pp.microbatch_reduce import StepReduction
from meshwright.parallel.pp.stages import StageModule
from meshwright.parallel.pp.tied import TiedEmbedding
from meshwright.parallel.pp.torch_stage import pipeline_stage
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
# The arguments of a stage that are numbers.
NUMBERS = ("longest_document", "num_targets")


class StageIO(NamedTuple):
    """Inputs and outputs of pipeline stages for one micro-batch, as meta tensors.

    Torch gets them in advance; otherwise it would run every stage once on zeros to find their shapes.
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
        stage_io: StageIO,
        shards: list[ParameterShard],
        tied: TiedEmbedding,
        reducer: Reducer,
        fp8_weights: Fp8Weights,
        localise: Callable[[Microbatch, float], Microbatch],
    ) -> None:
        self.stages: list[nn.Module] = [stage.module for stage in stages]
        self._numbered = stages
        self.shards = [one for one in shards if not any(one is other for other in tied.followers)]
        self._mesh, self._tied, self._localise = mesh, tied, localise
        self._fp8_weights = fp8_weights
        self._has_first = any(stage.index == 0 for stage in stages)
        self._has_last = any(stage.index == mesh.parallel.num_stages - 1 for stage in stages)
        self._stage_io = stage_io
        self._schedules: dict[int, Any] = {}
        for stage in self.stages:
            stage.register_forward_pre_hook(_shapes_as_numbers, with_kwargs=True)
        if self._has_last:
            self.stages[-1].register_forward_hook(_keep_graph)
        self._reducer, self._reduction = reducer, StepReduction(self.stages, reducer)
        self.reduction_wait, self.gradient_hashes = reducer.wait, reducer.hashes

    def accumulate(self, microbatches: Sequence[Microbatch], *, scale: float = 1.0) -> Tensor:
        """Implements `Program.accumulate`."""
        batch = concatenated([self._localise(microbatch, scale) for microbatch in microbatches])
        losses: list[Tensor] = []
        with self._reduction.of_step(len(microbatches)):
            self._run_schedule(batch, losses, num_microbatches=len(microbatches))
        self._tied.sum_gradients()
        parts = losses if self._has_last else [torch.zeros((), device=self._mesh.device)]
        return torch.stack([part.detach().double() for part in parts]).sum() / scale

    def evaluate(self, microbatches: Sequence[Microbatch]) -> Tensor:
        """Implements `Program.evaluate`."""
        for stage in self.stages:
            stage.eval()
        with torch.no_grad():
            local = [self._localise(microbatch, 1.0) for microbatch in microbatches]
            loss = forward_losses(self._numbered, self._mesh, local)
        for stage in self.stages:
            stage.train()
        return loss

    def gather_parameters(self) -> None:
        """Implements `Program.gather_parameters`."""
        self._tied.copy_to_followers()
        self._reducer.gather_parameters()
        self._fp8_weights.cast()

    def _run_schedule(self, batch: Microbatch, losses: list[Tensor], *, num_microbatches: int) -> None:
        """Call the schedule once; it splits the batch into micro-batches again, along B."""
        inputs = (batch.tokens_BS,) if self._has_first else ()
        # A schedule with a loss function needs a target; the last stage ignores it.
        target = batch.sequence_weights_B if self._has_last else None
        schedule = self._schedule_of(num_microbatches)
        arguments = _numbers_as_shapes(model_arguments(batch), batch.tokens_BS)
        schedule.step(*inputs, target=target, losses=losses, **arguments)

    def _schedule_of(self, num_microbatches: int) -> Any:
        """The schedule for this number of micro-batches; the number grows during a batch ramp."""
        if num_microbatches not in self._schedules:
            self._schedules[num_microbatches] = _build_schedule(
                self._numbered, self._mesh, num_microbatches, self._stage_io
            )
        return self._schedules[num_microbatches]


def concatenated(microbatches: Sequence[Microbatch]) -> Microbatch:
    """All sequences of a step as one batch; its numbers are the largest of all micro-batches."""
    first = microbatches[0]
    numbers = {
        name: max(getattr(one, name) for one in microbatches)
        for name in NUMBERS
        if getattr(first, name) is not None
    }
    columns = {
        name: torch.cat([getattr(one, name) for one in microbatches])
        for name, part in first._asdict().items()
        if isinstance(part, Tensor)
    }
    return first._replace(**columns, **numbers)


def _numbers_as_shapes(arguments: dict[str, Tensor | int], like_BS: Tensor) -> dict[str, Tensor]:
    """The arguments with every number as the last dim of an empty tensor: the host reads it without a sync.

    A schedule that splits the backward pass takes every argument for a tensor.
    """
    return {
        name: value if isinstance(value, Tensor) else like_BS.new_empty((len(like_BS), 0, value))
        for name, value in arguments.items()
    }


def _shapes_as_numbers(
    _module: nn.Module, inputs: tuple[Any, ...], arguments: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The inverse, before a stage's forward."""
    numbers = {
        name: value.shape[-1]
        for name, value in arguments.items()
        if name in NUMBERS and isinstance(value, Tensor)
    }
    return inputs, {**arguments, **numbers}


def _keep_graph(_module: nn.Module, _inputs: tuple[Tensor, ...], loss: Tensor) -> Tensor:
    """The loss as a view: between the two passes of a split backward torch detaches outputs, except views.

    In torch 2.11 the Python autograd node of head and loss would be freed before the weight pass reaches it.
    """
    return loss.view_as(loss)


def _last_output(output: Tensor, target: Tensor) -> Tensor:
    """The loss, which is the last stage's output; a copy, because torch frees the output it starts from."""
    return output.clone()


def _build_schedule(stages: list[StageModule], mesh: Mesh, num_microbatches: int, stage_io: StageIO) -> Any:
    parallel = mesh.parallel
    last = parallel.num_stages - 1
    built = [
        pipeline_stage(
            stage.module,
            stage.index,
            parallel.num_stages,
            mesh.device,
            input_args=stage_io.tokens_BS if stage.index == 0 else stage_io.x_BSD,
            output_args=stage_io.loss if stage.index == last else stage_io.x_BSD,
            group=mesh.group("pp"),
        )
        for stage in stages
    ]
    one_stage = parallel.schedule in ONE_STAGE_SCHEDULES
    # scale_grads divides by the number of micro-batches; our loss weights are divided already.
    return SCHEDULES[parallel.schedule](
        built[0] if one_stage else built,
        num_microbatches,
        loss_fn=_last_output,
        output_merge_spec=sum_reducer,
        scale_grads=False,
    )
