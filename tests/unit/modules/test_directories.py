"""The verbs on run directories of `fit` and `prepare`: they work, or say what they need."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import meshwright
from meshwright.cli.main import run

Captured = pytest.CaptureFixture[str]


def data() -> TensorDataset:
    torch.manual_seed(0)
    return TensorDataset(torch.randn(8, 3), torch.randn(8, 1))


def squared(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
    x, y = batch
    return ((model(x) - y) ** 2).sum(), len(x)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("fit") / "run"
    model = nn.Linear(3, 1)
    meshwright.fit(model, data(), squared, directory=directory, num_steps=2, batch_samples=4, device="cpu")
    return directory


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("prepare") / "run"
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = meshwright.prepare(model, optimizer, DataLoader(data(), 4), directory=directory, device="cpu")
    for batch in loop.loader:
        loop.backward(*squared(model, batch))
        loop.step()
    loop.end()
    return directory


@pytest.mark.parametrize("verb", ["sample", "convert", "evaluate", "check", "compare", "report"])
@pytest.mark.parametrize("kind", ["fitted", "prepared"])
def test_no_verb_fails(
    verb: str, kind: str, tmp_path: Path, capsys: Captured, request: pytest.FixtureRequest
):
    directory = str(request.getfixturevalue(kind))
    arguments = {
        "sample": ["--prompt", "It"],
        "convert": [str(tmp_path / "out")],
        "compare": [directory],
        "report": ["-o", str(tmp_path / "report.html")],
    }.get(verb, [])
    target = f"{directory}/run.yaml" if verb == "check" else directory
    capsys.readouterr()
    code = run([verb, target, *arguments])
    said = capsys.readouterr().err
    if kind == "fitted" and verb in ("compare", "report"):
        assert code == 0, said
        return
    assert code == 2 and said.startswith("error: "), said
    if verb in ("sample", "convert", "evaluate"):
        assert "meshwright.load_weights" in said
    elif kind == "fitted":
        assert "a run of meshwright.fit" in said


def test_weights_of_two_fits_are_compared(fitted: Path, capsys: Captured):
    assert run(["compare", str(fitted), str(fitted), "--assert-equal"]) == 0
    assert "weights at step 2" in capsys.readouterr().out
