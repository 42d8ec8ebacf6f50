"""Profiles: measurements of a machine, written by `hardware probe`, that replace data-sheet figures.

A profile is one JSON document:

    {"device": "h200",
     "measured": {"date": "2026-11-15", "torch": "2.11.0", "device": "NVIDIA H200", ...},
     "machine": {"num_devices": 8, "num_sms": 132, "memory_bytes": 150109106995},
     "gemm": [{"m": 8192, "n": 8192, "k": 8192, "precision": "bf16", "seconds": 1.5e-3}, ...],
     "sustained_flops_per_second": {"bf16": 6.9e14, "fp8": 1.3e15},
     "attention": [{"batch": 1, "sequence": 4096, "heads": 32, "head_width": 128,
                    "precision": "bf16", "seconds": 1.1e-3, "backward": false}, ...],
     "copy_bytes_per_second": 4.1e12,
     "host_bytes_per_second": 5.0e10,
     "collectives": [{"kind": "all_reduce", "ranks": 8, "nodes": 1, "bytes": 268435456, "seconds": 1e-3}],
     "calibration": {"compute": 1.06, "communication": 1.2, "num_runs": 3}}

Every part but `device` may be missing; a part replaces the data-sheet figure that it measures. A short matmul
runs at clocks that a device at its power limit cannot sustain: `sustained_flops_per_second` is the rate after
seconds without a pause, and the planner slows matmuls and attention by that share. A device outside the
catalogue is described by `machine` and by the measurements. `calibration` holds the factors that
`plan --calibrate` fitted to runs of the machine, on top of everything else.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from meshwright.errors import SpecError, read_trouble
from meshwright.files import MIB, read_json_file
from meshwright.hardware.calibration import Calibration
from meshwright.hardware.catalogue import (
    PEER_LATENCY_SECONDS,
    Cluster,
    Device,
    Link,
    find_device,
    generic_cluster,
    parse_cluster,
)

PROBE_HINT = "run `meshwright hardware probe` again"
# Host link of a device that is not in the catalogue and was not measured: PCIe 3.0 with 16 lanes.
ASSUMED_HOST_BYTES_PER_SECOND = 1.2e10
# Bytes that a rank sends in a ring of many ranks, in units of the message; and the number of its rounds.
RING_SHARE = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}
RING_STEPS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}


@dataclass(frozen=True)
class MatmulTiming:
    """Seconds of one (m, k) x (k, n) matmul."""

    m: int
    n: int
    k: int
    precision: str
    seconds: float

    @property
    def flops_per_second(self) -> float:
        """FLOP/s of this matmul."""
        return 2.0 * self.m * self.n * self.k / self.seconds


@dataclass(frozen=True)
class AttentionTiming:
    """Seconds of one causal attention kernel."""

    batch: int
    sequence: int
    heads: int
    head_width: int
    precision: str
    seconds: float
    backward: bool = False

    @property
    def flops_per_second(self) -> float:
        """FLOP/s with the causal half counted once; the backward pass has 2.5 times the forward FLOPs."""
        forward = 2.0 * self.batch * self.heads * self.sequence**2 * self.head_width
        return forward * (2.5 if self.backward else 1.0) / self.seconds


@dataclass(frozen=True)
class CollectiveTiming:
    """Seconds of one collective over `ranks` ranks on `nodes` nodes; `bytes` is the unsharded message."""

    kind: str
    ranks: int
    nodes: int
    bytes: float
    seconds: float


@dataclass(frozen=True)
class Profile:
    """The measurements of one machine."""

    device: str
    gemm: tuple[MatmulTiming, ...] = ()
    attention: tuple[AttentionTiming, ...] = ()
    collectives: tuple[CollectiveTiming, ...] = ()
    sustained_flops_per_second: Mapping[str, float] = field(default_factory=dict[str, float])
    """FLOP/s of a large matmul after seconds without a pause, by precision."""
    copy_bytes_per_second: float | None = None
    host_bytes_per_second: float | None = None
    num_devices: int | None = None
    num_sms: int | None = None
    memory_bytes: int | None = None
    calibration: Calibration | None = None
    measured: Mapping[str, str] = field(default_factory=dict[str, str])
    """Date, device and versions of the measurement, as text."""

    def machine(self, num_devices: int | None = None) -> Cluster:
        """The machine as a cluster of one node, with all of its devices or as many as are asked for."""
        plain = generic_cluster(self.known_device())
        count = num_devices or self.num_devices or plain.devices_per_node
        found = self.applied_to(plain.of_size(num_nodes=1, devices_per_node=count))
        title = f"{self.measured.get('device', plain.device.title)}, measured {self.measured.get('date', '')}"
        return replace(found, device=replace(found.device, title=title.strip()))

    def known_device(self) -> Device:
        """The device of the catalogue, or one that is described by measurements alone."""
        try:
            return find_device(self.device)
        except SpecError:
            return self._measured_device()

    def _measured_device(self) -> Device:
        if not self.gemm or not self.memory_bytes or not self.num_sms or not self.copy_bytes_per_second:
            raise SpecError(
                f"the catalogue has no {self.device!r}, and the profile does not describe it",
                where="--on",
                hint="a profile of an unknown device needs gemm, copy_bytes_per_second and machine",
            )
        best = self._best_matmuls()
        host = Link("host", self.host_bytes_per_second or ASSUMED_HOST_BYTES_PER_SECOND, PEER_LATENCY_SECONDS)
        return Device(
            name=self.device,
            title=self.device,
            memory_bytes=self.memory_bytes,
            memory_bytes_per_second=self.copy_bytes_per_second,
            num_sms=self.num_sms,
            peak_flops_per_second=best,
            best_matmul_flops_per_second=best,
            sustained_share=self._sustained_share(),
            peer=replace(host, name="peer"),
            host=host,
            devices_per_node=self.num_devices or 1,
        )

    def applied_to(self, cluster: Cluster) -> Cluster:
        """The cluster with data-sheet figures replaced by the measurements of its kind of device."""
        if self.device and self.known_device().name != cluster.device.name:
            raise SpecError(
                f"the profile was measured on {self.device}, the cluster has {cluster.device.name}",
                where="--profile",
                hint="measure this machine with `hardware probe`, or leave the profile out",
            )
        device = self._device(cluster.device)
        measured = replace(
            cluster,
            device=device,
            peer=self._link(cluster.peer, across_nodes=False),
            network=self._link(cluster.network, across_nodes=True),
            host=device.host,
        )
        return measured if self.calibration is None else self.calibration.applied_to(measured)

    def _device(self, device: Device) -> Device:
        best = {**device.best_matmul_flops_per_second, **self._best_matmuls()}
        share = {**device.sustained_share, **self._sustained_share()}
        attention = best_attention(self.attention)
        if attention is not None:
            attention *= self._sustained_share().get("bf16", 1.0)
        host = device.host
        if self.host_bytes_per_second is not None:
            host = replace(host, bytes_per_second=self.host_bytes_per_second)
        return replace(
            device,
            best_matmul_flops_per_second=best,
            sustained_share=share,
            copy_bytes_per_second=self.copy_bytes_per_second or device.copy_bytes_per_second,
            best_attention_flops_per_second=attention or device.best_attention_flops_per_second,
            num_sms=self.num_sms or device.num_sms,
            memory_bytes=self.memory_bytes or device.memory_bytes,
            host=host,
        )

    def _best_matmuls(self) -> dict[str, float]:
        precisions = {timing.precision for timing in self.gemm}
        return {
            precision: max(t.flops_per_second for t in self.gemm if t.precision == precision)
            for precision in precisions
        }

    def _sustained_share(self) -> dict[str, float]:
        """Sustained over best matmul rate by precision; fp16 runs on the same tensor cores as bf16."""
        best, sustained = self._best_matmuls(), self.sustained_flops_per_second
        share = {name: min(1.0, rate / best[name]) for name, rate in sustained.items() if name in best}
        return share | {"fp16": share["bf16"]} if "bf16" in share and "fp16" not in share else share

    def _link(self, link: Link, *, across_nodes: bool) -> Link:
        timings = [t for t in self.collectives if (t.nodes > 1) is across_nodes and t.ranks > 1]
        if not timings:
            return link
        fitted = fit_link(timings)
        return Link(
            link.name, fitted[1] or link.bytes_per_second, fitted[0] or link.latency_seconds, efficiency=1.0
        )


def best_attention(timings: Sequence[AttentionTiming]) -> float | None:
    """FLOP/s of the best shape, over its measured forward and backward kernels together."""
    passes: dict[tuple[int, ...], list[AttentionTiming]] = {}
    for timing in timings:
        if timing.precision in ("bf16", "fp16"):
            shape = (timing.batch, timing.sequence, timing.heads, timing.head_width)
            passes.setdefault(shape, []).append(timing)
    rates = [
        sum(t.flops_per_second * t.seconds for t in same) / sum(t.seconds for t in same)
        for same in passes.values()
    ]
    return max(rates, default=None)


def fit_link(timings: list[CollectiveTiming]) -> tuple[float, float]:
    """Latency per hop, from the smallest message, and bytes per second, from the largest."""
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
        raise SpecError(f"{key} = {number!r} is not a positive number", where=where, hint=PROBE_HINT)
    return float(number)


def _entries(document: Mapping[str, Any], key: str, where: str) -> list[Mapping[str, Any]]:
    entries = document.get(key, [])
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict) for entry in cast("list[Any]", entries)
    ):
        raise SpecError(f"{key} is not a list of objects", where=where)
    return cast("list[Mapping[str, Any]]", entries)


def profile_from(document: Mapping[str, Any], *, where: str) -> Profile:
    """A profile from its JSON document; the error for a malformed entry names its list and position."""

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
    return Profile(
        str(document.get("device", "")),
        gemm,
        attention,
        collectives,
        _rates(document, "sustained_flops_per_second", where),
        **copies,
        **_machine(document, where),
        calibration=_calibration(document, where),
        measured={str(key): str(value) for key, value in _object(document, "measured", where).items()},
    )


def _calibration(document: Mapping[str, Any], where: str) -> Calibration | None:
    found = _object(document, "calibration", where)
    names = ("compute", "communication")
    factors = {name: _number(found, name, f"{where}: calibration") for name in names if name in found}
    return Calibration(**factors, num_runs=int(found.get("num_runs", 0))) if factors else None


def _rates(document: Mapping[str, Any], key: str, where: str) -> dict[str, float]:
    rates = _object(document, key, where)
    return {name: _number(rates, name, f"{where}: {key}") for name in rates}


def _object(document: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    found = document.get(key, {})
    if not isinstance(found, dict):
        raise SpecError(f"{key} is not an object", where=where, hint=PROBE_HINT)
    return cast("Mapping[str, Any]", found)


def _machine(document: Mapping[str, Any], where: str) -> dict[str, int | None]:
    machine = _object(document, "machine", where)
    keys = ("num_devices", "num_sms", "memory_bytes")
    return {key: int(_number(machine, key, f"{where}: machine")) if key in machine else None for key in keys}


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


def read_profile(path: Path, *, where: str = "--profile") -> Profile:
    """The profile at this path, as `hardware probe` writes it."""
    try:
        document = read_json_file(path, max_bytes=64 * MIB)
    except (OSError, ValueError) as error:
        raise SpecError(
            f"cannot read {path}: {read_trouble(error)}",
            where=where,
            hint="`meshwright hardware probe` writes one",
        ) from error
    if not isinstance(document, dict):
        raise SpecError(
            f"{path} is not a JSON object", where=where, hint="`meshwright hardware probe` writes one"
        )
    return profile_from(cast("dict[str, Any]", document), where=str(path))


def cluster_of(text: str) -> Cluster:
    """The cluster that `--on` names: as in `parse_cluster`, or a profile (`here.json`, `here.json:4`)."""
    path, _, count = text.partition(".json")
    if not (text.endswith(".json") or ".json:" in text):
        return parse_cluster(text)
    wanted = count.removeprefix(":")
    if wanted and (not wanted.isdigit() or int(wanted) == 0):
        raise SpecError(
            f"{wanted!r} is not a number of devices", where="--on", hint=f"for example {path}.json:4"
        )
    return read_profile(Path(f"{path}.json"), where="--on").machine(int(wanted) if wanted else None)
