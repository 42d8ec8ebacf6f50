"""Parsers of what published tables write for a precision, a recompute policy and a network."""

import re

from meshwright.errors import SpecError
from meshwright.plan.workload.layouts import (
    ACTIVATION,
    CORE_ATTENTION,
    EXPERTS,
    FULL,
    MLP,
    NORMS,
    RECOMPUTE_SELECTIVE,
)
from meshwright.plan.workload.workload import Precision

RECOMPUTE_NAMES = (
    ("full", FULL),
    ("core", CORE_ATTENTION),
    ("norm", NORMS),
    ("moe_act", ACTIVATION),
    ("mla_up_proj", NORMS),
    ("shared_expert", MLP),
    ("mlp", MLP),
)
_RATE = re.compile(r"(?:(\d+)\s*x\s*)?(\d+(?:\.\d+)?)\s*(Gb/s|GB/s)", re.IGNORECASE)


def parse_precision(text: str) -> Precision:
    """`FP8-CS`, `bf16 (fp32 grad accumulation)`, `16-bit (bf16 assumed)` ... as a precision."""
    lowered = text.lower()
    names: tuple[tuple[str, Precision], ...] = (
        ("nvfp4", "nvfp4"),
        ("mxfp8", "mxfp8"),
        ("fp8-mx", "mxfp8"),
        ("fp8", "fp8"),
        ("float8", "fp8"),
        ("fp16", "fp16"),
        ("bf16", "bf16"),
        ("tf32", "tf32"),
        ("fp32", "fp32"),
        ("16", "bf16"),
    )
    for name, precision in names:
        if name in lowered:
            return precision
    raise SpecError(
        f"precision = {text!r} is not understood", hint="bf16, fp16, fp8, mxfp8, nvfp4, tf32 or fp32"
    )


def parse_recompute(text: str) -> int:
    """`none`, `full`, `selective`, `core_attn+layernorm`, `selective: moe_act, moe` ... as layout bits."""
    lowered = text.lower().replace("sequence parallel", "")
    if lowered.startswith("none"):
        return 0
    bits = 0
    for name, part in RECOMPUTE_NAMES:
        if name in lowered:
            bits |= part
    if re.search(r"\bmoe\b", lowered):
        bits |= EXPERTS
    if re.search(r"\bact\b", lowered):
        bits |= ACTIVATION
    if bits == 0 and "selective" in lowered:
        return RECOMPUTE_SELECTIVE
    if bits == 0:
        raise SpecError(
            f"recompute = {text!r} is not understood", hint="none, selective, full, or parts of a layer"
        )
    return FULL if bits & FULL else bits


def parse_network(text: str, gpus_per_node: int) -> float | None:
    """`NVLink3 + 8x200Gb/s HDR IB per node`, `800Gb/s per node` as bytes/s per device; None if not stated."""
    beyond = text.split("+", 1)[-1]
    found = _RATE.search(beyond)
    if found is None:
        return None
    count, rate, unit = found.groups()
    per_second = float(rate) * (1e9 if unit == "GB/s" else 1.25e8)
    if "per node" in text.lower():
        return per_second * int(count or 1) / gpus_per_node
    return per_second
