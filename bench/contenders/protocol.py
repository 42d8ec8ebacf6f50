"""What every contender of `bench/step.py` gets: the job, the same weights, the same tokens.

A contender is a module with a function `contend` of a Job. It builds the model with the weights that everyone
gets, and then makes steps (fetch, copy, forward, backward, clip, update) until the clock has seen enough.
One that compiles block by block may have a function `compile_ahead`, which does so without the whole model.
"""

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from bench.contenders.plain_decoder import parameter_groups
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from meshwright.bench.step import random_value
from meshwright.data.sources import TokenFile
from meshwright.spec import RunSpec
from meshwright.spec.parameters import parameters

# What must be importable for a contender to take part.
NEEDS = {
    "ours": (),
    "plain": (),
    "hf": ("transformers", "accelerate"),
    "lightning": ("pytorch_lightning",),
}


@dataclass(frozen=True)
class Job:
    """What one contender is to run: our run file says model, batch, data and optimizer for all of them."""

    run: RunSpec
    device: torch.device
    settings: dict[str, Any] = field(default_factory=dict)
    refills: list[Callable[[], None]] = field(default_factory=list)
    """Draw the weights again, into the memory that they had."""
    storages: dict[int, tuple[torch.UntypedStorage, int]] = field(default_factory=dict)
    """What holds the weights, and its bytes."""

    @property
    def keeps_bf16(self) -> bool:
        """Peers: parameters and states in bf16, updates rounded to nearest; else fp32 and autocast."""
        return self.settings.get("weights") == "bf16"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.keeps_bf16 else torch.float32

    def setting(self, name: str, default: Any) -> Any:
        return self.settings.get(name, default)

    def fold(self) -> None:
        """Give the memory of the weights back; the tensors stay."""
        for storage, _ in self.storages.values():
            storage.resize_(0)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def unfold(self) -> None:
        """Undo `fold`."""
        for storage, num_bytes in self.storages.values():
            storage.resize_(num_bytes)
        for refill in self.refills:
            refill()


def missing_packages(name: str) -> list[str]:
    return [package for package in NEEDS[name] if importlib.util.find_spec(package) is None]


class TokenRows(Dataset):
    """Sample i is tokens [i S, (i + 1) S] of the packed file, as our own loader cuts them."""

    def __init__(self, run: RunSpec) -> None:
        self.file, self.length = TokenFile.open(str(run.data.path)), run.data.sequence_length

    def __len__(self) -> int:
        return (len(self.file.tokens) - 1) // self.length

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.length
        return torch.from_numpy(self.file.tokens[start : start + self.length + 1].astype(np.int64))


def loader_of(job: Job) -> DataLoader:
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
    while True:
        yield from loader


def optimizer_of(model: nn.Module, job: Job) -> torch.optim.Optimizer:
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
    is_wanted = job.run.precision.compute == "bf16" and not job.keeps_bf16
    return torch.autocast(job.device.type, dtype=torch.bfloat16, enabled=is_wanted)


def fill(job: Job, places: Callable[[str], Tensor]) -> None:
    """Give every tensor the value that our model starts from; `places` finds it by our name."""
    spec = job.run.model

    @torch.no_grad()
    def draw() -> None:
        for parameter in parameters(spec):
            places(parameter.name).copy_(random_value(spec, parameter, job.run.seed, job.device))

    draw()
    job.refills.append(draw)
    for parameter in parameters(spec):
        storage = places(parameter.name).untyped_storage()
        job.storages[storage.data_ptr()] = (storage, storage.nbytes())
