"""Plain torch: one torch.compile around the model, autocast, fused AdamW, a loop of ten lines."""

import torch
from bench.contenders.plain_decoder import PlainDecoder
from bench.contenders.protocol import (
    Job,
    autocast_of,
    endless,
    fill,
    loader_of,
    optimizer_of,
)
from bench.interleaved.clock import TurnClock
from torch import Tensor

from meshwright.spec import ModelSpec

_PLAIN_TOP = {
    "embedding.tokens.weight": "tokens.weight",
    "embedding.positions.weight": "positions.weight",
}


def plain_model(job: Job) -> PlainDecoder:
    spec = job.run.model
    with torch.device(job.device):
        model = PlainDecoder(spec, job.run.data.sequence_length).to(job.dtype)
    if model.turn is not None:
        model.turn = model.turn.float()
    named = dict(model.named_parameters(remove_duplicate=False))
    fill(job, lambda name: _plain_place(spec, named, name))
    return model


def _plain_place(spec: ModelSpec, named: dict[str, Tensor], name: str) -> Tensor:
    if name in _PLAIN_TOP:
        return named[_PLAIN_TOP[name]]
    for kind, (start, count) in _qkv_rows(spec).items():
        if f".attention.{kind}." in name:
            fused = named[name.replace(f"attention.{kind}", "qkv")]
            return fused[start : start + count]
    return named[name.replace("attention.output", "output").replace("mlp.", "")]


def _qkv_rows(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    width = spec.attention.head_width
    q, kv = spec.attention.num_heads * width, spec.attention.num_kv_heads * width
    return {"query": (0, q), "key": (q, kv), "value": (q + kv, kv)}


def contend(job: Job, clock: TurnClock) -> None:
    """See bench/contenders/protocol.py."""
    model = plain_model(job)
    optimizer = optimizer_of(model, job)
    forward = torch.compile(model) if job.setting("compile", True) else model
    rows, more = endless(loader_of(job)), True
    while more:
        total = torch.zeros((), device=job.device)
        for _ in range(job.run.accumulation):
            batch = next(rows).to(job.device, non_blocking=True)
            with autocast_of(job):
                loss = forward(batch[:, :-1], batch[:, 1:]) / job.run.accumulation
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.run.optim.max_grad_norm or 1e9)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        more = clock.after_step(total)
