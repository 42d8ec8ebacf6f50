"""Lightning: the plain model in Lightning's Trainer, without logging and checkpoints."""

import warnings
from typing import Any

import pytorch_lightning as pl
import torch
from bench.contenders.plain import plain_model
from bench.contenders.protocol import Clock, Job, inputs_of, loader_of, optimizer_of
from torch import Tensor


class Module(pl.LightningModule):
    """The plain model with the job's optimizer."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job = job
        self.model = plain_model(job)
        self.forward_ = torch.compile(self.model) if job.setting("compile", True) else self.model

    def training_step(self, batch: Tensor, _index: int) -> Tensor:
        return self.forward_(*inputs_of(self.job, batch))

    def on_before_optimizer_step(self, _optimizer: torch.optim.Optimizer) -> None:
        """Clip here with setting `clip` = own: Lightning refuses to clip for a fused AdamW."""
        if self.job.setting("clip", "trainer") == "own":
            limit = self.job.run.optim.max_grad_norm or 1e9
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self.model, self.job)


class ClockCallback(pl.Callback):
    """Calls the clock after every optimizer step."""

    def __init__(self, clock: Clock, accumulation: int) -> None:
        self.clock, self.accumulation = clock, accumulation
        self.parts: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, _module: Any, outputs: Any, *_: Any) -> None:
        self.parts.append(outputs["loss"].detach())
        if len(self.parts) < self.accumulation:
            return
        loss = torch.stack(self.parts).sum()  # Lightning has divided each by their number
        self.parts.clear()
        if not self.clock.after_step(loss):
            trainer.should_stop = True


def contend(job: Job, clock: Clock) -> None:
    """Train in Lightning's Trainer until the clock stops it."""
    is_mixed = job.run.precision.compute == "bf16" and not job.is_all_bf16
    trainer = pl.Trainer(
        accelerator="gpu" if job.device.type == "cuda" else "cpu",
        devices=1,
        precision="bf16-mixed" if is_mixed else ("bf16-true" if job.is_all_bf16 else "32-true"),
        accumulate_grad_batches=job.run.accumulation,
        gradient_clip_val=None if job.setting("clip", "trainer") == "own" else job.run.optim.max_grad_norm,
        max_epochs=-1,
        logger=False,
        callbacks=[ClockCallback(clock, job.run.accumulation)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(Module(job), loader_of(job))
