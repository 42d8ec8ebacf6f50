"""Steps of one contender of `bench.finetune` in this process: ours, or Hugging Face + peft."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from bench.contenders.protocol import Job
from bench.workloads.random_batch import random_batch
from torch import Tensor, nn

from meshwright.bench.step import fill_on_device
from meshwright.mesh import build_mesh, choose_device, join_world, leave_world
from meshwright.spec import RunSpec
from meshwright.train.build import build_training
from meshwright.train.step import train_step

WARMUP_STEPS = 4
Step = Callable[[], Tensor]
"""Makes one step and returns its loss."""


def step_rows(run: RunSpec, hf: dict[str, Any] | None, *, num_steps: int) -> dict[str, Any]:
    """Median time of a step, tokens per second, peak allocated bytes and the loss of the first step."""
    torch.manual_seed(0)
    device = choose_device(run.device, 0)
    step = our_step(run) if hf is None else peft_step(run, hf, device)
    is_cuda = device.type == "cuda"
    losses, seconds = [], []
    for index in range(WARMUP_STEPS + num_steps):
        if index == 1 and is_cuda:  # the first step's peak may be the compiler's
            torch.cuda.reset_peak_memory_stats()
        started_at = time.perf_counter()
        losses.append(float(step()))  # host sync: ends the step's time
        seconds.append(time.perf_counter() - started_at)
    median = statistics.median(seconds[WARMUP_STEPS:])
    if hf is None:
        leave_world()
    return {
        "device": torch.cuda.get_device_name() if is_cuda else "cpu",
        "torch": torch.__version__,
        "sequence_length": run.data.sequence_length,
        "step_seconds": median,
        "fastest_seconds": min(seconds[WARMUP_STEPS:]),
        "tokens_per_second": run.data.batch_tokens / median,
        "allocated_bytes": torch.cuda.max_memory_allocated() if is_cuda else 0,
        "reserved_bytes": torch.cuda.max_memory_reserved() if is_cuda else 0,
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }


def our_step(run: RunSpec) -> Step:
    """The step of `meshwright train`."""
    mesh = build_mesh(run.parallel, join_world(run.device))
    training = build_training(run, mesh, fill=fill_on_device)
    torch.manual_seed(1)
    batch = random_batch(run, mesh.device)
    return lambda: train_step(training, batch, learning_rate=run.optim.lr).loss


def peft_step(run: RunSpec, settings: dict[str, Any], device: torch.device) -> Step:
    """transformers' model with peft's adapters under bf16 autocast, and torch's fused AdamW on them."""
    model = _peft_model(run, settings, device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optim = run.optim
    optimizer = torch.optim.AdamW(
        trained, lr=optim.lr, betas=(optim.beta1, optim.beta2), weight_decay=0.0, fused=device.type == "cuda"
    )
    torch.manual_seed(1)
    (microbatch,) = random_batch(run, device).microbatches
    is_autocast = settings.get("adapters") != "bf16"

    def step() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=is_autocast):
            targets = microbatch.targets_BS
            output = model(
                input_ids=microbatch.tokens_BS, labels=targets, shift_labels=targets, use_cache=False
            )
        output.loss.backward()
        nn.utils.clip_grad_norm_(trained, optim.max_grad_norm or 1e9)
        optimizer.step()
        optimizer.zero_grad()
        return output.loss.detach()

    return step


def _peft_model(run: RunSpec, settings: dict[str, Any], device: torch.device) -> nn.Module:
    from bench.contenders.hf_model import hf_model  # noqa: PLC0415  transformers is not needed for ours
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415

    assert run.adapter is not None
    base: Any = hf_model(Job(run, device, {"weights": "bf16"}))
    config = LoraConfig(
        r=run.adapter.rank, lora_alpha=int(run.adapter.alpha), target_modules="all-linear", lora_dropout=0.0
    )
    model = get_peft_model(base, config, autocast_adapter_dtype=settings.get("adapters") != "bf16")
    if settings["compile"]:
        for block in base.model.layers:
            block.compile()
    return model.train()
