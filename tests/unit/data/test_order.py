"""The order of samples: a bijection in each epoch, and a function of nothing but seed, epoch and index."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.soak import examples

from meshwright.data.order import Blocks, OrderCache, SampleOrder, permute, permute_blocks, sample_rng


@given(num_items=st.integers(1, 3000), seed=st.integers(0, 2**40), epoch=st.integers(0, 1000))
def test_every_epoch_is_a_permutation(num_items: int, seed: int, epoch: int) -> None:
    images = permute(np.arange(num_items), num_items=num_items, seed=seed, epoch=epoch)
    assert sorted(images.tolist()) == list(range(num_items))


@given(num_items=st.integers(1, 2**45), seed=st.integers(0, 99), places=st.lists(st.floats(0, 1), min_size=1))
def test_images_of_large_ranges_stay_inside_and_apart(num_items: int, seed: int, places: list[float]) -> None:
    index = np.unique([min(num_items - 1, int(place * num_items)) for place in places])
    images = permute(index, num_items=num_items, seed=seed, epoch=0)
    assert images.min() >= 0
    assert images.max() < num_items
    assert len(set(images.tolist())) == len(index)


@given(position=st.integers(0, 200), first=st.integers(0, 50), second=st.integers(0, 50))
def test_reading_in_pieces_is_reading_at_once(position: int, first: int, second: int) -> None:
    order = SampleOrder(num_samples=37, seed=5)
    pieces = [order.sample_ids(position, first), order.sample_ids(position + first, second)]
    assert np.concatenate(pieces).tolist() == order.sample_ids(position, first + second).tolist()


def test_epochs_and_seeds_give_different_orders() -> None:
    orders = {
        tuple(permute(np.arange(50), num_items=50, seed=seed, epoch=epoch).tolist())
        for seed in range(4)
        for epoch in range(4)
    }
    assert len(orders) == 16


def test_a_batch_may_span_epochs() -> None:
    order = SampleOrder(num_samples=5, seed=0)
    ids = order.sample_ids(0, 15)
    assert [sorted(ids[start : start + 5].tolist()) for start in (0, 5, 10)] == [list(range(5))] * 3


def test_unshuffled_order_is_the_order_of_the_data() -> None:
    assert SampleOrder(4, seed=3, shuffle=False).sample_ids(2, 6).tolist() == [2, 3, 0, 1, 2, 3]


@pytest.mark.parametrize("num_items", [2, 3, 7, 20])
def test_every_item_comes_first_equally_often(num_items: int) -> None:
    """Over seeds the image of index 0 is uniform, by chi-square; seeds are fixed, so nothing is chance."""
    trials = 200 * num_items
    images = [int(permute(np.array([0]), num_items=num_items, seed=s, epoch=0)[0]) for s in range(trials)]
    counts = np.bincount(images, minlength=num_items)
    chi_square = float(((counts - 200) ** 2 / 200).sum())
    # Mean num_items - 1 and standard deviation sqrt(2 (num_items - 1)): five of them are never met by chance.
    assert chi_square < (num_items - 1) + 5 * np.sqrt(2 * (num_items - 1))


def test_neighbours_do_not_stay_neighbours() -> None:
    images = permute(np.arange(4096), num_items=4096, seed=1, epoch=0)
    correlation = np.corrcoef(np.arange(4096), images)[0, 1]
    assert abs(correlation) < 5 / np.sqrt(4096)  # five standard deviations of an honest shuffle


def test_the_order_never_changes_between_versions() -> None:
    """A resumed run must meet the order it was started with, also after an upgrade."""
    assert SampleOrder(1000, seed=42).sample_ids(998, 4).tolist() == [783, 604, 116, 630]


@examples(40)
@given(
    num_items=st.integers(1, 700), block=st.integers(1, 40), window=st.integers(1, 6), epoch=st.integers(0, 9)
)
def test_a_shuffle_by_blocks_is_a_permutation(num_items: int, block: int, window: int, epoch: int) -> None:
    images = permute_blocks(
        np.arange(num_items), Blocks(block, window), num_items=num_items, seed=1, epoch=[epoch]
    )
    assert sorted(images.tolist()) == list(range(num_items))


def test_a_shuffle_by_blocks_reads_few_blocks_at_a_time() -> None:
    """In any stretch of one window, samples come from the blocks of two windows at most."""
    order = SampleOrder(20_000, seed=3, blocks=Blocks(100, 16))
    ids = order.sample_ids(0, 20_000)
    for start in range(0, 19_000, 700):
        assert len(np.unique(ids[start : start + 1600] // 100)) <= 32


def shuffle_quality(ids: np.ndarray, *, shard: int) -> tuple[float, float, float]:
    """(mean displacement / N, shards per batch of 50, share of neighbours within 100 places)."""
    count = len(ids)
    displacement = float(np.abs(ids - np.arange(count)).mean()) / count
    batches = ids[: count // 50 * 50].reshape(-1, 50) // shard
    shards = float(np.mean([len(set(batch.tolist())) for batch in batches]))
    return displacement, shards, float((np.abs(np.diff(ids)) <= 100).mean())


@pytest.mark.parametrize(
    ("blocks", "least_shards", "most_neighbours"),
    [(None, 18.3, 0.012), (Blocks(100, 64), 16.0, 0.03), (Blocks(100, 16), 10.0, 0.075)],
)
def test_quality_of_the_shuffle(blocks: Blocks | None, least_shards: float, most_neighbours: float) -> None:
    """20,000 samples in 20 shards, as in the guide: a full permutation has 18.5 shards and 1.0%."""
    ids = SampleOrder(20_000, seed=7, blocks=blocks).sample_ids(0, 20_000)
    displacement, shards, neighbours = shuffle_quality(ids, shard=1000)
    assert displacement == pytest.approx(1 / 3, abs=0.04)
    assert shards > least_shards
    assert neighbours < most_neighbours


def test_sources_of_a_blend_have_orders_of_their_own() -> None:
    orders = {tuple(SampleOrder(50, seed=1, source=one).sample_ids(0, 50).tolist()) for one in range(5)}
    assert len(orders) == 5


@examples(40)
@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 40)), max_size=12))
def test_a_cached_order_is_the_order(calls: list[tuple[int, int]]) -> None:
    order = SampleOrder(37, seed=5)
    cached = OrderCache(order, first_piece=16, largest_piece=32)
    for position, count in calls:
        assert cached.sample_ids(position, count).tolist() == order.sample_ids(position, count).tolist()


def test_random_numbers_follow_seed_epoch_and_sample_alone() -> None:
    drawn = {
        (seed, epoch, sample): sample_rng(seed, epoch, sample).random()
        for seed in (0, 1)
        for epoch in (0, 1)
        for sample in (0, 1, 2**40)
    }
    assert len(set(drawn.values())) == len(drawn)
    assert sample_rng(1, 0, 2**40).random() == drawn[1, 0, 2**40]
