"""One rank reads for the tp, cp and pp ranks that compute on the same samples: once, the same, no hang."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.ledger import words
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import meshwright
from meshwright.data.loader import Loader, open_loader
from meshwright.data.records import Record, RecordError
from meshwright.errors import MeshwrightError, SpecErrors
from meshwright.mesh import build_mesh
from meshwright.modules import reading_group
from meshwright.modules.dataset import LoaderOptions, SampleAssignment, one_pass
from meshwright.modules.loop_loader import LoopLoader
from meshwright.modules.reading_group import ReadingGroup, open_reading_group
from meshwright.modules.record_batches import RecordBatches, RecordLoop
from meshwright.modules.sample_reads import few_records
from meshwright.observe.metrics import read_metrics
from meshwright.rehearse.rank_pool import this_world
from meshwright.spec import ParallelSpec
from meshwright.spec.modules import FitSpec, Readers, SamplesSpec
from meshwright.spec.rules_modules import require_valid_module

LAYOUTS = {
    "dp2 tp2": ParallelSpec(dp_replicate=2, tp=2),
    "dp2 cp2": ParallelSpec(dp_replicate=2, cp=2),
    "pp2 tp2": ParallelSpec(pp=2, tp=2),
}
CPU = torch.device("cpu")
STEPS, BATCH = 5, 12


class Decode:
    """Counts the records that this process decodes; `bad` is a record that fails."""

    def __init__(self, bad: str | None = None, error: str = "record") -> None:
        self.num_decoded, self._bad, self._error = 0, bad, error

    def __call__(self, record: Record, rng: np.random.Generator) -> dict[str, Any]:
        self.num_decoded += 1
        key = str(record["__key__"])
        if key == self._bad:
            raise (
                RecordError("broken", file="a.tar", key=key) if self._error == "record" else ValueError("no")
            )
        numbers = next(value for value in record.values() if isinstance(value, np.ndarray))
        pixels = torch.full((2, 3), float(rng.random()), dtype=torch.float64)
        return {"key": key, "pixels": pixels.T, "few": numbers[:1] > 0, "length": len(numbers)}


def loader(decode: Decode, **changes: Any) -> Loader:
    sources = [words("a", 40), words("b", 30, seed=1)]
    settings = {"batch_samples": BATCH, "weights": (0.7, 0.3), "seed": 4, "transform": decode} | changes
    return open_loader(sources, **settings)


def plain(content: Any) -> list[str]:
    return [repr(value.tolist() if isinstance(value, Tensor) else value) for value in content.values()]


def fit_stream(layout: str, readers: str, **changes: Any) -> tuple[int, list[Any], dict[str, Any], int]:
    """(records decoded here, contents of five steps, state, data-parallel rank) of this rank in `fit`."""
    mesh, decode = build_mesh(LAYOUTS[layout], this_world()), Decode()
    records = loader(decode, **changes)
    group = ReadingGroup(mesh, has_one_reader=readers == "one")
    assignment = SampleAssignment(2, mesh.dp_rank, mesh.parallel.dp)
    batches = RecordBatches(records, assignment, sample_tokens=1, device=CPU, sharing=group)
    found = [plain(one.content) for _ in range(STEPS) for one in next(batches).microbatches]
    batches.close()
    return decode.num_decoded, found, batches.state(), mesh.dp_rank


@pytest.mark.parametrize("layout", LAYOUTS)
def test_samples_are_read_once(ranks: Any, layout: str) -> None:
    each = ranks.run(fit_stream, 4, layout, "all")
    one = ranks.run(fit_stream, 4, layout, "one")
    assert sum(count for count, *_ in each) == 4 // LAYOUTS[layout].dp * STEPS * BATCH
    assert sum(count for count, *_ in one) == STEPS * BATCH
    assert [found[1:] for found in one] == [found[1:] for found in each]


def fit_threads(layout: str) -> Any:
    return fit_stream(layout, "one", num_workers=2, workers="threads")[1:]


def loop_stream(readers: str) -> tuple[int, list[Any], dict[str, Any]]:
    """Records decoded here, all batches of a loop (`prepare`), and its state in the middle."""
    mesh, decode = build_mesh(LAYOUTS["dp2 tp2"], this_world()), Decode()
    group = ReadingGroup(mesh, has_one_reader=readers == "one")
    share = loader(decode, max_epochs=1, weights=(0.5, 0.5)).for_rank(mesh.dp_rank, 2, sharing=group)
    loop, found, state = RecordLoop(share, device=CPU), [], {}
    for number, content in enumerate(loop):
        found.append((plain(content), loop.is_counted, loop.is_last))
        state = loop.state() if number == 2 else state
    return decode.num_decoded, found, state


def torch_stream(readers: str) -> list[Any]:
    """A torch DataLoader in a loop, two epochs, and one pass for an evaluation."""
    mesh = build_mesh(LAYOUTS["dp2 tp2"], this_world())
    group = ReadingGroup(mesh, has_one_reader=readers == "one")
    points = TensorDataset(torch.arange(14.0).reshape(7, 2), torch.arange(7))
    given = DataLoader(points, batch_size=2, shuffle=True)
    loop = LoopLoader(given, seed=1, dp_rank=mesh.dp_rank, dp_size=2, device=CPU, sharing=group)
    found = [(part[1].tolist(), loop.position, loop.is_counted) for _ in range(2) for part in loop]
    iterable = LoopLoader([1, 2, 3], seed=1, dp_rank=mesh.dp_rank, dp_size=2, device=CPU, sharing=group)
    found += [(part, iterable.position, iterable.is_counted) for part in iterable]
    options = LoaderOptions(sharing=group)
    passed = one_pass(points, SampleAssignment(2, mesh.dp_rank, 2), device=CPU, options=options)
    return [*found, *((one.content[1].tolist(), one.is_counted) for one in passed)]


def loop_streams(readers: str) -> tuple[Any, Any]:
    return loop_stream(readers), torch_stream(readers)


def test_loops_and_read_ahead_get_the_same_samples(ranks: Any) -> None:
    assert ranks.run(fit_threads, 4, "dp2 tp2") == [
        one[1:] for one in ranks.run(fit_stream, 4, "dp2 tp2", "all")
    ]
    each, one = ranks.run(loop_streams, 4, "all"), ranks.run(loop_streams, 4, "one")
    assert [found[1] for found in one] == [found[1] for found in each]
    assert [found[0][1:] for found in one] == [found[0][1:] for found in each]
    assert 2 * sum(found[0][0] for found in one) == sum(found[0][0] for found in each)


def failure(error: str) -> tuple[str, str]:
    mesh = build_mesh(ParallelSpec(cp=2, tp=2), this_world())
    records = loader(Decode(bad="0003", error=error))
    assignment = SampleAssignment(6, 0, 1)
    batches = RecordBatches(
        records, assignment, sample_tokens=1, device=CPU, sharing=ReadingGroup(mesh, has_one_reader=True)
    )
    try:
        for _ in range(8):
            next(batches)
    except Exception as caught:
        return type(caught).__name__, str(caught)
    return "", ""


def test_an_error_of_the_reader_is_raised_on_all_ranks(ranks: Any) -> None:
    assert set(ranks.run(failure, 4, "record")) == {("RecordError", "a.tar, key 0003: broken")}
    reader, *others = ranks.run(failure, 4, "other")
    assert reader == ("ValueError", "no")
    assert {kind for kind, _ in others} == {"RunError"}
    assert all("rank 0, which reads for this rank, failed: ValueError: no" in text for _, text in others)


class Clock:
    """A clock that stands still but for reading."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


def chosen(seconds: float) -> tuple[bool, bool]:
    """(whether one rank reads for others, whether this one reads); sending takes no time."""
    mesh, clock = build_mesh(LAYOUTS["dp2 tp2"], this_world()), Clock()
    records = loader(Decode())

    def read(part: int) -> Any:
        clock.now += seconds
        return few_records(records, part)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading_group, "time", clock)
        group = open_reading_group(mesh, "auto", read)
    return group.is_shared, group.reads


def test_the_choice_is_measured_and_the_same_on_all_ranks(ranks: Any) -> None:
    assert ranks.run(chosen, 4, 0.5) == [(True, True), (True, False)] * 2
    assert ranks.run(chosen, 4, 0.0) == [(False, True)] * 4


def fit_chain(directory: str, readers: Readers) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    points = TensorDataset(torch.arange(64.0, dtype=torch.float64).reshape(32, 2) / 64, torch.arange(32.0))
    meshwright.fit(
        meshwright.Chain(model, ["0", "1", "2"]),
        points,
        lambda model, batch: ((model(batch[0])[:, 0] - batch[1]).square().sum(), len(batch[1])),
        evaluation=points,
        evaluate={"every_steps": 2},
        directory=directory,
        pp=2,
        device="cpu",
        compute="fp64",
        num_steps=4,
        batch_samples=16,
        microbatch_samples=2,
        readers=readers,
        lr=0.02,
    )
    return [row["loss"] for row in read_metrics(Path(directory))]


def test_fit_takes_the_setting(ranks: Any, tmp_path: Path) -> None:
    found = {
        readers: ranks.run(fit_chain, 4, str(tmp_path / readers), readers)[0]
        for readers in ("all", "one", "auto")
    }
    assert found["one"] == found["all"] == found["auto"]


def test_samples_on_the_device_are_read_by_every_rank() -> None:
    data = SamplesSpec(batch_samples=4, on_device=True, readers="one")
    with pytest.raises(SpecErrors, match="readers=one with on_device"):
        require_valid_module(FitSpec.model_validate({"schedule": {"num_steps": 1}, "data": data}))
    assert issubclass(SpecErrors, MeshwrightError)
