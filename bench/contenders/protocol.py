"""What every contender of `bench.step` gets: a job, the same weights, the same tokens, and a clock.

A contender is a module of this folder with a function `contend(job, clock)`. It builds its model with the
given weights and makes training steps (data fetch, copy to the device, forward, backward, clipping, update)
until `clock.after_step` returns False. A contender that compiles block by block may have a function
`compile_ahead(job)` besides, which compiles without the full model and returns the seconds it took. Its name,
packages and settings are in registry.py.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from bench.contenders.plain_decoder import parameter_groups
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from meshwright.bench.step import random_value
from meshwright.data.samples import Samples
from meshwright.data.sources import TokenFile
from meshwright.spec import RunSpec
from meshwright.spec.parameters import parameters

IGNORED = -100
"""torch's and transformers' label of a target that does not count."""


class Clock(Protocol):
    """Times the steps of a contender."""

    accumulation_factor: int
    """Micro-batches of the next step, as a multiple of the run's; only ours is asked for more than 1."""

    def after_step(self, loss: Tensor) -> bool:
        """Note that a step has been launched; False when the contender is to stop."""
        ...


@dataclass(frozen=True)
class Job:
    """What one contender runs: our run file has model, batch, data and optimizer for all of them."""

    run: RunSpec
    device: torch.device
    settings: dict[str, Any] = field(default_factory=dict)
    redraws: list[Callable[[], None]] = field(default_factory=list)
    """Functions that draw the weights again, into the memory that they had."""
    storages: dict[int, tuple[torch.UntypedStorage, int]] = field(default_factory=dict)
    """The storages of the weights with their bytes, by address."""

    @property
    def is_all_bf16(self) -> bool:
        """Whether a peer has parameters and states in bf16; else fp32 with autocast."""
        return self.settings.get("weights") == "bf16"

    @property
    def has_documents(self) -> bool:
        """Whether documents are separate: attention and loss stop at their ends."""
        return self.run.data.documents == "separate"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.is_all_bf16 else torch.float32

    def setting(self, name: str, default: Any) -> Any:
        return self.settings.get(name, default)

    def free_weights(self) -> None:
        """Free the memory of the weights; the tensors stay."""
        for storage, _ in self.storages.values():
            storage.resize_(0)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def restore_weights(self) -> None:
        """Allocate the weights again after `free_weights`, with the same values."""
        for storage, num_bytes in self.storages.values():
            storage.resize_(num_bytes)
        for redraw in self.redraws:
            redraw()


class TokenRows(Dataset):
    """Sample i is [tokens, targets, positions], as in our own data loader; IGNORED where no target counts."""

    def __init__(self, run: RunSpec) -> None:
        source, is_separate = TokenFile.open(str(run.data.path)), run.data.documents == "separate"
        self.samples = Samples(source, run.data.sequence_length, is_separate)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Tensor:
        row = self.samples.rows(np.asarray([index]))
        tokens, targets = row.tokens_BS.astype(np.int64), row.targets_BS.astype(np.int64)
        counted = np.where(row.counts_BS, targets, IGNORED)
        return torch.from_numpy(np.concatenate((tokens, counted, row.positions_BS)))


def inputs_of(job: Job, batch_B3S: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Tokens, targets and, where documents are separate, positions, which restart in each document."""
    tokens_BS, targets_BS, positions_BS = (one.contiguous() for one in batch_B3S.unbind(1))
    return tokens_BS, targets_BS, positions_BS if job.has_documents else None


def loader_of(job: Job) -> DataLoader:
    """torch's data loader, with worker processes and pinned memory on CUDA."""
    workers = job.setting("workers", 2 if job.device.type == "cuda" else 0)
    return DataLoader(
        TokenRows(job.run),
        batch_size=job.run.data.microbatch_sequences,
        pin_memory=job.device.type == "cuda",
        num_workers=workers,
        persistent_workers=workers > 0,
        drop_last=True,
    )


def endless(loader: Any) -> Iterator[Any]:
    """The loader's batches, epoch after epoch."""
    while True:
        yield from loader


def optimizer_of(model: nn.Module, job: Job) -> torch.optim.Optimizer:
    """torch's AdamW with the run's hyper-parameters, fused where the settings say so."""
    optim = job.run.optim
    is_fused = job.setting("optimizer", "fused") == "fused" and job.device.type == "cuda"
    return torch.optim.AdamW(
        parameter_groups(model, optim.weight_decay),
        lr=optim.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        fused=is_fused or None,
    )


def autocast_of(job: Job) -> contextlib.AbstractContextManager:
    """bf16 autocast where the run computes in bf16 and the weights are fp32."""
    is_enabled = job.run.precision.compute == "bf16" and not job.is_all_bf16
    return torch.autocast(job.device.type, dtype=torch.bfloat16, enabled=is_enabled)


def fill_weights(job: Job, tensor_of: Callable[[str], Tensor]) -> None:
    """Give every tensor the initial value that our model has; `tensor_of` finds it by our name."""
    spec = job.run.model

    @torch.no_grad()
    def draw() -> None:
        for parameter in parameters(spec):
            value = random_value(spec, parameter, job.run.seed, job.device)
            tensor = tensor_of(parameter.name)
            tensor.copy_(value.view(tensor.shape))

    draw()
    job.redraws.append(draw)
    for parameter in parameters(spec):
        storage = tensor_of(parameter.name).untyped_storage()
        job.storages[storage.data_ptr()] = (storage, storage.nbytes())
