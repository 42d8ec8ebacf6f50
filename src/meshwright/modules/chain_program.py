"""The program of a user module under a pipeline schedule."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.microbatch import sum_reducer

from meshwright.errors import DataError
from meshwright.mesh import Mesh
from meshwright.modules.buffers import SharedBuffers
from meshwright.modules.chain import Chain
from meshwright.modules.dataset import DatasetMicrobatch
from meshwright.modules.module_program import Loss, LossTotals, counted_loss
from meshwright.parallel.dp import Reducer
from meshwright.parallel.pp.forward import ranks_of_stages, receive, send
from meshwright.parallel.pp.microbatch_reduce import StepReduction
from meshwright.parallel.pp.pipeline_program import ONE_STAGE_SCHEDULES, SCHEDULES
from meshwright.parallel.pp.torch_stage import pipeline_stage
from meshwright.parallel.shards import ParameterShard

Numbered = dict[int, nn.Module]
"""The stages of this rank by their number in the pipeline."""


class ChainProgram:
    """This rank's stages of a user module; one call runs all micro-batches of a step."""

    def __init__(
        self,
        chain: Chain,
        stages: Numbered,
        stage_io: Sequence[Tensor],
        *,
        mesh: Mesh,
        num_microbatches: int,
        shards: list[ParameterShard],
        reducer: Reducer,
        loss: Loss,
    ) -> None:
        self.stages, self.shards = list(stages.values()), shards
        self._chain, self._numbered, self._mesh, self._loss = chain, stages, mesh, loss
        # The input of stage i is at i and its output at i + 1, as meta tensors.
        self._stage_io, self._reducer = stage_io, reducer
        self.reduction_wait, self.gradient_hashes = reducer.wait, reducer.hashes
        self._reduction = StepReduction(self.stages, reducer)
        self._buffers, self._totals = SharedBuffers(self.stages, mesh), LossTotals(mesh)
        self._last = mesh.parallel.num_stages - 1
        self._step: tuple[Sequence[DatasetMicrobatch], float] = ((), 1.0)
        self._schedule = self._build_schedule(num_microbatches)

    def accumulate(self, microbatches: Sequence[DatasetMicrobatch], *, scale: float = 1.0) -> Tensor:
        """Implements `Program.accumulate`."""
        self._step = microbatches, scale
        inputs = self._inputs(microbatches) if 0 in self._numbered else ()
        # A schedule gives the loss function a micro-batch's slice of the target: here, its index.
        target = torch.arange(len(microbatches)) if self._last in self._numbered else None
        with self._reduction.of_step(len(microbatches)):
            self._schedule.step(*inputs, target=target, losses=[])
        return self._totals.divide(self.shards)

    def evaluate(self, microbatches: Iterable[DatasetMicrobatch]) -> Tensor:
        """Implements `Program.evaluate`: this rank's part of the loss sum / the global count."""
        for stage in self.stages:
            stage.eval()
        with torch.no_grad():
            for microbatch in microbatches:
                self._walk(microbatch)
        for stage in self.stages:
            stage.train()
            if isinstance(stage, FSDPModule):
                stage.reshard()  # a pipeline keeps parameters gathered for backward; here there is none
        return self._totals.divide([])

    def gather_parameters(self) -> None:
        """Implements `Program.gather_parameters`."""
        self._reducer.gather_parameters()
        self._buffers.broadcast()

    def _inputs(self, microbatches: Sequence[DatasetMicrobatch]) -> tuple[Tensor]:
        inputs = [self._chain.inputs(one.content) for one in microbatches]
        expected = self._stage_io[0].shape
        for one in inputs:
            if one.shape != expected:
                raise DataError(
                    f"a micro-batch has shape {tuple(one.shape)}, the first had {tuple(expected)}",
                    where="dataset",
                    hint="a pipeline passes tensors of one shape: pad the samples, or use pp=1",
                )
        return (torch.cat(inputs),)

    def _loss_of(self, output: Tensor, index: Tensor) -> Tensor:
        microbatches, scale = self._step
        loss_sum, count = counted_loss(self._loss, lambda *_, **__: output, microbatches[int(index)])
        self._totals.add(loss_sum, count)
        return loss_sum * scale

    def _walk(self, microbatch: DatasetMicrobatch) -> None:
        """Run one micro-batch through the stages of this rank, in order, without gradients."""
        group, rank_of = self._mesh.group("pp"), ranks_of_stages(self._mesh)
        kept: Tensor | None = None
        for index, stage in self._numbered.items():
            if index == 0:
                x = self._chain.inputs(microbatch.content)
            elif rank_of[index - 1] == rank_of[index] and kept is not None:
                x = kept
            else:
                x = receive(rank_of[index - 1], group, self._mesh.device)
            y: Tensor = stage(x)
            if index == self._last:
                self._totals.add(*counted_loss(self._loss, lambda *_, y=y, **__: y, microbatch))
            elif rank_of[index + 1] != rank_of[index]:
                send(y, rank_of[index + 1], group)
            kept = y

    def _build_schedule(self, num_microbatches: int) -> Any:
        mesh, kind = self._mesh, self._mesh.parallel.schedule
        built = [
            pipeline_stage(
                stage,
                index,
                mesh.parallel.num_stages,
                mesh.device,
                # Given in advance: otherwise torch would run the stage on zeros to find the shapes, and
                # running statistics would include them.
                input_args=(self._stage_io[index],),
                output_args=(self._stage_io[index + 1],),
                group=mesh.group("pp"),
            )
            for index, stage in self._numbered.items()
        ]
        return SCHEDULES[kind](
            built[0] if kind in ONE_STAGE_SCHEDULES else built,
            num_microbatches,
            loss_fn=self._loss_of,
            output_merge_spec=sum_reducer,
            scale_grads=False,
        )
