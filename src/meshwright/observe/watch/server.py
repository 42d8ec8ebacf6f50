"""The web server of `meshwright watch`: one page, its data as JSON, and a stream of what is new.

Nothing is loaded from elsewhere. Requests must name a host of this machine, so that no page of another site
can read a run through the browser; a server that others can reach needs a token in the address as well.
"""

import asyncio
import hmac
import json
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files as package_files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

import meshwright
from meshwright.observe.watch.prometheus import exposition
from meshwright.observe.watch.watched_runs import WatchedRuns

LOOPBACK = ("127.0.0.1", "localhost", "::1")
MAX_BUCKETS = 2000
SCRIPTS = ("watch.js", "histograms.js")
_STREAM_SECONDS = 0.5
_KEEP_ALIVE_SECONDS = 15.0


def build_app(watched: WatchedRuns, *, token: str | None = None) -> Starlette:
    """The application; `token` None: only requests to a name of this machine are answered."""
    pages = _Pages(watched)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        with watched:
            yield

    routes = [
        Route("/", pages.page),
        Route("/api/runs", pages.runs),
        Route("/api/curves", pages.curves),
        Route("/api/details", pages.details),
        Route("/api/histograms", pages.histograms),
        Route("/api/stream", pages.stream),
        Route("/metrics", pages.metrics),
    ]
    gate, packed = Middleware(_Gate, token=token), Middleware(GZipMiddleware, minimum_size=4096)
    return Starlette(routes=routes, lifespan=lifespan, middleware=[gate, packed])


class _Gate:
    """Refuses requests without the token, or, where there is none, to a name that is not this machine's."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._is_allowed(Request(scope)):
            text = "the token is missing or wrong: open the address that `meshwright watch` printed\n"
            refused = PlainTextResponse(text, status_code=403)
            await refused(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_allowed(self, request: Request) -> bool:
        if self._token is not None:
            given = request.query_params.get("token", "")
            return hmac.compare_digest(given.encode(), self._token.encode())
        host = request.headers.get("host", "")
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        return name in LOOPBACK


class _Pages:
    """What each address answers. Plain functions run in threads, so none of them holds up the stream."""

    def __init__(self, watched: WatchedRuns) -> None:
        self._watched = watched

    def page(self, _: Request) -> Response:
        nonce = secrets.token_urlsafe(16)
        policy = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'unsafe-inline'; connect-src 'self'; "
            "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        headers = {
            "content-security-policy": policy,
            "referrer-policy": "no-referrer",
            "cache-control": "no-store",
        }
        return HTMLResponse(render_page(nonce), headers=headers)

    def runs(self, _: Request) -> Response:
        return _json({"runs": self._snapshots()})

    def curves(self, request: Request) -> Response:
        run = self._run(request)
        if run is None:
            return _json({"error": "there is no such run"}, status=404)
        num_buckets = _whole(request, "points") or 600
        first, last = _whole(request, "first"), _whole(request, "last")
        return _json(run.curves(max(2, min(num_buckets, MAX_BUCKETS)), first, last))

    def details(self, request: Request) -> Response:
        run = self._run(request)
        if run is None:
            return _json({"error": "there is no such run"}, status=404)
        return _json({"events": run.events(), "ranks": run.heat_map(), "timeline": run.timeline()})

    def histograms(self, request: Request) -> Response:
        run = self._run(request)
        if run is None:
            return _json({"error": "there is no such run"}, status=404)
        chosen = {key: request.query_params.get(key, "")[:200] for key in ("kind", "name")}
        numbers = {key: _whole(request, key) for key in ("step", "layer")}
        return _json({"histograms": run.histograms(**chosen, **numbers)})

    def metrics(self, _: Request) -> Response:
        return PlainTextResponse(exposition(self._snapshots()), media_type="text/plain; version=0.0.4")

    async def stream(self, _: Request) -> Response:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(self._messages(), media_type="text/event-stream", headers=headers)

    async def _messages(self) -> AsyncIterator[str]:
        """The state of all runs, whenever something changed; a comment now and then keeps tunnels open."""
        seen, silent_seconds = -1, 0.0
        while True:
            if self._watched.version != seen:
                seen, silent_seconds = self._watched.version, 0.0
                snapshots = await asyncio.to_thread(self._snapshots)
                yield f"data: {_text({'runs': snapshots})}\n\n"
            elif silent_seconds >= _KEEP_ALIVE_SECONDS:
                silent_seconds = 0.0
                yield ": still here\n\n"
            await asyncio.sleep(_STREAM_SECONDS)
            silent_seconds += _STREAM_SECONDS

    def _snapshots(self) -> list[dict[str, Any]]:
        return [run.snapshot() for run in self._watched.runs]

    def _run(self, request: Request) -> Any:
        index = _whole(request, "run")
        return (
            self._watched.runs[index] if index is not None and 0 <= index < len(self._watched.runs) else None
        )


def _whole(request: Request, name: str) -> int | None:
    given = request.query_params.get(name, "")
    return int(given) if given.isascii() and given.isdigit() and len(given) < 18 else None


def _json(value: Any, status: int = 200) -> Response:
    return Response(_text(value), status_code=status, media_type="application/json")


def _text(value: Any) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def render_page(nonce: str) -> str:
    """The page: style and script are inside of it, and its script carries the nonce."""
    folder = package_files("meshwright.observe.watch")
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    return environment.from_string(folder.joinpath("watch.html.j2").read_text(encoding="utf-8")).render(
        nonce=nonce,
        version=meshwright.__version__,
        style=Markup(folder.joinpath("watch.css").read_text(encoding="utf-8")),
        script=Markup("\n".join(folder.joinpath(name).read_text(encoding="utf-8") for name in SCRIPTS)),
    )


def new_token() -> str:
    """A token that nobody guesses."""
    return secrets.token_urlsafe(24)
