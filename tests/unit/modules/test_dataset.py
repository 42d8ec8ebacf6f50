"""Samples of a user's dataset: every one once, the same number of micro-batches on every rank."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

from meshwright.data.order import SampleOrder
from meshwright.errors import DataError
from meshwright.modules.dataset import DatasetBatches, LoaderOptions, SampleAssignment, one_pass
from meshwright.modules.loop_loader import LoopLoader

CPU = torch.device("cpu")


@pytest.mark.parametrize("dp", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [1, 3, 5, 8, 11, 12])
def test_a_batch_is_assigned_once(count, dp):
    ids = np.arange(count)
    microbatches = [SampleAssignment(2, rank, dp).microbatches(ids) for rank in range(dp)]
    assert len({len(mine) for mine in microbatches}) == 1
    counted = [
        number for mine in microbatches for numbers, is_counted in mine if is_counted for number in numbers
    ]
    assert sorted(counted) == ids.tolist()
    assert all(1 <= len(numbers) <= 2 for mine in microbatches for numbers, _ in mine)


def _batches(rank: int, dp: int, *, batch: int = 6, epochs: int | None = 1) -> DatasetBatches:
    return DatasetBatches(
        [torch.tensor(number) for number in range(10)],
        SampleOrder(10, 0, True),
        SampleAssignment(batch // dp, rank, dp),
        batch_samples=batch,
        num_samples=epochs * 10 if epochs else None,
        sample_tokens=3,
        device=CPU,
        options=LoaderOptions(),
    )


def _seen(batches: list[DatasetBatches]) -> list[int]:
    return sorted(
        int(number)
        for stream in batches
        for batch in stream
        for microbatch in batch.microbatches
        if microbatch.is_counted
        for number in microbatch.content
    )


@pytest.mark.parametrize("dp", [1, 2, 3])
def test_an_epoch_has_every_sample_once(dp):
    assert _seen([_batches(rank, dp) for rank in range(dp)]) == list(range(10))


def test_a_position_means_the_same_on_other_ranks():
    first = _batches(0, 2, epochs=None)
    batch = next(first)
    assert batch.num_positions == 18 and len(batch.sample_ids) == 6
    expected = next(first).sample_ids
    again = _batches(0, 3, epochs=None)
    again.load_state({"position": 6, "num_samples": 10})
    assert next(again).sample_ids == expected
    with pytest.raises(DataError, match="counts in 9 samples"):
        again.load_state({"position": 6, "num_samples": 9})


def test_evaluation_reads_everything_once():
    data = [torch.tensor(number) for number in range(7)]
    microbatches = [
        list(one_pass(data, SampleAssignment(2, rank, 2), device=CPU, options=LoaderOptions()))
        for rank in (0, 1)
    ]
    assert len(microbatches[0]) == len(microbatches[1]) == 2
    contents = [one for mine in microbatches for microbatch in mine for one in microbatch.content]
    assert sorted(map(int, contents)) == list(range(7))


def _loaders(loader, dp: int) -> list[LoopLoader]:
    return [LoopLoader(loader, seed=0, dp_rank=rank, dp_size=dp, device=CPU) for rank in range(dp)]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(7))


@pytest.mark.parametrize("dp", [1, 2, 4])
@pytest.mark.parametrize("kind", ["shuffled", "list", "stream"])
def test_a_loop_sees_an_epoch_once(kind, dp):
    numbers = torch.arange(7)
    loader = {
        "shuffled": DataLoader(TensorDataset(numbers), batch_size=2, shuffle=True),
        "list": list(numbers.split(2)),
        "stream": DataLoader(Stream(), batch_size=2),
    }[kind]
    seen, lengths = [], set()
    for mine in _loaders(loader, dp):
        length = 0
        for batch in mine:
            length += 1
            seen += (
                batch[0].tolist() * mine.is_counted
                if kind == "shuffled"
                else batch.tolist() * mine.is_counted
            )
            last = mine.is_last
        assert last and (mine.epoch, mine.position) == (1, 0)
        lengths.add(length)
        assert kind == "stream" or len(mine) == length
    assert sorted(seen) == list(range(7)) and len(lengths) == 1


@pytest.mark.parametrize("kind", ["shuffled", "list"])
def test_a_loop_goes_on_in_mid_epoch(kind):
    numbers = torch.arange(9)
    loader = (
        list(numbers) if kind == "list" else DataLoader(TensorDataset(numbers), batch_size=1, shuffle=True)
    )
    full, part = _loaders(loader, 1)[0], _loaders(loader, 1)[0]
    expected = [torch.as_tensor(batch[0] if kind != "list" else batch).item() for batch in full]
    for _ in zip(range(4), part, strict=False):
        pass
    again = _loaders(loader, 1)[0]
    again.load_state({"epoch": 0, "position": 4})
    found = [torch.as_tensor(batch[0] if kind != "list" else batch).item() for batch in again]
    assert found == expected[4:]


def test_drop_last():
    loader = DataLoader(TensorDataset(torch.arange(7)), batch_size=2, drop_last=True)
    assert sum(len(batch[0]) for mine in _loaders(loader, 2) for batch in mine) == 4


def test_an_order_of_its_own_is_refused():
    sampler = WeightedRandomSampler([1.0] * 4, 4)
    with pytest.raises(DataError, match="WeightedRandomSampler is a custom sampler"):
        _loaders(DataLoader(TensorDataset(torch.arange(4)), sampler=sampler), 1)
    with pytest.raises(DataError, match="int is not iterable"):
        _loaders(3, 1)


def test_a_loop_keeps_every_setting_of_its_loader() -> None:
    """One loader of ours for all epochs, with the user's workers, prefetch, time limit and functions."""
    loader = DataLoader(
        list(range(12)),  # pyright: ignore[reportArgumentType]
        batch_size=2,
        num_workers=2,
        prefetch_factor=5,
        persistent_workers=True,
        timeout=30,
        worker_init_fn=print,
        multiprocessing_context="fork",
    )
    ours = LoopLoader(loader, seed=0, dp_rank=0, dp_size=1, device=torch.device("cpu"))
    assert [batch.tolist() for batch in ours] == [[2 * n, 2 * n + 1] for n in range(6)]
    kept = ours._contents
    assert kept is not None
    assert (kept.prefetch_factor, kept.persistent_workers, kept.timeout) == (5, True, 30)
    assert kept.worker_init_fn is print
    assert [batch.tolist() for batch in ours] == [[2 * n, 2 * n + 1] for n in range(6)]
    assert ours._contents is kept
    ours.close()
    plain = LoaderOptions.of(DataLoader(list(range(4)), batch_size=2))  # pyright: ignore[reportArgumentType]
    assert "prefetch_factor" not in plain.others
