"""The store in which ranks find each other, and the wait until all of them have arrived.

Local ranks meet in a file. Otherwise rank 0, or torchrun's agent, listens at an address: rank 0 on the named
interface only. Every key has a prefix that is secret to the run, and another one for every time that this
process joins, so that a second `fit` in one program never reads the keys of the first.
"""

import contextlib
import datetime
import errno
import functools
import ipaddress
import itertools
import os
import resource
import secrets
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from meshwright.errors import LaunchError, RunError, SpecError
from meshwright.launch.launched import LaunchedRank
from meshwright.launch.meeting import Meeting, StoreAddress, StoreFile

SECRET = "MESHWRIGHT_RUN_SECRET"
"""The variable with the secret of the run, for ranks that share no run directory."""
SECRET_FILE = ".secret"
_NOTICE_SECONDS = 10.0
_POLL_SECONDS = 0.2
_CONNECT_SECONDS = 3.0
_MOST_SHOWN, _MOST_TRIES = 16, 5
# Files that rank 0 opens beside the connections of the other ranks: data, logs, sockets of collectives.
_OTHER_FILES = 1024


def meet(
    launched: LaunchedRank, meeting: Meeting, *, timeout_seconds: float, run_dir: Path | None = None
) -> dist.Store:
    """The store of this world, once all ranks have arrived; all ranks call it. Says whom it waits for."""
    deadline, prefix, hint = time.monotonic() + timeout_seconds, "meshwright", "do all ranks run?"
    if isinstance(meeting, StoreAddress):
        prefix = f"{prefix}/{run_secret(run_dir)}/{meeting.attempt}"
        hint = f"do they run, and do all hosts see the same {run_dir}?" if run_dir else hint
        if not _is_host(launched, meeting):
            _wait_for_listener(launched, meeting, deadline)
    while True:
        opened = _open_living_store(launched, meeting, deadline)
        store = dist.PrefixStore(f"{prefix}/{next(opened.joins)}", opened.store)
        store.set_timeout(datetime.timedelta(seconds=timeout_seconds))
        if _arrive(store, launched, meeting):
            _wait_for_all(store, launched, deadline, hint)
            return store
        _await_new_store(launched, meeting, deadline)


def _arrive(store: dist.Store, launched: LaunchedRank, meeting: Meeting) -> bool:
    """Enter this rank; False in the store of an earlier start, where a process of this rank has arrived.

    After a failure, the ranks of one node may be back before rank 0 of another node has noticed it.
    """
    key, token = f"arrived/{launched.rank}", f"{socket.gethostname()} {os.getpid()} {time.time()}"
    if not isinstance(meeting, StoreAddress) or meeting.is_hosted_by_agent or launched.rank == 0:
        store.set(key, token)
        return True
    try:
        return store.compare_set(key, "", token).decode() == token
    except RuntimeError:  # rank 0 ended just now, and its store with it
        return False


def _open_living_store(launched: LaunchedRank, meeting: Meeting, deadline: float) -> "_OpenStore":
    """Open the store; another time where rank 0 of an earlier start ended while this rank connected."""
    for _ in range(_MOST_TRIES):
        tried_at = time.monotonic()
        try:
            return _open_store(launched, meeting)
        except LaunchError:
            is_host = not isinstance(meeting, StoreAddress) or _is_host(launched, meeting)
            if is_host or time.monotonic() - tried_at > _CONNECT_SECONDS:  # another program listens there
                raise
            _await_new_store(launched, meeting, deadline)
    return _open_store(launched, meeting)


def _await_new_store(launched: LaunchedRank, meeting: Meeting, deadline: float) -> None:
    """Forget the store of an earlier world, and wait a moment for the one that rank 0 opens next."""
    _open_store.cache_clear()
    if time.monotonic() > deadline:
        raise RunError(
            f"rank {launched.rank} has arrived already, in the store of an earlier start",
            where="start of the ranks",
            hint="does rank 0 still run, from before a failure? End it, or wait for its timeout",
        )
    time.sleep(_POLL_SECONDS)
    if isinstance(meeting, StoreAddress):
        _wait_for_listener(launched, meeting, deadline)


def run_secret(run_dir: Path | None) -> str:
    """The secret of the run: a variable, else a file in the run directory that the first rank writes."""
    if os.environ.get(SECRET):
        return os.environ[SECRET]
    if run_dir is None:
        return ""
    path, draft = run_dir / SECRET_FILE, run_dir / f"{SECRET_FILE}-{secrets.token_hex(8)}"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(secrets.token_hex(16))
            with contextlib.suppress(FileExistsError):
                os.link(draft, path)  # atomic, also on NFS: all ranks read the same secret
            draft.unlink()
        return path.read_text().strip()
    except OSError as error:
        raise SpecError(
            f"the run directory cannot be written: {error.strerror or error}",
            where=str(run_dir),
            hint="name another directory: --dir, or directory= in Python",
        ) from None


class _OpenStore:
    """A store that this process keeps for its life, and how often it has joined a world through it."""

    def __init__(self, store: dist.Store) -> None:
        self.store, self.joins = store, itertools.count()


@functools.cache
def _open_store(launched: LaunchedRank, meeting: Meeting) -> _OpenStore:
    """Open the store once: a listener that rank 0 closed and opened again would lose ranks in between."""
    if isinstance(meeting, StoreFile):
        return _OpenStore(dist.FileStore(str(meeting.path), launched.num_ranks))
    listener = _listen(launched, meeting).detach() if _is_host(launched, meeting) else None
    try:
        return _OpenStore(
            dist.TCPStore(
                meeting.host,
                meeting.port,
                is_master=listener is not None,
                timeout=datetime.timedelta(seconds=60),
                wait_for_workers=False,
                master_listen_fd=listener,
            )
        )
    except dist.DistError as error:
        raise LaunchError(
            f"no store of a run answers at {meeting.host} port {meeting.port}: {str(error).splitlines()[0]}",
            where=meeting.origin,
            hint="another program listens there: set MASTER_PORT to a free port",
        ) from None


def _is_host(launched: LaunchedRank, meeting: StoreAddress) -> bool:
    return launched.rank == 0 and not meeting.is_hosted_by_agent


def _listen(launched: LaunchedRank, meeting: StoreAddress) -> socket.socket:
    """A socket that listens on the named interface; all interfaces only where the name means this host alone
    and other hosts must connect."""
    _allow_connections(launched.num_ranks)
    family, address = _resolve(meeting)
    is_unreachable = ipaddress.ip_address(address[0]).is_loopback and _has_other_hosts(launched)
    if is_unreachable:
        print(
            f"note: {meeting.host} is this host alone, and other hosts must connect: rank 0 listens on all "
            "interfaces",
            file=sys.stderr,
        )
        address = ("", meeting.port)
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise _cannot_listen(meeting, address, error) from None
    return listener


def _allow_connections(num_ranks: int) -> None:
    """Raise the limit of open files: every rank keeps one connection to the store of rank 0."""
    wanted = num_ranks + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise LaunchError(
            f"{num_ranks} ranks connect to rank 0, and it may open {hard} files",
            where="ulimit -Hn",
            hint=f"let the site raise the limit of open files to {wanted} or more",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _has_other_hosts(launched: LaunchedRank) -> bool:
    return launched.num_local_ranks is not None and not launched.is_one_host


def _resolve(meeting: StoreAddress) -> tuple[socket.AddressFamily, tuple[str, int]]:
    try:
        found = socket.getaddrinfo(meeting.host, meeting.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise LaunchError(
            f"{meeting.host!r} is no address of a host: {error}",
            where=meeting.origin,
            hint="set MASTER_ADDR to a name or an address of the host of rank 0",
        ) from None
    family, *_, address = found[0]
    return family, (str(address[0]), meeting.port)


def _cannot_listen(meeting: StoreAddress, address: tuple[str, int], error: OSError) -> LaunchError:
    facts = {
        errno.EADDRINUSE: f"port {meeting.port} of {address[0]} is in use by another program",
        errno.EADDRNOTAVAIL: f"{meeting.host} ({address[0]}) is not an address of {socket.gethostname()}, "
        "where rank 0 runs",
        errno.EACCES: f"port {meeting.port} may not be opened by this user",
    }
    fact = facts.get(error.errno or 0, f"port {meeting.port} cannot be opened: {error.strerror}")
    is_other_host = error.errno == errno.EADDRNOTAVAIL
    hint = "set MASTER_ADDR to the host of rank 0" if is_other_host else "set MASTER_PORT to a free port"
    return LaunchError(fact, where=meeting.origin, hint=hint)


def _wait_for_listener(launched: LaunchedRank, meeting: StoreAddress, deadline: float) -> None:
    """Wait until somebody listens at the address; says so every 10 seconds."""
    said_at = time.monotonic()
    while True:
        try:
            socket.create_connection((meeting.host, meeting.port), timeout=_CONNECT_SECONDS).close()
            return
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
        if time.monotonic() > deadline:
            raise RunError(
                f"rank {launched.rank} found nobody at {meeting.host} port {meeting.port}: {reason}",
                where=meeting.origin,
                hint="is rank 0 running there, and is the port open between the hosts?",
            )
        if time.monotonic() - said_at > _NOTICE_SECONDS:
            said_at = time.monotonic()
            _say(f"rank {launched.rank} waits for rank 0 at {meeting.host} port {meeting.port}: {reason}")
        time.sleep(_POLL_SECONDS)


def _wait_for_all(store: dist.Store, launched: LaunchedRank, deadline: float, hint: str) -> None:
    """Wait until all ranks have arrived; rank 0 names those that have not, every 10 seconds.

    Each rank writes one key, adds one to a counter and waits for one key: the store sees few messages.
    """
    if store.add("num_arrived", 1) == launched.num_ranks:
        store.set("all", "")
    while not _is_set(store, "all", min(_NOTICE_SECONDS, max(0.1, deadline - time.monotonic()))):
        if time.monotonic() > deadline:
            missing = _missing(store, launched)
            raise RunError(f"{missing} did not arrive", where="start of the ranks", hint=hint)
        if launched.rank == 0 or not store.check(["arrived/0"]):
            _say(f"rank {launched.rank} waits for {_missing(store, launched)}")


def _is_set(store: dist.Store, key: str, seconds: float) -> bool:
    """Whether a key is set within this time."""
    try:
        store.wait([key], datetime.timedelta(seconds=seconds))
    except RuntimeError as error:  # DistStoreError of a TCPStore, a plain one of a FileStore
        if "timeout" not in str(error).lower():
            raise
        return False
    return True


def _missing(store: dist.Store, launched: LaunchedRank) -> str:
    """`ranks 1, 3 of 4`."""
    missing = list(itertools.islice(_absent(store, range(launched.num_ranks)), _MOST_SHOWN + 1))
    shown = ", ".join(map(str, missing[:_MOST_SHOWN]))
    more = " and more" if len(missing) > _MOST_SHOWN else ""
    return f"rank{'s' if len(missing) > 1 else ''} {shown}{more} of {launched.num_ranks}"


def _absent(store: dist.Store, ranks: range) -> Iterator[int]:
    """The ranks that have not arrived, by halves: few messages where few are missing of very many."""
    if store.check([f"arrived/{rank}" for rank in ranks]):
        return
    if len(ranks) == 1:
        yield ranks[0]
        return
    middle = len(ranks) // 2
    yield from _absent(store, ranks[:middle])
    yield from _absent(store, ranks[middle:])


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
