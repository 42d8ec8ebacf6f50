"""What 16,384 ranks cost the store of rank 0: the figures of docs/decisions/2026-11-16-many-ranks.md."""

import datetime
import resource
import threading
import time
from collections import Counter

import pytest
import torch
import torch.distributed as dist

from meshwright import rendezvous
from meshwright.errors import LaunchError
from meshwright.launch.launched import TORCHRUN, LaunchedRank, launched_rank
from meshwright.launch.meeting import StoreAddress, find_meeting

NUM_RANKS = 16_384
MOMENT = datetime.timedelta(seconds=30)


ADDRESS = StoreAddress("node0", 29500, is_hosted_by_agent=False, attempt="", origin="MASTER_ADDR")


class KeyStore:
    """A store that counts messages and never blocks: ranks arrive one after the other."""

    def __init__(self) -> None:
        self.keys: dict[str, int] = {}
        self.messages: Counter[str] = Counter()

    def set(self, key: str, value: str) -> None:
        self.messages["set"] += 1
        self.keys[key] = len(value)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        assert expected == "" and key not in self.keys
        self.messages["compare_set"] += 1
        self.keys[key] = len(desired)
        return desired.encode()

    def add(self, key: str, amount: int) -> int:
        self.messages["add"] += 1
        self.keys[key] = self.keys.get(key, 0) + amount
        return self.keys[key]

    def wait(self, keys: list[str], timeout: datetime.timedelta) -> None:
        self.messages["wait"] += 1

    def check(self, keys: list[str]) -> bool:
        self.messages["check"] += 1
        return all(key in self.keys for key in keys)


def rank_of(rank: int) -> LaunchedRank:
    return LaunchedRank(TORCHRUN, rank, NUM_RANKS, rank % 8, 8)


def test_each_rank_sends_three_messages_when_it_arrives():
    store = KeyStore()
    for rank in range(NUM_RANKS):
        assert rendezvous._arrive(store, rank_of(rank), ADDRESS)
        rendezvous._wait_for_all(store, rank_of(rank), time.monotonic() + 60, "")
    assert sum(store.messages.values()) == 3 * NUM_RANKS + 1  # the last one says that all are there
    assert "all" in store.keys and len(store.keys) == NUM_RANKS + 2


def test_missing_ranks_are_named_with_few_messages():
    store = KeyStore()
    store.keys = {f"arrived/{rank}": 1 for rank in range(NUM_RANKS) if rank not in (7, 9000)}
    assert rendezvous._missing(store, rank_of(0)) == f"ranks 7, 9000 of {NUM_RANKS}"
    assert store.messages["check"] < 2 * 2 * 15
    store.keys = {"arrived/0": 1}
    text = rendezvous._missing(store, rank_of(0))
    assert text.startswith("ranks 1, 2, 3,") and text.endswith(f" and more of {NUM_RANKS}")


def test_a_rank_and_its_meeting_are_found_at_once():
    task = {
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": str(NUM_RANKS),
        "SLURM_STEP_NUM_TASKS": str(NUM_RANKS),
        "SLURM_PROCID": str(NUM_RANKS - 1),
        "SLURM_LOCALID": "7",
        "SLURM_NODEID": "2047",
        "SLURM_STEP_NODELIST": "rack[001-128]n[01-16]",
        "SLURM_STEP_TASKS_PER_NODE": "8(x2048)",
    }
    began = time.process_time()  # of this process: other ones do not count
    found = launched_rank(task)
    assert found is not None and (found.rank, found.num_local_ranks) == (NUM_RANKS - 1, 8)
    meeting = find_meeting(found, task)
    assert isinstance(meeting, StoreAddress) and meeting.host == "rack001n01"
    assert time.process_time() - began < 0.1


def test_rank_0_raises_its_limit_of_open_files_or_says_that_it_cannot(monkeypatch):
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 65_536))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, both: limits.append(both))
    rendezvous._allow_connections(4)
    rendezvous._allow_connections(NUM_RANKS)
    assert limits == [(1028, 65_536), (NUM_RANKS + 1024, 65_536)]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 4096))
    with pytest.raises(LaunchError, match="16384 ranks connect to rank 0, and it may open 4096 files"):
        rendezvous._allow_connections(NUM_RANKS)


class CountedStore(dist.Store):
    """A store of one rank that counts what gloo asks it."""

    def __init__(self, shared: dist.Store) -> None:
        super().__init__()
        self._shared, self.messages, self.num_bytes = shared, 0, 0

    def set(self, key, value):
        self.messages, self.num_bytes = self.messages + 1, self.num_bytes + len(value)
        self._shared.set(key, value)

    def get(self, key):
        self.messages += 1
        return self._shared.get(key)

    def wait(self, keys, timeout=MOMENT):
        self.messages += 1
        self._shared.wait(keys, timeout)


def gloo_messages(num_ranks: int) -> tuple[list[int], list[int], list[float]]:
    """Messages and published bytes of each rank for one gloo group, and an all-reduce over it."""
    shared = dist.HashStore()
    stores = [CountedStore(shared) for _ in range(num_ranks)]
    sums, at_start = [0.0] * num_ranks, [0] * num_ranks

    def join(rank: int) -> None:
        group = dist.ProcessGroupGloo(stores[rank], rank, num_ranks, MOMENT)
        at_start[rank] = stores[rank].messages
        tensor = torch.ones(1)
        group.allreduce([tensor]).wait()
        sums[rank] = float(tensor)

    threads = [threading.Thread(target=join, args=(rank,), daemon=True) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return at_start, [store.num_bytes for store in stores], sums


@pytest.mark.parametrize("is_lazy", [False, True])
def test_messages_of_a_gloo_group(is_lazy: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1" if is_lazy else "0")
    published = []
    for num_ranks in (2, 4, 8):
        messages, num_bytes, sums = gloo_messages(num_ranks)
        assert messages == [1 if is_lazy else 1 + 2 * num_ranks] * num_ranks
        assert sums == [num_ranks] * num_ranks
        published.append(num_bytes[0])
    assert len(set(published)) == (1 if is_lazy else 3)  # lazy: one address; else one for each other rank
