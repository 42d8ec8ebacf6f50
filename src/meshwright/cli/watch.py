"""`meshwright watch`: a live page of runs, in the browser."""

import importlib.util
import ipaddress
import socket
from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.cli.completion_values import complete_cluster

PACKAGES = ("starlette", "uvicorn")
DEFAULT_PORT = 8765


def watch(
    directories: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Run directories, or folders with runs inside.")
    ],
    host: Annotated[
        str, typer.Option(help="Address to listen on; others than this machine need the token of the URL.")
    ] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, help="Port; 0 takes any.", show_default=f"{DEFAULT_PORT}, or a free one"
        ),
    ] = None,
    on: Annotated[
        str,
        typer.Option(
            "--on",
            help="Predict for this cluster instead of the recorded device.",
            autocompletion=complete_cluster,
        ),
    ] = "",
) -> None:
    """Show runs in the browser while they go on: one page that follows their files.

    Loss, gradient norm, speed and memory against the prediction, step time by rank, events, time left. It
    reads files only, so it works for runs of any launcher, for finished runs, and on a login node. Through
    ssh: `ssh -L 8765:localhost:8765 HOST`, then open the printed address. /metrics is for Prometheus.
    """
    _require_packages()
    from meshwright.hardware.profile import cluster_of
    from meshwright.observe.watch.watched_runs import WatchedRuns, find_runs

    if on:
        cluster_of(on)  # an unknown cluster is refused now
    watched = WatchedRuns(find_runs(directories), on=on)
    _serve(watched, host, port)


def _require_packages() -> None:
    from meshwright.errors import SpecError

    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise SpecError(
            f"watch needs {' and '.join(missing)}, not installed here",
            where="watch",
            hint='pip install "meshwright[watch]"; `meshwright report DIR` writes a page without it',
        )


def _serve(watched: Any, host: str, port: int | None) -> None:
    import uvicorn

    from meshwright.observe.watch.server import build_app, new_token

    token = None if _is_loopback(host) else new_token()
    listening = _listen(host, port)
    typer.echo(f"{_address(host, listening.getsockname()[1], token)}", nl=True)
    typer.echo("Ctrl-C ends it; the runs go on.", err=True)
    config = uvicorn.Config(
        build_app(watched, token=token),
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=1,
    )
    uvicorn.Server(config).run(sockets=[listening])


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _listen(host: str, port: int | None) -> socket.socket:
    """A socket on the port; where none was asked for and the usual one is taken, on any free port."""
    from meshwright.errors import SpecError

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    tries = [DEFAULT_PORT, 0] if port is None else [port]
    for number in tries:
        found = socket.socket(family, socket.SOCK_STREAM)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind((host, number))
            found.listen(128)  # who opens the address at once waits, and is not refused
        except OSError as error:
            found.close()
            reason = error.strerror or str(error)
            continue
        return found
    raise SpecError(
        f"cannot listen on {host}:{tries[-1]}: {reason}", where="--port", hint="choose another with --port"
    )


def _address(host: str, port: int, token: str | None) -> str:
    shown = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(host, host)
    name = f"[{shown}]" if ":" in shown else shown
    return f"http://{name}:{port}/" + (f"?token={token}" if token else "")
