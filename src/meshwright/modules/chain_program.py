"""A chain of parts under a pipeline schedule."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.microbatch import sum_reducer

from meshwright.errors import DataError
from meshwright.mesh import Mesh
from meshwright.modules.buffers import SharedBuffers
from meshwright.modules.chain import Chain
from meshwright.modules.dataset import DatasetMicrobatch
from meshwright.modules.module_program import Loss, LossTotals, counted
from meshwright.parallel.dp import Reducer
from meshwright.parallel.pp.forward import ranks_of_stages, receive, send
from meshwright.parallel.pp.microbatch_reduce import StepReduction
from meshwright.parallel.pp.pipeline_program import ONE_STAGE_SCHEDULES, SCHEDULES
from meshwright.parallel.shards import ParameterShard

Numbered = dict[int, nn.Module]
"""The stages of this rank by their number in the pipeline."""


class ChainProgram:
    """This rank's stages of a module that is not ours; one call runs all micro-batches of a step."""

    def __init__(
        self,
        chain: Chain,
        stages: Numbered,
        borders: Sequence[Tensor],
        *,
        mesh: Mesh,
        num_microbatches: int,
        shards: list[ParameterShard],
        reducer: Reducer,
        loss: Loss,
    ) -> None:
        self.stages, self.shards = list(stages.values()), shards
        self._chain, self._numbered, self._mesh, self._loss = chain, stages, mesh, loss
        self._borders, self._reducer = borders, reducer
        self._reduction = StepReduction(self.stages, reducer)
        self._buffers, self._totals = SharedBuffers(self.stages, mesh), LossTotals(mesh)
        self._last = mesh.parallel.num_stages - 1
        self._step: tuple[Sequence[DatasetMicrobatch], float] = ((), 1.0)
        self._schedule = self._build_schedule(num_microbatches)

    def accumulate(self, microbatches: Sequence[DatasetMicrobatch], *, scale: float = 1.0) -> Tensor:
        """See Program."""
        self._step = microbatches, scale
        inputs = self._inputs(microbatches) if 0 in self._numbered else ()
        # A schedule hands each micro-batch its part of the target: here, its number.
        target = torch.arange(len(microbatches)) if self._last in self._numbered else None
        with self._reduction.of_step(len(microbatches)):
            self._schedule.step(*inputs, target=target, losses=[])
        return self._totals.divide(self.shards)

    def evaluate(self, microbatches: Iterable[DatasetMicrobatch]) -> Tensor:
        """See Program; the part is of the sum over these micro-batches / their global count."""
        for stage in self.stages:
            stage.eval()
        with torch.no_grad():
            for microbatch in microbatches:
                self._walk(microbatch)
        for stage in self.stages:
            stage.train()
            if isinstance(stage, FSDPModule):
                stage.reshard()  # kept gathered for a backward that does not come
        return self._totals.divide([])

    def gather_parameters(self) -> None:
        """See Program."""
        self._reducer.gather_parameters()
        self._buffers.follow_first()

    def _inputs(self, microbatches: Sequence[DatasetMicrobatch]) -> tuple[Tensor]:
        inputs = [self._chain.inputs(one.content) for one in microbatches]
        expected = self._borders[0].shape
        for one in inputs:
            if one.shape != expected:
                raise DataError(
                    f"a micro-batch has shape {tuple(one.shape)}, the first had {tuple(expected)}",
                    where="dataset",
                    hint="a pipeline passes tensors of one shape: pad the samples, or use pp=1",
                )
        return (torch.cat(inputs),)

    def _loss_of(self, output: Tensor, number: Tensor) -> Tensor:
        microbatches, scale = self._step
        loss_sum, count = counted(self._loss, lambda *_, **__: output, microbatches[int(number)])
        self._totals.add(loss_sum, count)
        return loss_sum * scale

    def _walk(self, microbatch: DatasetMicrobatch) -> None:
        """One micro-batch through the stages of this rank, in order, without gradients."""
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
                self._totals.add(*counted(self._loss, lambda *_, y=y, **__: y, microbatch))
            elif rank_of[index + 1] != rank_of[index]:
                send(y, rank_of[index + 1], group)
            kept = y

    def _build_schedule(self, num_microbatches: int) -> Any:
        mesh, kind = self._mesh, self._mesh.parallel.schedule
        built = [
            PipelineStage(
                stage,
                index,
                mesh.parallel.num_stages,
                mesh.device,
                # Told in advance: to find out, torch would run the stage on made-up numbers, which running
                # statistics would remember.
                input_args=(self._borders[index],),
                output_args=(self._borders[index + 1],),
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
