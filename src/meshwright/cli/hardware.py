"""`meshwright hardware`: the devices and clusters that are known. Needs no torch."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.cli.check import Quiet
from meshwright.cli.main import new_app

app = new_app(help="List known devices and clusters, and measure this machine.")


@app.callback()
def _group() -> None:
    """Keep `list` a verb of its own."""


@app.command("list")
def list_(
    sources: Annotated[bool, typer.Option("--sources", help="Show every number with its source.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Devices with their dense peaks, memory and links; clusters with their network."""
    from meshwright.hardware.catalogue import built_in_clusters, built_in_devices

    devices, clusters = built_in_devices(), built_in_clusters()
    if as_json:
        document = {
            "devices": {name: _device_document(device) for name, device in devices.items()},
            "clusters": {name: _cluster_document(cluster) for name, cluster in clusters.items()},
        }
        typer.echo(json.dumps(document))
        return
    typer.echo(f"{'device':<11} {'bf16':>6} {'fp8':>6} {'memory':>9} {'TB/s':>6} {'link GB/s':>10}  title")
    for name, device in devices.items():
        typer.echo(_device_line(name, device))
        if sources:
            typer.echo("\n".join(f"    {key}: {source}" for key, source in device.sources.items()))
    typer.echo(f"\n{'cluster':<11} {'device':<11} {'per node':>8} {'nodes':>6} {'network GB/s':>13}")
    for name, cluster in clusters.items():
        network = cluster.network.bytes_per_second / 1e9
        typer.echo(
            f"{name:<11} {cluster.device.name:<11} {cluster.devices_per_node:>8} "
            f"{cluster.max_nodes or '':>6} {network:>13.1f}"
        )
        if sources:
            typer.echo("\n".join(f"    {key}: {source}" for key, source in cluster.sources.items()))


@app.command()
def probe(
    output: Annotated[Path, typer.Option("-o", "--output", help="Where the profile is written.")] = Path(
        "machine.json"
    ),
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    ranks: Annotated[
        int | None,
        typer.Option(min=2, max=1024, help="Measure collectives of so many ranks; by default all GPUs."),
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0.001, max=60, help="How long each measurement is repeated.")
    ] = 0.2,
    quiet: Quiet = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Measure this machine for about a minute and write its profile. Needs torch.

    `plan --on machine.json` and `predict --on machine.json` then use the measured rates instead of the data
    sheet; `predict --profile` applies them to a larger cluster of the same device.
    """
    import torch

    from meshwright.bench.probe import probe as measure
    from meshwright.hardware.profile import profile_from
    from meshwright.mesh import choose_device

    chosen = choose_device(_device_kind(device), 0)
    _require_writable(output)

    def log(text: str) -> None:
        if not quiet:
            typer.echo(f"measuring {text}", err=True)

    document = measure(chosen, seconds=seconds, log=log)
    num_ranks = ranks or (torch.cuda.device_count() if chosen.type == "cuda" else 1)
    if num_ranks > 1:
        document["collectives"] = _collectives(num_ranks, chosen.type, seconds, log)
    found = profile_from(document, where=str(output))
    _write(output, json.dumps(document, indent=1) + "\n")
    typer.echo(f"written: {output}", err=True)
    _show_comparison(data_sheet_cluster(found), found, as_json=as_json)


@app.command()
def compare(
    profile: Annotated[
        Path, typer.Argument(metavar="PROFILE", help="Measurements that `hardware probe` wrote.")
    ],
    on: Annotated[
        str, typer.Option("--on", help="The cluster it was measured on; its own device by default.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Compare a measured profile with the data sheet of the same machine.

    `plan` and `predict` use the measured column wherever there is one.
    """
    from meshwright.hardware import parse_cluster, read_profile

    found = read_profile(profile, where="PROFILE")
    _show_comparison(parse_cluster(on) if on else data_sheet_cluster(found), found, as_json=as_json)


def data_sheet_cluster(found: Any) -> Any:
    """The machine of a profile as the catalogue describes it, without measurements."""
    from meshwright.hardware.catalogue import generic_cluster

    return generic_cluster(found.known_device())


def _device_kind(device: str) -> str:
    from meshwright.errors import SpecError

    if device in ("auto", "cpu", "cuda"):
        return device
    raise SpecError(f"there is no device {device!r}", where="--device", hint="auto, cpu or cuda")


def _collectives(
    num_ranks: int, device: str, seconds: float, log: Callable[[str], None]
) -> list[dict[str, Any]]:
    """The rows of `bench comm`, measured by this many ranks."""
    import tempfile

    from meshwright.errors import RunError
    from meshwright.hardware.profile import RING_SHARE
    from meshwright.launch.local import run_local

    log(f"collectives of {num_ranks} ranks")
    with tempfile.TemporaryDirectory(prefix="meshwright-probe-") as folder:
        arguments = ["bench", "comm", "--device", device, "--seconds", str(seconds), "--quiet", "-o", folder]
        if run_local(arguments, num_ranks=num_ranks) != 0:
            raise RunError("the ranks that measure collectives failed", where="bench comm")
        rows = json.loads((Path(folder) / "comm.json").read_text())["sections"]["collectives"]
    valid = [row for row in rows if row["kind"] in RING_SHARE and "error" not in row]
    return [{key: row[key] for key in ("kind", "ranks", "nodes", "bytes", "seconds")} for row in valid]


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _unwritable(path, str(error.strerror)) from None


def _require_writable(path: Path) -> None:
    """SpecError for a file that cannot be written, before a minute of measuring and not after."""
    if path.is_dir():
        raise _unwritable(path, "it is a folder")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise _unwritable(path, "its folder does not exist, or you may not write to it")


def _unwritable(path: Path, why: str) -> Exception:
    from meshwright.errors import SpecError

    return SpecError(
        f"the profile cannot be written: {why}", where=str(path), hint="name another file with -o"
    )


def _show_comparison(data_sheet: Any, found: Any, *, as_json: bool) -> None:
    rows = _compared(data_sheet, found.applied_to(data_sheet))
    if as_json:
        typer.echo(json.dumps({name: {"catalogue": a, "measured": b} for name, a, b in rows}))
        return
    if found.measured:
        facts = ", ".join(
            f"{key} {found.measured[key]}" for key in ("device", "date", "torch") if key in found.measured
        )
        typer.echo(f"measured on {facts.removeprefix('device ')}")
    typer.echo(f"{'':<34} {'catalogue':>12} {'measured':>12}")
    for name, catalogue, measured in rows:
        typer.echo(f"{name:<34} {catalogue:>12.4g} {measured:>12.4g}")


def _compared(data_sheet: Any, measured: Any) -> list[tuple[str, float, float]]:
    """(name, data sheet, measured) of every rate that a profile can replace."""
    from meshwright.plan.time.kernels import copy_rate

    rows = [
        (
            f"{precision} matmul, sustained TFLOP/s",
            data_sheet.device.matmul_ceiling(precision) / 1e12,
            measured.device.matmul_ceiling(precision) / 1e12,
        )
        for precision, best in measured.device.best_matmul_flops_per_second.items()
        if best != data_sheet.device.best_matmul_flops_per_second.get(precision)
    ]
    rows.append(("memory, TB/s", copy_rate(data_sheet.device) / 1e12, copy_rate(measured.device) / 1e12))
    for name in ("peer", "network", "host"):
        before, after = getattr(data_sheet, name), getattr(measured, name)
        rows.append((f"{name} link, GB/s", before.bytes_per_second / 1e9, after.bytes_per_second / 1e9))
        rows.append((f"{name} link, microseconds", before.latency_seconds * 1e6, after.latency_seconds * 1e6))
    return rows


def _device_line(name: str, device: Any) -> str:
    from meshwright.units import show_bytes

    peaks = device.peak_flops_per_second
    bf16 = peaks.get("bf16", peaks.get("fp16", peaks.get("fp32", 0.0))) / 1e12
    fp8 = f"{peaks['fp8'] / 1e12:.0f}" if "fp8" in peaks else "-"
    return (
        f"{name:<11} {bf16:>6.4g} {fp8:>6} {show_bytes(device.memory_bytes):>9} "
        f"{device.memory_bytes_per_second / 1e12:>6.2f} {device.peer.bytes_per_second / 1e9:>10.0f}  "
        f"{device.title}"
    )


def _device_document(device: Any) -> dict[str, Any]:
    return {
        "title": device.title,
        "memory_bytes": device.memory_bytes,
        "memory_bytes_per_second": device.memory_bytes_per_second,
        "num_sms": device.num_sms,
        "peak_flops_per_second": dict(device.peak_flops_per_second),
        "best_matmul_flops_per_second": dict(device.best_matmul_flops_per_second),
        "peer_bytes_per_second": device.peer.bytes_per_second,
        "host_bytes_per_second": device.host.bytes_per_second,
        "devices_per_node": device.devices_per_node,
        "aliases": list(device.aliases),
        "sources": dict(device.sources),
    }


def _cluster_document(cluster: Any) -> dict[str, Any]:
    return {
        "device": cluster.device.name,
        "devices_per_node": cluster.devices_per_node,
        "max_nodes": cluster.max_nodes,
        "network_bytes_per_second": cluster.network.bytes_per_second,
        "host_memory_bytes": cluster.host_memory_bytes,
        "sources": dict(cluster.sources),
    }
