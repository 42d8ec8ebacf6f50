"""A real S3-compatible server (SeaweedFS), and a proxy before it that injects faults."""

import http.client
import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ACCESS_KEY, SECRET_KEY = "lab", "labsecret"


def server_program() -> str | None:
    """The program `weed`, from the environment's own folder or the path."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.is_file() else shutil.which("weed")


@contextmanager
def s3_server(folder: Path) -> Iterator[int]:
    """The port of a server that keeps its objects in `folder`."""
    program = server_program()
    assert program is not None
    ports = [_free_port() for _ in range(8)]
    identity = {
        "name": "lab",
        "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    names = (
        "master.port",
        "volume.port",
        "filer.port",
        "s3.port",
        "master.port.grpc",
        "volume.port.grpc",
        "filer.port.grpc",
        "s3.port.grpc",  # otherwise the port + 10,000, which may be none
    )
    settings = [f"-{name}={port}" for name, port in zip(names, ports, strict=True)]
    command = [program, "server", "-master.telemetry=false", f"-dir={folder}", "-ip=127.0.0.1"]
    command += ["-ip.bind=127.0.0.1", "-s3", f"-s3.config={folder / 's3.json'}", "-volume.max=20", *settings]
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0"]  # fixed ports, which another server may have
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        _wait_for(ports[3], process, folder / "log")
        yield ports[3]
    finally:
        process.kill()
        process.wait()


class Faults:
    """What the proxy does to answers: called with the path and the number of the request for it.

    `spoil` is called with the path and the number of the upload (PUT): what it returns is done to the content
    whenever the object is read, until it is uploaded again. `lose_answer` answers an upload that was stored
    with 500. `has_old_listings` freezes the answers of listings.
    """

    def __init__(self) -> None:
        self.delay: Callable[[str, int], float] = lambda path, number: 0.0
        self.status: Callable[[str, int], int | None] = lambda path, number: None
        self.truncate: Callable[[str, int], bool] = lambda path, number: False
        self.spoil: Callable[[str, int], Callable[[bytes], bytes] | None] = lambda path, number: None
        self.lose_answer: Callable[[str, int], bool] = lambda path, number: False
        self.has_old_listings = False
        self.requests: list[str] = []
        self.uploads: list[str] = []
        self.spoiled: dict[str, Callable[[bytes], bytes]] = {}
        self.listings: dict[str, tuple[int, list[tuple[str, str]], bytes]] = {}

    def count(self, path: str) -> int:
        """Requests for a path so far."""
        return self.requests.count(path)


@contextmanager
def faulty_proxy(port: int, faults: Faults) -> Iterator[int]:
    """The port of a proxy to the server that injects faults into GET answers."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(port, faults))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _handler(port: int, faults: Faults) -> type[BaseHTTPRequestHandler]:
    """The class of the proxy's requests, bound to its server and its faults."""
    return type("Handler", (_Handler,), {"port": port, "faults": faults})


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    port: int
    faults: Faults

    def handle_any(self) -> None:
        path = self.path.partition("?")[0]
        self.faults.requests.append(path)
        number = self.faults.count(path)
        time.sleep(self.faults.delay(path, number))
        status = self.faults.status(path, number)
        if status is not None:
            self._answer(status, [], b"")
            return
        if self.command == "PUT":
            self._note_upload(path)
        status, headers, content = self._listed() if "list-type=" in self.path else self._forwarded()
        if self.command == "PUT" and self.faults.lose_answer(path, self.faults.uploads.count(path)):
            status, headers, content = 500, [], b""
        if self.command == "GET" and path in self.faults.spoiled and status in (200, 206):
            content = self.faults.spoiled[path](content)
        if self.command == "GET" and self.faults.truncate(path, number):
            content = content[: len(content) // 2]  # a complete answer with half of the bytes
        self._answer(status, headers, content)

    def _note_upload(self, path: str) -> None:
        """Remember how the content of this upload comes back."""
        self.faults.uploads.append(path)
        self.faults.spoiled.pop(path, None)
        spoil = self.faults.spoil(path, self.faults.uploads.count(path))
        if spoil is not None:
            self.faults.spoiled[path] = spoil

    def _listed(self) -> tuple[int, list[tuple[str, str]], bytes]:
        """The answer of a listing; the one of before where listings are frozen."""
        known = self.faults.listings
        if not self.faults.has_old_listings or self.path not in known:
            known[self.path] = self._forwarded()
        return known[self.path]

    def _forwarded(self) -> tuple[int, list[tuple[str, str]], bytes]:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        upstream = http.client.HTTPConnection("127.0.0.1", self.port)
        upstream.request(self.command, self.path, body, dict(self.headers))
        answer = upstream.getresponse()
        content = answer.read()
        headers = [(name, value) for name, value in answer.getheaders() if name.lower() not in _OWN]
        if self.command == "HEAD":
            headers.append(("Content-Length", answer.getheader("Content-Length") or "0"))
        upstream.close()
        return answer.status, headers, content

    def _answer(self, status: int, headers: list[tuple[str, str]], content: bytes) -> None:
        try:
            self.send_response(status)
            for name, value in headers:
                self.send_header(name, value)
            if self.command != "HEAD":
                self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)
        except OSError:
            self.close_connection = True  # the client gave up

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_any

    def log_message(self, format: str, *args: Any) -> None:
        pass


_OWN = ("content-length", "transfer-encoding", "connection")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(300):
        assert process.poll() is None, log.read_text()[-2000:]
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
            connection.request("GET", "/")
            connection.getresponse().read()
            connection.close()
            return
        except OSError:
            time.sleep(0.1)
    raise AssertionError(f"the server did not start: {log.read_text()[-2000:]}")
