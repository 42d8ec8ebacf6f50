"""`meshwright hardware`: the devices and clusters that are known. Needs no torch."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.cli.check import Quiet
from meshwright.cli.main import new_app

app = new_app(help="List known devices and clusters, describe your own, and measure this machine.")


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
    typer.echo(f"{'device':<11} {'bf16':>10} {'fp8':>6} {'memory':>9} {'TB/s':>6} {'link GB/s':>10}  title")
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
    comm: Annotated[
        Path | None,
        typer.Option(help="Folder that `bench comm -o` wrote, such as on several nodes: its collectives."),
    ] = None,
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

    measured = _collectives_of(comm) if comm is not None else None
    document = measure(chosen, seconds=seconds, log=log)
    num_ranks = ranks or (torch.cuda.device_count() if chosen.type == "cuda" else 1)
    if measured is not None:
        document["collectives"] = measured
    elif num_ranks > 1:
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


@app.command()
def new(
    node: Annotated[
        str, typer.Option(help="Devices of one node: '8 x h100'. A device alone has its usual number.")
    ] = "",
    link: Annotated[
        str,
        typer.Option(
            help="Link within the node, GB/s per device and direction; the data sheet's by default."
        ),
    ] = "",
    network: Annotated[
        str,
        typer.Option(help="Network, in Gb/s per direction: '400 per device', or '200 per node' if shared."),
    ] = "",
    host_memory: Annotated[str, typer.Option(help="Host memory of one node: 512GiB, 2TB.")] = "",
    storage: Annotated[
        str, typer.Option(help="Rate at which all nodes together write checkpoints: 100GB/s.")
    ] = "",
    name: Annotated[str, typer.Option(help="Name of the cluster; that of the file by default.")] = "",
    output: Annotated[Path, typer.Option("-o", "--output", help="Where the file is written.")] = Path(
        "cluster.toml"
    ),
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
) -> None:
    """Describe your own cluster in a TOML file, which --on reads: `plan MODEL --on cluster.toml:4` (4 nodes).

    Asks for what no option gives, if a person is there to answer. Enter takes the value in brackets.
    """
    from meshwright.errors import SpecError
    from meshwright.hardware.new_cluster import cluster_toml

    if output.suffix != ".toml":
        raise SpecError(
            f"{output} does not end in .toml", where="-o", hint="--on knows a file by this ending"
        )
    if output.exists() and not force:
        hint = "name another file with -o, or overwrite it with --force"
        raise SpecError(f"{output} already exists", where=str(output), hint=hint)
    _require_writable(output)
    answers = {"network": network, "link": link, "host_memory": host_memory, "storage": storage}
    described = _described(node, answers)
    _write(output, cluster_toml(name or output.stem.lower(), described))
    _show_new(output)


def _described(node: str, answers: dict[str, str]) -> Any:
    """The cluster of the options, and of the answers to the questions that they leave open."""
    from meshwright.errors import SpecError
    from meshwright.hardware import new_cluster as describe

    if not node and not sys.stdin.isatty():
        raise SpecError("no device is named", where="--node", hint="for example --node '8 x h100'")
    count, device = _answer(node, "1. Devices of one node, such as 8 x h100", None, describe.parse_node)
    count = count or device.devices_per_node
    rate = f"{device.peer.bytes_per_second / 1e9:g}"
    link = f"2. Link within the node in GB/s per device and direction ({device.sources['links.peer']})"
    network = "3. Network in Gb/s per direction, with 'per device' or 'per node' (shared by its devices)"
    memory = f"{describe.assumed_host_memory(count) // 2**30}GiB assumed"
    storage = "   Storage: GB/s at which all nodes together write checkpoints"
    return describe.NewCluster(
        device,
        count,
        peer=_answer(answers["link"], link, rate, describe.parse_link),
        network=_answer(answers["network"], network, generic_network_text(device), describe.parse_network),
        host_memory_bytes=_answer(
            answers["host_memory"], "   Host memory of one node", memory, describe.parse_host_memory
        ),
        storage=_answer(answers["storage"], storage, "not known", describe.parse_storage),
    )


def _answer(given: str, question: str, default: str | None, parse: Callable[[str], Any]) -> Any:
    """The value of an option, or of a person's answer; None for the default, and where nobody is there."""
    from meshwright.errors import SpecError

    if given:
        return parse(given)
    while sys.stdin.isatty():
        answer = str(typer.prompt(question, default=default, err=True)).strip()
        try:
            return None if answer == default else parse(answer)
        except SpecError as error:
            typer.echo(f"{error.fact}: {error.hint}", err=True)
    return None


def generic_network_text(device: Any) -> str:
    """`400 per device assumed`: the network that is assumed for a device."""
    from meshwright.hardware.catalogue import generic_cluster

    rate = generic_cluster(device).network.bytes_per_second * 8 / 1e9
    return f"{rate:g} per device assumed"


def _show_new(path: Path) -> None:
    """What was written, read back as `--on` reads it."""
    from meshwright.hardware import parse_cluster
    from meshwright.units import show_bytes

    found = parse_cluster(str(path))
    network = f"{found.network.bytes_per_second / 1e9:g} GB/s of network per device"
    link = f"{found.peer.bytes_per_second / 1e9:g} GB/s within the node"
    memory = f"{show_bytes(found.host_memory_bytes)} of host memory"
    typer.echo(f"{found.devices_per_node} x {found.device.title} per node: {link}, {network}, {memory}")
    typer.echo(f"written: {path}; `meshwright plan MODEL --on {path}:4` plans for 4 nodes", err=True)


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
    from meshwright.launch.local import run_local

    log(f"collectives of {num_ranks} ranks")
    with tempfile.TemporaryDirectory(prefix="meshwright-probe-") as folder:
        arguments = ["bench", "comm", "--device", device, "--seconds", str(seconds), "--quiet", "-o", folder]
        if run_local(arguments, num_ranks=num_ranks) != 0:
            raise RunError("the ranks that measure collectives failed", where="bench comm")
        return _collectives_of(Path(folder))


def _collectives_of(folder: Path) -> list[dict[str, Any]]:
    """The rows in a folder of `bench comm` that a profile uses."""
    from meshwright.errors import SpecError
    from meshwright.hardware.profile import RING_SHARE

    try:
        rows = json.loads((folder / "comm.json").read_text(encoding="utf-8"))["sections"]["collectives"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SpecError(
            f"this folder has no collectives: {type(error).__name__} {error}",
            where=f"{folder}/comm.json",
            hint="write it with `meshwright bench comm -o FOLDER`, without a run",
        ) from None
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
    # A device without bf16 is planned in fp16, or in fp32 where it lacks that too.
    form = next((name for name in ("bf16", "fp16") if name in peaks), "fp32")
    rate = f"{peaks.get(form, 0.0) / 1e12:.4g}" + ("" if form == "bf16" else f" {form}")
    fp8 = f"{peaks['fp8'] / 1e12:.0f}" if "fp8" in peaks else "-"
    return (
        f"{name:<11} {rate:>10} {fp8:>6} {show_bytes(device.memory_bytes):>9} "
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
