"""A short measurement of this machine: the profile that `plan` and `predict` prefer over a data sheet."""

import os
from collections.abc import Callable
from typing import Any

import torch

from meshwright.bench.attention import SEQUENCES, default_backend, time_attention
from meshwright.bench.copy import copy_rows
from meshwright.bench.gemm import TOKENS, layer_shapes, matmul_call, precisions_of, squares, time_matmul
from meshwright.bench.machine_facts import machine_facts
from meshwright.bench.timing import sustained_seconds
from meshwright.errors import SpecError
from meshwright.hardware import find_device
from meshwright.spec.families import family

PROFILE_VERSION = 1
SUSTAINED_PRECISIONS = ("bf16", "fp8")
SUSTAINED_SIZE = 8192
# Clocks are stable after one second; the last third is timed.
SUSTAINED_SECONDS = 3.0


def probe(device: torch.device, *, seconds: float, log: Callable[[str], None]) -> dict[str, Any]:
    """The profile of one device: matmuls, attention and copies. It takes about a minute on a GPU.

    Collectives need several ranks: `bench comm` measures them, and they are added to the profile.
    """
    log("matmuls")
    matmuls = list(squares(device, seconds=seconds)) + _layer_matmuls(device, seconds)
    sustained = _sustained(device, log)
    log("attention")
    attention = _attention(device, seconds)
    log("copies")
    copies = {row["what"]: row for row in copy_rows(device, seconds=seconds)}
    facts = machine_facts(device)
    document: dict[str, Any] = {
        "version": PROFILE_VERSION,
        "device": catalogue_name(facts["device"], device),
        "measured": facts,
        "machine": _machine(device),
        "gemm": [{key: row[key] for key in ("m", "n", "k", "precision", "seconds")} for row in matmuls],
        **({"sustained_flops_per_second": sustained} if sustained else {}),
        "attention": attention,
        "copy_bytes_per_second": copies["copy"]["gigabytes_per_second"] * 1e9,
    }
    if "host to device, pinned" in copies:
        document["host_bytes_per_second"] = copies["host to device, pinned"]["gigabytes_per_second"] * 1e9
    return document


def catalogue_name(title: str, device: torch.device) -> str:
    """The catalogue's name of this device; its own title where the catalogue does not know it."""
    if device.type == "cpu":
        return "cpu"
    try:
        return find_device(title).name
    except SpecError:
        return title


def _machine(device: torch.device) -> dict[str, Any]:
    """The device's facts that a catalogue entry has, as torch reports them."""
    if device.type != "cuda":
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return {"num_devices": 1, "num_sms": torch.get_num_threads(), "memory_bytes": memory_bytes}
    found = torch.cuda.get_device_properties(device)
    return {
        "num_devices": torch.cuda.device_count(),
        "num_sms": found.multi_processor_count,
        "memory_bytes": found.total_memory,
    }


def _layer_matmuls(device: torch.device, seconds: float) -> list[dict[str, Any]]:
    """The matmuls of one model, in the precision that it trains in."""
    name = "llama-3.1-8b" if device.type == "cuda" else "gpt2-124m"
    precision = "bf16" if "bf16" in precisions_of(device) else "fp32"
    shapes = layer_shapes(family(name)).values()
    return [time_matmul(TOKENS[device.type], n, k, precision, device, seconds=seconds) for n, k in shapes]


def _sustained(device: torch.device, log: Callable[[str], None]) -> dict[str, float]:
    """FLOP/s that a GPU sustains at its power limit, by precision; empty for CPUs."""
    if device.type != "cuda":
        return {}
    log("sustained matmuls")
    wanted = [name for name in SUSTAINED_PRECISIONS if name in precisions_of(device)]
    size = SUSTAINED_SIZE
    calls = {name: matmul_call(size, size, size, name, device) for name in wanted}
    return {
        name: 2.0 * size**3 / sustained_seconds(call, device, seconds=SUSTAINED_SECONDS)
        for name, call in calls.items()
    }


def _attention(device: torch.device, seconds: float) -> list[dict[str, Any]]:
    """Forward and backward of torch's default kernel, at a long sequence."""
    sequence = SEQUENCES[device.type][-2]
    entries = []
    for width in (64, 128):
        chosen = default_backend(device, sequence, width)
        row = time_attention(chosen, device, sequence, width, seconds=seconds)
        if "error" in row:
            continue
        shape = {key: row[key] for key in ("batch", "sequence", "heads", "head_width", "precision")}
        entries.append(
            {**shape, "backend": row["backend"], "seconds": row["forward_seconds"], "backward": False}
        )
        entries.append(
            {**shape, "backend": row["backend"], "seconds": row["backward_seconds"], "backward": True}
        )
    return entries
