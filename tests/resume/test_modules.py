"""A user's module that is stopped and resumed equals an uninterrupted run, bit for bit."""

from typing import Any

import pytest
import torch
from tests.support.module_training import OPTIMIZERS
from tests.support.user_modules import BATCH, SLOW_IMPORTS, user_module
from torch import Tensor

import meshwright
from meshwright.observe.metrics import read_metrics

RANKS_IMPORT = SLOW_IMPORTS
# Starting transformers takes longer than training; the convolutional network has most to lose.
MODULES = ["resnet", *(pytest.param(name, marks=pytest.mark.soak) for name in ("vit", "bert"))]


class Rows:
    """The rows of some batches as numbered samples."""

    def __init__(self, name: str) -> None:
        batches = [user_module(name).batch(step) for step in range(3)]
        self._rows = [tuple(part[row] for part in batch) for batch in batches for row in range(BATCH)]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return self._rows[index]


def _train(name: str, directory: str, *, stop_after: int | None = None, **settings: Any) -> dict[str, Tensor]:
    user = user_module(name)
    model = user.build()
    meshwright.fit(
        model,
        Rows(name),
        user.loss,
        directory=directory,
        stop_after=stop_after,
        device="cpu",
        compute="fp64",
        num_steps=4,
        batch_samples=BATCH,
        recompute="full",
        optim=OPTIMIZERS["adamw"].with_(ema_decay=0.9),
        **{"zero": 3} | settings,
    )
    return {
        key: one.full_tensor() if hasattr(one, "full_tensor") else one
        for key, one in model.state_dict().items()
    }


def _whole_and_in_parts(name: str, directory: str) -> bool:
    whole = _train(name, f"{directory}/whole")
    _train(name, f"{directory}/parts", stop_after=2)
    parts = _train(name, f"{directory}/parts")
    return all(torch.equal(whole[key], parts[key]) for key in whole)


@pytest.mark.parametrize("name", MODULES)
def test_bitwise(ranks, tmp_path, name):
    assert ranks.run(_whole_and_in_parts, 2, name, str(tmp_path)) == [True, True]
    losses = {kind: [row["loss"] for row in read_metrics(tmp_path / kind)] for kind in ("whole", "parts")}
    assert losses["whole"] == losses["parts"] and len(losses["whole"]) == 4


def _elsewhere(name: str, directory: str, zero: int) -> dict[str, Tensor]:
    return _train(name, directory, zero=zero)


def _begin(name: str, directory: str) -> None:
    _train(name, directory, stop_after=2)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["vit", "bert"])
def test_on_another_mesh(ranks, tmp_path, name):
    """Begun with ZeRO-3 on two ranks, ended with ZeRO-1 on four: the same numbers, but for rounding."""
    expected = ranks.run(_elsewhere, 2, name, str(tmp_path / "whole"), 3)[0]
    ranks.run(_begin, 2, name, str(tmp_path / "parts"))
    found = ranks.run(_elsewhere, 4, name, str(tmp_path / "parts"), 1)[0]
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-9, atol=1e-11)


def _part(name: str, directory: str, stop_after: int | None, settings: dict[str, Any]) -> dict[str, Tensor]:
    return _train(name, directory, stop_after=stop_after, **settings)


def test_a_decoder_from_tp_to_another_mesh(ranks, tmp_path):
    """Cut tables, summed norms and plain parameters of a Hugging Face decoder, saved and cut otherwise."""
    name, whole, parts = "gemma3", str(tmp_path / "whole"), str(tmp_path / "parts")
    expected = ranks.run(_part, 2, name, whole, None, {"zero": 0})[0]
    ranks.run(_part, 4, name, parts, 2, {"tp": 2, "zero": 3})
    ranks.run(_part, 2, name, parts, 3, {"zero": 0, "cp": 2})
    found = ranks.run(_part, 4, name, parts, None, {"tp": 2, "zero": 1})[0]
    for key, tensor in expected.items():
        # Another order of sums, in float64.
        torch.testing.assert_close(found[key], tensor, rtol=1e-9, atol=1e-11)
