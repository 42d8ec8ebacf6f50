"""Files that vanish or change under a run: nothing is lost in silence."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.live_runs import wait_for
from tests.support.run_files import train_run_file, write_run_file
from torch import nn
from torch.nn.functional import mse_loss

import meshwright
from meshwright.checkpoint.load import complete_checkpoints
from meshwright.cli.main import run
from meshwright.data.pack import pack
from meshwright.data.tokenize import ByteTokenizer
from meshwright.errors import SpecError
from meshwright.observe.metrics import read_metrics
from meshwright.train import loop

Captured = pytest.CaptureFixture[str]
SAVING = {"checkpoint": {"every_steps": 1, "keep_last": 3}}


def after_step(monkeypatch: pytest.MonkeyPatch, number: int, action: Callable[[], Any]) -> None:
    """Call `action` once step `number` is done."""
    train_step, done = loop.train_step, []

    def acting(*args: Any, **options: Any) -> Any:
        outcome = train_step(*args, **options)
        done.append(1)
        if len(done) == number:
            action()
        return outcome

    monkeypatch.setattr(loop, "train_step", acting)


def test_a_run_without_its_checkpoints_is_not_started_over(tmp_path: Path, capsys: Captured) -> None:
    directory = train_run_file(tmp_path)
    shutil.rmtree(directory / "checkpoints")
    before = (directory / "metrics.jsonl").read_bytes()
    assert run(["train", str(tmp_path / "run.yaml"), "--dir", str(directory)]) == 2
    assert "saved a checkpoint of step 4" in capsys.readouterr().err
    assert (directory / "metrics.jsonl").read_bytes() == before


def test_a_run_that_never_saved_starts_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_run_file(tmp_path / "run.yaml")

    def die() -> None:
        raise RuntimeError("killed")

    with monkeypatch.context() as patched:
        after_step(patched, 2, die)
        assert run(["train", file, "--dir", str(tmp_path / "run")]) == 70
    assert run(["train", file, "--dir", str(tmp_path / "run")]) == 0
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [1, 2, 3, 4]


@pytest.mark.parametrize("loss", ("deleted", "renamed", "replaced"))
def test_a_directory_lost_under_a_run_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured, loss: str
) -> None:
    file, directory = write_run_file(tmp_path / "run.yaml", **SAVING), tmp_path / "run"

    def lose() -> None:
        # The save of step 1 is written in the background: it may be in flight after step 2.
        wait_for(lambda: complete_checkpoints(directory / "checkpoints"))
        if loss == "deleted":
            shutil.rmtree(directory)
        else:
            directory.rename(tmp_path / "elsewhere")
        if loss == "replaced":
            directory.mkdir()

    after_step(monkeypatch, 2, lose)
    assert run(["train", file, "--dir", str(directory)]) == 4
    assert "deleted or renamed while the run was at step 2" in capsys.readouterr().err
    if loss != "deleted":
        assert [path.name for path in complete_checkpoints(tmp_path / "elsewhere/checkpoints")] == [
            "step-00000001"
        ]


def test_a_dataset_truncated_under_a_run_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    (tmp_path / "a.txt").write_text("all work and no play " * 2000)
    pack([tmp_path / "a.txt"], tmp_path / "data", tokenizer=ByteTokenizer())
    data = {"path": str(tmp_path / "data"), "sequence_length": 32, "batch_sequences": 4}
    file = write_run_file(tmp_path / "run.yaml", data=data, schedule={"num_steps": 20})

    def truncate() -> None:
        with (tmp_path / "data/tokens.bin").open("r+b") as tokens:
            tokens.truncate(100)

    after_step(monkeypatch, 1, truncate)
    assert run(["train", file, "--dir", str(tmp_path / "run")]) == 2
    printed = capsys.readouterr().err
    assert "the file was changed while it was in use: it has 100 bytes" in printed


def test_what_interrupted_saves_left_is_removed_or_put_back(tmp_path: Path) -> None:
    file, directory = write_run_file(tmp_path / "run.yaml", **SAVING), tmp_path / "run"
    assert run(["train", file, "--dir", str(directory), "--stop-after", "3"]) == 0
    root = directory / "checkpoints"
    (root / ".partial-00000009").mkdir()
    (root / "step-00000001" / "manifest.json").unlink()  # a deletion that was interrupted
    (root / "step-00000003").rename(root / ".replaced-step-00000003")  # killed between two renames
    shutil.copytree(root / "step-00000002", root / ".replaced-step-00000002")
    assert run(["train", file, "--dir", str(directory)]) == 0
    assert sorted(path.name for path in root.iterdir()) == [f"step-0000000{step}" for step in (2, 3, 4)]
    events = [json.loads(line) for line in (directory / "events-0.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["kind"] == "resume"] == [3]


class Line(nn.Module):
    """One linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def prepared(ranks: Any, loop_of: Callable[..., str]) -> str:
    return ranks.run(loop_of, 1)[0]


def _plain_loop() -> str:
    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = meshwright.prepare(model, optimizer, [torch.ones(4, 2)] * 3, device="cpu")
    try:
        for x in run.loader:
            mse_loss(model(x), torch.zeros(4, 1)).backward()
            optimizer.step()
    except SpecError as error:
        return f"{error.fact} {error.hint}"
    return "nothing"


def _backward_only() -> str:
    model = Line()
    run = meshwright.prepare(model, None, [torch.ones(4, 2)] * 3, device="cpu", optim={"lr": 0.1})
    try:
        for x in run.loader:
            mse_loss(model(x), torch.zeros(4, 1)).backward()
    except SpecError as error:
        return error.fact
    return "nothing"


def _no_step() -> str:
    model = Line()
    run = meshwright.prepare(model, None, [torch.ones(4, 2)] * 3, device="cpu", optim={"lr": 0.1})
    for x in run.loader:
        run.backward(mse_loss(model(x), torch.zeros(4, 1), reduction="sum"), 4)
        break
    try:
        run.end()
    except SpecError as error:
        return error.fact
    return "nothing"


def test_a_loop_that_trains_nothing_is_refused(ranks) -> None:
    plain = prepared(ranks, _plain_loop)
    assert "optimizer.step() was called by itself" in plain and "run.step()" in plain
    assert prepared(ranks, _backward_only) == "3 batches were read and run.backward was never called"
    assert prepared(ranks, _no_step) == "run.backward was called 1 times and run.step never"
