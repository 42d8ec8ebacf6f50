"""`fit` and `prepare` on DataLoaders and on loaders of records: settings kept, one stream, exact resume."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from tests.support.ledger import words
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset

import meshwright
from meshwright.data.loader import Loader, open_loader
from meshwright.data.records import Record
from meshwright.errors import DataError, MeshwrightError
from meshwright.modules.dataset import LoaderOptions, SampleAssignment
from meshwright.modules.device_samples import DeviceSamples
from meshwright.modules.record_batches import RecordBatches, RecordLoop
from meshwright.modules.training_data import FitData, read_fit_settings
from meshwright.observe.metrics import read_metrics

SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "compute": "fp64",
    "num_steps": 5,
    "optim": {"kind": "adamw", "lr": 0.02},
}
CPU = torch.device("cpu")


def sample(record: Record, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """The length of a record and a random number of its own."""
    values = next(value for value in record.values() if isinstance(value, np.ndarray))
    features = torch.tensor([len(values), rng.random()], dtype=torch.float64)
    return features / 10, torch.tensor(float(str(record["__key__"])), dtype=torch.float64)


def padded(samples: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    return [torch.stack(part) for part in zip(*samples, strict=True)]


def records(**keywords: Any) -> Loader:
    sources = [words("a", 40), words("b", 30, seed=1)]
    given = {"batch_samples": 12, "weights": (0.7, 0.3), "seed": 4, "transform": sample, "collate": padded}
    return open_loader(sources, **{**given, **keywords})


def loss(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
    features, target = batch
    return (model(features)[:, 0] - target / 50).square().sum(), len(target)


def fitted(directory: str, stop_after: int | None = None, **keywords: Any) -> Tensor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    settings = {**SETTINGS, **keywords.pop("settings", {})}
    meshwright.fit(model, records(**keywords), loss, directory=directory, stop_after=stop_after, **settings)
    return model[2].weight.detach().clone()


@pytest.mark.parametrize("grouped", [{}, {"max_tokens": 120}], ids=["samples", "groups"])
def test_a_loader_of_records_resumes_exactly(tmp_path: Path, grouped: dict[str, Any]) -> None:
    """With worker threads before the stop and without them after it; batches of the loader are the run's."""
    full = fitted(str(tmp_path / "full"), **grouped)
    fitted(str(tmp_path / "parts"), 2, num_workers=2, workers="threads", **grouped)
    assert torch.equal(fitted(str(tmp_path / "parts"), **grouped), full)
    with pytest.raises(MeshwrightError, match=r"weights was \(0.7, 0.3\), is \(0.5, 0.5\)"):
        fitted(str(tmp_path / "parts"), weights=(0.5, 0.5), settings={"num_steps": 9}, **grouped)


def losses(directory: str, settings: dict[str, Any]) -> list[float]:
    fitted(directory, settings=settings)
    return [row["loss"] for row in read_metrics(Path(directory))]


def test_two_ranks_share_a_loader(ranks: Any, tmp_path: Path) -> None:
    one = losses(str(tmp_path / "one"), {})
    two = ranks.run(losses, 2, str(tmp_path / "two"), {"microbatch_samples": 3})
    assert two[0] == pytest.approx(one, rel=1e-12)


@pytest.mark.parametrize("dp", [1, 2, 3])
def test_micro_batches_of_groups_are_the_same_on_any_rank_count(dp: int) -> None:
    """Each group is a micro-batch within the budget; every rank has the same number of them."""
    seen: list[Counter[float]] = []
    streams = [
        RecordBatches(
            records(max_tokens=120).for_rank(0, 1), SampleAssignment(1, rank, dp), sample_tokens=1, device=CPU
        )
        for rank in range(dp)
    ]
    for _ in range(3):
        batches = [next(stream) for stream in streams]
        assert {len(batch.microbatches) for batch in batches} == {12 // dp}
        assert len({batch.sample_ids for batch in batches}) == 1
        contents = [one.content for batch in batches for one in batch.microbatches]
        assert all(10 * float(one[0][:, 0].max()) * len(one[0]) <= 120.0001 for one in contents)
        seen.append(Counter(float(value) for one in contents for value in one[0][:, 1]))
    golden = records(max_tokens=120)
    assert seen == [Counter(float(v) for group in next(golden) for v in group[0][:, 1]) for _ in range(3)]


def test_a_loop_shares_a_loader_and_goes_on_where_it_was() -> None:
    """Global batch 12 on 3 ranks: the parts in order are the batch; the last one is short."""
    golden = [batch[1].tolist() for batch in records(max_epochs=1, weights=(0.5, 0.5))]
    loops = [
        RecordLoop(records(max_epochs=1, weights=(0.5, 0.5)).for_rank(rank, 3), device=CPU)
        for rank in range(3)
    ]
    assert len(loops[0]) == len(golden)
    found = []
    for parts in zip(*loops, strict=True):
        counted = [
            part[1].tolist() if loop.is_counted else [] for part, loop in zip(parts, loops, strict=True)
        ]
        found.append([value for part in counted for value in part])
        if len(found) == 2:
            state = loops[0].state()
        assert loops[0].is_last == (len(found) == len(golden))
    assert found == golden
    again = RecordLoop(records(max_epochs=1, weights=(0.5, 0.5)), device=CPU)
    again.load_state(state)
    assert [batch[1].tolist() for batch in again] == golden[2:]
    with pytest.raises(DataError, match="counts in a map-style dataset"):
        again.load_state({"position": 4, "num_samples": 9})


def points() -> TensorDataset:
    return TensorDataset(torch.arange(14.0, dtype=torch.float64).reshape(7, 2), torch.arange(7.0).double())


def doubled(samples: list[Any]) -> list[Tensor]:
    return [2 * torch.stack(part) for part in zip(*samples, strict=True)]


def test_fit_keeps_every_setting_of_a_data_loader(tmp_path: Path) -> None:
    """Collate, workers, prefetch, order and micro-batch are the loader's, and the spec says so."""
    loader = DataLoader(
        points(),
        batch_size=2,
        num_workers=1,
        prefetch_factor=5,
        timeout=30,
        persistent_workers=True,
        worker_init_fn=len,
        collate_fn=doubled,
        drop_last=True,
    )
    spec = read_fit_settings(loader, None, {"num_steps": 2, "batch_samples": 4, "max_epochs": 1})
    data = spec.data
    assert (data.microbatch_samples, data.num_workers, data.shuffle) == (2, 1, False)
    kept = FitData(loader, None, None).options(spec, mesh=None)  # pyright: ignore[reportArgumentType]
    assert kept.collate is doubled and kept.num_workers == 1
    assert kept.others["prefetch_factor"] == 5 and kept.others["timeout"] == 30
    assert kept.others["worker_init_fn"] is len and kept.others["persistent_workers"]
    model = nn.Linear(2, 1).double()
    plain = DataLoader(points(), batch_size=2, collate_fn=doubled, drop_last=True)
    settings = SETTINGS | {"batch_samples": 4, "max_epochs": 1}
    outcome = meshwright.fit(model, plain, loss, directory=tmp_path, **settings)
    assert outcome.state.step == 1  # the 3 samples after the first batch are dropped


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(7))


BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "another batch": (records, {"batch_samples": 8}, "batch_samples is 8 in the settings and 12"),
    "order in the settings": (records, {"shuffle": False}, "shuffle=False has no effect"),
    "workers in the settings": (records, {"num_workers": 2}, "num_workers=2 has no effect"),
    "one rank's loader": (lambda: records(dp_rank=1, dp_size=2), {}, "for rank 1 of 2"),
    "two collate functions": (records, {"collate": padded}, "a collate function already"),
    "groups of groups": (
        lambda: records(max_tokens=120),
        {"microbatch_samples": 3},
        "microbatch_samples is 3 in the settings and 1",
    ),
    "an iterable dataset": (lambda: DataLoader(Stream()), {"batch_samples": 4}, "reads an iterable dataset"),
    "draws with replacement": (
        lambda: DataLoader(points(), sampler=RandomSampler(points(), replacement=True)),
        {"batch_samples": 4},
        "RandomSampler is a custom sampler",
    ),
    "two micro-batches": (
        lambda: DataLoader(points(), batch_size=2),
        {"batch_samples": 4, "microbatch_samples": 4},
        "microbatch_samples is 4 in the settings and 2",
    ),
    "two orders": (
        lambda: DataLoader(points(), batch_size=2, shuffle=True),
        {"batch_samples": 4, "shuffle": False},
        "shuffle is False in the settings and True",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_settings_that_contradict_a_loader_are_refused(tmp_path: Path, case: str) -> None:
    make, changes, fact = BAD[case]
    with pytest.raises(MeshwrightError) as caught:
        meshwright.fit(nn.Linear(2, 1), make(), loss, directory=tmp_path, **{**SETTINGS, **changes})
    assert fact in str(caught.value)


def test_workers_of_fit_are_chosen_from_a_measurement(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = SETTINGS | {"batch_samples": 4, "num_workers": "auto"}
    meshwright.fit(nn.Linear(2, 1).double(), points(), loss, directory=tmp_path, **settings)
    assert "ms per sample" in capfd.readouterr().err


def on_device_losses(directory: str, *, on_device: bool) -> list[Any]:
    torch.manual_seed(0)
    settings = SETTINGS | {"batch_samples": 4, "on_device": on_device}
    meshwright.fit(nn.Linear(2, 1).double(), points(), loss, directory=directory, **settings)
    return [row["loss"] for row in read_metrics(Path(directory))]


def test_a_dataset_on_the_device_gives_the_same_batches(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    expected = on_device_losses(str(tmp_path / "read"), on_device=False)
    assert on_device_losses(str(tmp_path / "kept"), on_device=True) == expected
    assert "data: 7 samples on cpu, 168 B" in capfd.readouterr().err


class Ragged:
    def __len__(self) -> int:
        return 300

    def __getitem__(self, index: int) -> Tensor:
        return torch.zeros(1 + index // 256)


def test_what_cannot_stay_on_the_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="samples cannot be stacked"):
        DeviceSamples(Ragged(), LoaderOptions(), CPU)
    with pytest.raises(DataError, match=r"contain a (list|str)"):
        DeviceSamples(["a", "b"], LoaderOptions(), CPU)
    with pytest.raises(DataError, match="a collate function"):
        DeviceSamples(points(), LoaderOptions(doubled), CPU)
    memory = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory._replace(available=300))
    with pytest.raises(DataError, match="all samples take 168 B, and 300 B are free"):
        DeviceSamples(points(), LoaderOptions(), CPU)
