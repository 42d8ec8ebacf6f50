"""What was measured on a machine, preferred over the data sheet: written by `bench`, read here.

A profile is one JSON document:

    {"device": "h200",
     "gemm": [{"m": 8192, "n": 8192, "k": 8192, "precision": "bf16", "seconds": 1.5e-3}, ...],
     "attention": [{"batch": 1, "sequence": 4096, "heads": 32, "head_width": 128,
                    "precision": "bf16", "seconds": 1.1e-3, "backward": false}, ...],
     "copy_bytes_per_second": 4.1e12,
     "host_bytes_per_second": 5.0e10,
     "collectives": [{"kind": "all_reduce", "ranks": 8, "nodes": 1, "bytes": 268435456, "seconds": 1e-3}]}

Every list may be missing; what is there replaces the figure it measures.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from meshwright.errors import SpecError
from meshwright.hardware.catalogue import Cluster, Device, Link, find_device

# Bytes a ring moves per rank, in units of the message, for n ranks.
RING_SHARE = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}
RING_STEPS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}


@dataclass(frozen=True)
class MatmulTiming:
    """Seconds of one (m, k) x (k, n) product."""

    m: int
    n: int
    k: int
    precision: str
    seconds: float

    @property
    def flops_per_second(self) -> float:
        """Rate of this shape."""
        return 2.0 * self.m * self.n * self.k / self.seconds


@dataclass(frozen=True)
class AttentionTiming:
    """Seconds of one causal attention call."""

    batch: int
    sequence: int
    heads: int
    head_width: int
    precision: str
    seconds: float
    backward: bool = False

    @property
    def flops_per_second(self) -> float:
        """Rate with the causal half counted once; the backward pass does 2.5 times the forward work."""
        forward = 2.0 * self.batch * self.heads * self.sequence**2 * self.head_width
        return forward * (2.5 if self.backward else 1.0) / self.seconds


@dataclass(frozen=True)
class CollectiveTiming:
    """Seconds of one collective over `ranks` ranks on `nodes` nodes; bytes is the full message."""

    kind: str
    ranks: int
    nodes: int
    bytes: float
    seconds: float


@dataclass(frozen=True)
class Profile:
    """Measurements of one machine."""

    device: str
    gemm: tuple[MatmulTiming, ...] = ()
    attention: tuple[AttentionTiming, ...] = ()
    collectives: tuple[CollectiveTiming, ...] = ()
    copy_bytes_per_second: float | None = None
    host_bytes_per_second: float | None = None

    def applied_to(self, cluster: Cluster) -> Cluster:
        """The cluster with its data-sheet figures replaced by what was measured on its kind of device."""
        if self.device and find_device(self.device).name != cluster.device.name:
            raise SpecError(
                f"the profile was measured on {self.device}, the cluster has {cluster.device.name}",
                where="--profile",
                hint="measure this machine with `bench`, or leave the profile out",
            )
        device = self._device(cluster.device)
        return replace(
            cluster,
            device=device,
            peer=self._link(cluster.peer, across_nodes=False),
            network=self._link(cluster.network, across_nodes=True),
            host=device.host,
        )

    def _device(self, device: Device) -> Device:
        best = dict(device.best_matmul_flops_per_second)
        for precision in {timing.precision for timing in self.gemm}:
            best[precision] = max(t.flops_per_second for t in self.gemm if t.precision == precision)
        attention = [t.flops_per_second for t in self.attention if t.precision in ("bf16", "fp16")]
        host = device.host
        if self.host_bytes_per_second is not None:
            host = replace(host, bytes_per_second=self.host_bytes_per_second)
        return replace(
            device,
            best_matmul_flops_per_second=best,
            copy_bytes_per_second=self.copy_bytes_per_second or device.copy_bytes_per_second,
            best_attention_flops_per_second=max(attention)
            if attention
            else device.best_attention_flops_per_second,
            host=host,
        )

    def _link(self, link: Link, *, across_nodes: bool) -> Link:
        timings = [t for t in self.collectives if (t.nodes > 1) is across_nodes and t.ranks > 1]
        if not timings:
            return link
        fitted = fit_link(timings)
        return Link(
            link.name, fitted[1] or link.bytes_per_second, fitted[0] or link.latency_seconds, efficiency=1.0
        )


def fit_link(timings: list[CollectiveTiming]) -> tuple[float, float]:
    """Latency per hop and bytes per second: the smallest message gives the one, the largest the other."""
    small = min(timings, key=lambda t: t.bytes)
    large = max(timings, key=lambda t: t.bytes)
    hops = RING_STEPS[small.kind] * (small.ranks - 1)
    latency = small.seconds / hops if small.bytes <= 2**20 else 0.0
    moved = RING_SHARE[large.kind] * large.bytes * (large.ranks - 1) / large.ranks
    remaining = large.seconds - RING_STEPS[large.kind] * (large.ranks - 1) * latency
    return latency, moved / remaining if remaining > 0 else moved / large.seconds


def _number(entry: Mapping[str, Any], key: str, where: str) -> float:
    number = entry.get(key)
    if (
        isinstance(number, bool)
        or not isinstance(number, (int, float))
        or not math.isfinite(number)
        or number <= 0
    ):
        raise SpecError(f"{key} = {number!r} is not a positive number", where=where, hint="run `bench` again")
    return float(number)


def _entries(document: Mapping[str, Any], key: str, where: str) -> list[Mapping[str, Any]]:
    entries = document.get(key, [])
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict) for entry in cast("list[Any]", entries)
    ):
        raise SpecError(f"{key} is not a list of objects", where=where)
    return cast("list[Mapping[str, Any]]", entries)


def profile_from(document: Mapping[str, Any], *, where: str) -> Profile:
    """A profile from its JSON document; a wrong entry is named by list and position."""

    def at(key: str, index: int) -> str:
        return f"{where}: {key}[{index}]"

    gemm = tuple(
        MatmulTiming(
            *(int(_number(entry, name, at("gemm", i))) for name in ("m", "n", "k")),
            precision=str(entry.get("precision", "bf16")),
            seconds=_number(entry, "seconds", at("gemm", i)),
        )
        for i, entry in enumerate(_entries(document, "gemm", where))
    )
    attention = tuple(
        AttentionTiming(
            *(
                int(_number(entry, n, at("attention", i)))
                for n in ("batch", "sequence", "heads", "head_width")
            ),
            precision=str(entry.get("precision", "bf16")),
            seconds=_number(entry, "seconds", at("attention", i)),
            backward=bool(entry.get("backward", False)),
        )
        for i, entry in enumerate(_entries(document, "attention", where))
    )
    collectives = tuple(
        _collective(entry, at("collectives", i))
        for i, entry in enumerate(_entries(document, "collectives", where))
    )
    copies = {
        key: _number(document, key, where) if key in document else None
        for key in ("copy_bytes_per_second", "host_bytes_per_second")
    }
    return Profile(str(document.get("device", "")), gemm, attention, collectives, **copies)


def _collective(entry: Mapping[str, Any], where: str) -> CollectiveTiming:
    kind = str(entry.get("kind", ""))
    if kind not in RING_SHARE:
        raise SpecError(f"unknown collective {kind!r}", where=where, hint=", ".join(RING_SHARE))
    return CollectiveTiming(
        kind=kind,
        ranks=int(_number(entry, "ranks", where)),
        nodes=int(_number(entry, "nodes", where)) if "nodes" in entry else 1,
        bytes=_number(entry, "bytes", where),
        seconds=_number(entry, "seconds", where),
    )


def read_profile(path: Path) -> Profile:
    """The profile `bench` wrote at this path."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise SpecError(
            f"cannot read {path}: {error}", where="--profile", hint="`bench` writes one"
        ) from error
    if not isinstance(document, dict):
        raise SpecError(f"{path} is not a JSON object", where="--profile", hint="`bench` writes one")
    return profile_from(cast("dict[str, Any]", document), where=str(path))
