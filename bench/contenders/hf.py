"""Hugging Face: transformers' model in Accelerate's loop."""

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, TorchDynamoPlugin
from bench.contenders.hf_model import hf_model
from bench.contenders.protocol import Clock, Job, endless, inputs_of, loader_of, optimizer_of
from torch import Tensor, nn


class LossOnly(nn.Module):
    """Returns the loss without the logits, which Accelerate would copy to fp32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor, positions: Tensor | None) -> Tensor:
        return self.outputs(tokens, targets, positions).loss

    def outputs(self, tokens: Tensor, targets: Tensor, positions: Tensor | None) -> Any:
        """With positions that restart, transformers masks documents (its packed-sequence path)."""
        return self.model(
            input_ids=tokens, position_ids=positions, labels=targets, shift_labels=targets, use_cache=False
        )


class FullOutput(LossOnly):
    """Returns the model's own output with the logits, as its documentation shows."""

    def forward(self, tokens: Tensor, targets: Tensor, positions: Tensor | None) -> Any:
        return self.outputs(tokens, targets, positions)


def dynamo_of(job: Job) -> TorchDynamoPlugin | None:
    """Accelerate's compilation of the full model, or of each repeated block (`regional`)."""
    kind = job.setting("compile", True)
    if not kind:
        return None
    return TorchDynamoPlugin(backend="inductor", use_regional_compilation=kind == "regional")


def contend(job: Job, clock: Clock) -> None:
    """Train in Accelerate's loop until the clock stops it."""
    is_mixed = job.run.precision.compute == "bf16" and not job.is_all_bf16
    accelerator = Accelerator(
        mixed_precision="bf16" if is_mixed else "no",
        cpu=job.device.type == "cpu",
        dynamo_plugin=dynamo_of(job),
        dataloader_config=DataLoaderConfiguration(non_blocking=job.device.type == "cuda"),
        gradient_accumulation_steps=job.run.accumulation,
    )
    wrapper = LossOnly if job.setting("output", "loss") == "loss" else FullOutput
    model = wrapper(hf_model(job))
    optimizer = optimizer_of(model, job)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader_of(job))
    rows, more = endless(loader), True
    while more:
        total = torch.zeros((), device=job.device)
        for _ in range(job.run.accumulation):
            batch = next(rows)
            with accelerator.accumulate(model):
                outputs = model(*inputs_of(job, batch))
                loss = outputs if isinstance(outputs, Tensor) else outputs.loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), job.run.optim.max_grad_norm or 1e9)
                optimizer.step()
                optimizer.zero_grad()
            total += loss.detach() / job.run.accumulation
        more = clock.after_step(total)
