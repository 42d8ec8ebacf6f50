"""Plain torch: one torch.compile around the model, autocast, fused AdamW, and a loop of ten lines."""

import torch
from bench.contenders.plain_decoder import PlainDecoder
from bench.contenders.protocol import (
    Clock,
    Job,
    autocast_of,
    endless,
    fill_weights,
    inputs_of,
    loader_of,
    optimizer_of,
)
from torch import Tensor

from meshwright.spec import ModelSpec

_TOP_LEVEL_NAMES = {
    "embedding.tokens.weight": "tokens.weight",
    "embedding.positions.weight": "positions.weight",
}


def plain_model(job: Job) -> PlainDecoder:
    """The plain decoder on the job's device, with the weights that every contender gets."""
    spec = job.run.model
    with torch.device(job.device):
        model = PlainDecoder(spec, job.run.data.sequence_length).to(job.dtype)
    if model.rope is not None:
        model.rope = model.rope.float()
    named = dict(model.named_parameters(remove_duplicate=False))
    fill_weights(job, lambda name: _plain_tensor(spec, named, name))
    return model


def _plain_tensor(spec: ModelSpec, named: dict[str, Tensor], name: str) -> Tensor:
    if name in _TOP_LEVEL_NAMES:
        return named[_TOP_LEVEL_NAMES[name]]
    for kind, (start, count) in _qkv_rows(spec).items():
        if f".attention.{kind}." in name:
            fused = named[name.replace(f"attention.{kind}", "qkv")]
            return fused[start : start + count]
    return named[name.replace("attention.output", "output").replace("mlp.", "")]


def _qkv_rows(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    width = spec.attention.head_width
    q, kv = spec.attention.num_heads * width, spec.attention.num_kv_heads * width
    return {"query": (0, q), "key": (q, kv), "value": (q + kv, kv)}


def contend(job: Job, clock: Clock) -> None:
    """Train in a plain loop until the clock stops it."""
    model = plain_model(job)
    optimizer = optimizer_of(model, job)
    forward = torch.compile(model) if job.setting("compile", True) else model
    rows, more = endless(loader_of(job)), True
    while more:
        total = torch.zeros((), device=job.device)
        for _ in range(job.run.accumulation):
            batch = next(rows).to(job.device, non_blocking=True)
            with autocast_of(job):
                loss = forward(*inputs_of(job, batch)) / job.run.accumulation
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.run.optim.max_grad_norm or 1e9)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        more = clock.after_step(total)
