"""A module, a dataset and a loss through the trainer: its run directory, resume, evaluation, bad input."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import meshwright
from meshwright.checkpoint.load import saved_shapes
from meshwright.errors import MeshwrightError
from meshwright.observe.events import read_events
from meshwright.observe.metrics import read_metrics

SETTINGS = {
    "device": "cpu",
    "compute": "fp64",
    "num_steps": 6,
    "batch_samples": 8,
    "microbatch_samples": 2,
    "optim": {"kind": "adamw", "lr": 0.02, "eps": 1e-5},
}


def network() -> nn.Module:
    """With dropout and batch norm: what a resume must bring back besides weights."""
    torch.manual_seed(1)
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU()) for _ in range(2)]
    return nn.Sequential(nn.Sequential(*blocks), nn.Dropout(0.1), nn.Linear(6, 3))


def samples(seed: int, count: int = 50) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, (x[:, :3]).argmax(1))


def loss(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
    x, y = batch
    return cross_entropy(model(x), y, reduction="sum"), len(y)


def train(directory: str, stop_after: int | None = None, **changes) -> dict[str, Tensor]:
    model = network()
    meshwright.fit(
        model,
        samples(0),
        loss,
        evaluation=samples(1),
        evaluate={"every_steps": 3},
        directory=directory,
        stop_after=stop_after,
        **{**SETTINGS, **changes},
    )
    return {
        name: one.full_tensor() if hasattr(one, "full_tensor") else one
        for name, one in model.state_dict().items()
    }


def _losses(directory: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(directory)]


def _both(directory: str, changes: dict) -> bool:
    full = train(f"{directory}/full", **changes)
    train(f"{directory}/parts", 2, **changes)
    resumed = train(f"{directory}/parts", **changes)
    return all(torch.equal(full[name], resumed[name]) for name in full)


@pytest.mark.parametrize(
    "changes",
    [{"zero": 1, "sync_batch_norm": True}, {"zero": 3, "recompute": "full", "optim": {"ema_decay": 0.9}}],
    ids=["zero_1", "zero_3"],
)
def test_resumed_equals_uninterrupted_bitwise(ranks, tmp_path, changes):
    """Weights and running statistics, with dropout; the metrics are one clean history."""
    assert ranks.run(_both, 2, str(tmp_path), changes) == [True, True]
    assert _losses(tmp_path / "full") == _losses(tmp_path / "parts")
    assert len(_losses(tmp_path / "full")) == 6


def _with_buffers(directory: str) -> bool:
    """Every rank holds the running statistics of the first, which are those that were saved."""
    state = train(directory)
    mean = state["0.0.1.running_mean"].clone()
    dist.broadcast(mean, src=0)
    return bool(mean.any()) and torch.equal(mean, state["0.0.1.running_mean"])


def test_buffers_are_alike_and_saved(ranks, tmp_path):
    """Without statistics over all ranks each has its own, and the first one's count."""
    assert ranks.run(_with_buffers, 2, str(tmp_path)) == [True, True]
    shapes = saved_shapes(next((tmp_path / "checkpoints").glob("step-*")))
    assert shapes["buffers.0.0.1.running_mean"] == (6,)
    assert shapes["buffers.0.1.1.num_batches_tracked"] == ()


def test_a_directory_like_any_run_s(tmp_path):
    """One process: files, evaluation, a report."""
    from typer.testing import CliRunner

    from meshwright.cli.main import app

    train(str(tmp_path))
    rows = read_metrics(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows if row.get("eval_loss") is not None] == [3, 6]
    assert rows[-1]["tokens"] == 48 and rows[-1]["mfu"] is None
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["outcome"] == "finished" and summary["num_parameters"] == 2 * (42 + 12) + 21
    assert "batch_samples: 8" in (tmp_path / "run.yaml").read_text()
    done = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "report.html").is_file()


def test_the_loss_does_not_depend_on_the_micro_batch(tmp_path):
    """Nor does evaluation; without batch norm and dropout, whose randomness and statistics do."""
    found = []
    for size in (1, 3, 8):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
        directory = tmp_path / str(size)
        meshwright.fit(
            model,
            samples(0),
            loss,
            evaluation=samples(1),
            evaluate={"every_steps": 3},
            directory=directory,
            max_epochs=1,
            **{**SETTINGS, "batch_samples": 24, "microbatch_samples": size},
        )
        rows = read_metrics(directory)
        assert rows[-1]["tokens"] == 50  # two batches of 24 and one of two
        found.append([row["loss"] for row in rows] + [row["eval_loss"] for row in rows if "eval_loss" in row])
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=0.0)
    torch.testing.assert_close(found[0], found[2], rtol=1e-9, atol=0.0)


def test_settings_from_a_file(tmp_path):
    file = tmp_path / "fit.yaml"
    file.write_text("device: cpu\ndata: {batch_samples: 4}\nschedule: {num_steps: 9}\n")
    outcome = meshwright.fit(
        nn.Sequential(nn.Linear(6, 3)).double(),
        samples(0),
        loss,
        run=file,
        compute="fp64",
        num_steps=2,
        directory=tmp_path / "run",
    )
    assert outcome.state.step == 2


BAD = {
    "no steps": ({"num_steps": None}, "schedule.num_steps is null"),
    "an uneven batch": ({"batch_samples": 9}, "batch_samples=9 is not a multiple of"),
    "not map-style": ({"dataset": iter([])}, "has no __len__ or no __getitem__"),
    "no samples": ({"dataset": []}, "list has no samples"),
    "evaluation that never comes": ({"evaluation": samples(1)}, "evaluation without observe.evaluate"),
    "no evaluation": ({"evaluate": {"every_steps": 1}}, "observe.evaluate without evaluation"),
    "weights from elsewhere": (
        {"start_from": "x"},
        "start_from reads weights of built-in families",
    ),
    "every second of none": ({"recompute_every": 2}, "recompute_every=2 has no effect"),
    "offloaded parameters": (
        {"offload": "parameters"},
        "offload of parameters supports built-in families",
    ),
    "regather": ({"regather_tp_inputs": True}, "regather_tp_inputs=True has no effect"),
    "reduce": ({"grad_reduce": "last_microbatch"}, "grad_reduce=last_microbatch has no effect"),
    "nothing to offload": (
        {"offload": "activations", "model": nn.Linear(6, 3)},
        "has no list of modules",
    ),
    "nothing to recompute": (
        {"recompute": "full", "model": nn.Linear(6, 3)},
        "has no list of modules",
    ),
    "a list of linears": (
        {"recompute": "full", "model": nn.Sequential(nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 3)))},
        "blocks='0.*' takes the members of 0",
    ),
    "nothing trains": ({"model": nn.ReLU()}, "ReLU has no parameter with requires_grad"),
    "a meta module": ({"model": nn.Linear(6, 3, device="meta")}, "have no values (meta device)"),
    "a mean": ({"loss": lambda model, batch: model(batch[0]).mean()}, "where (sum, count) was expected"),
    "a sum per sample": (
        {"loss": lambda model, batch: (model(batch[0])[:, 0], 8)},
        "the loss returned (a tensor of shape (2,), int) where",
    ),
    "a sum without a graph": (
        {"loss": lambda model, batch: (model(batch[0]).detach().sum(), 8)},
        "the loss sum depends on no parameter",
    ),
    "no module": ({"model": len}, "builtin_function_or_method is not an nn.Module"),
    "parts that are not there": (
        {"model": meshwright.Chain(network(), ["blocks.*"])},
        "pattern 'blocks.*' matches none",
    ),
    "a stop before the start": ({"stop_after": 0}, "stop_after is 0"),
    "a file that is not there": ({"run": "none.yaml"}, "cannot be read"),
    "nothing to synchronise": (
        {"model": nn.Linear(6, 3), "sync_batch_norm": True},
        "Linear has no batch norm",
    ),
    "what an OOM does": ({"on_oom": "halve_microbatch"}, "on_oom=halve_microbatch is for models"),
    "a group of nothing": (
        {"optim": {"groups": [{"pattern": "*norm*", "lr_factor": 0.5}]}},
        "pattern '*norm*' matches no parameter",
    ),
    "fp8": ({"compute": "bf16", "fp8": "current"}, "fp8=current for a user module"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_an_error(tmp_path, case):
    changes, fact = BAD[case]
    given = {
        "model": network(),
        "dataset": samples(0),
        "loss": loss,
        "directory": tmp_path,
        **SETTINGS,
        **changes,
    }
    with pytest.raises(MeshwrightError) as caught:
        meshwright.fit(**given)
    assert fact in str(caught.value)
    assert not dist.is_initialized()


def test_a_missing_setting_is_named():
    with pytest.raises(MeshwrightError) as caught:
        meshwright.fit(network(), samples(0), loss)
    assert len(caught.traceback) == 2, "this line and one of ours, whatever the depth at which it was found"
    assert "schedule.num_steps is missing" in str(caught.value)
    assert "data.batch_samples is missing" in str(caught.value)


def _trained(directory: str) -> dict[str, Tensor]:
    return train(directory, zero=3, optim={"ema_decay": 0.5})


def test_weights_come_back_into_a_plain_module(ranks, tmp_path):
    trained = ranks.run(_trained, 2, str(tmp_path))[0]
    state = meshwright.load_weights(network().double(), tmp_path).state_dict()
    assert all(torch.equal(state[name], trained[name]) for name in trained)
    averaged = meshwright.load_weights(network().double(), tmp_path, ema=True)
    assert not torch.equal(averaged[2].weight, trained["2.weight"])


def test_weights_that_are_not_there(tmp_path):
    train(str(tmp_path))
    for model, options, fact in [
        (network(), {"ema": True}, "has no moving average"),
        (nn.Linear(3, 3), {}, "are not in the checkpoint"),
        (network(), {"step": 77}, "there is no checkpoint of step 77"),
    ]:
        with pytest.raises(MeshwrightError, match=fact):
            meshwright.load_weights(model, tmp_path, **options)


def test_another_run_is_refused(tmp_path):
    train(str(tmp_path))
    with pytest.raises(MeshwrightError, match=r"this directory has another run: optim\.kind was 'adamw'"):
        train(str(tmp_path), optim={"kind": "lamb"})
    with pytest.raises(MeshwrightError, match="this directory has another run: seed was"):
        train(str(tmp_path), seed=99)


def test_a_run_goes_on_with_other_settings(tmp_path):
    train(str(tmp_path), stop_after=3)
    train(str(tmp_path), weight_decay=0.25)
    changes = [event for event in read_events(tmp_path / "events-0.jsonl") if event["kind"] == "change"]
    assert [(one["step"], one["setting"], one["new"]) for one in changes] == [
        (3, "optim.weight_decay", "0.25")
    ]


@pytest.mark.parametrize(
    "changes", [{"compute": "bf16"}, {"compute": "fp16", "loss_scale": {"initial": 4.0}}], ids=str
)
def test_lower_precision_follows_fp32(tmp_path, changes):
    """Weights and the loss stay fp32; 8 bits (bf16) of activations leave the loss within a hundredth."""
    found = {}
    for name, precision in {"fp32": {"compute": "fp32"}, "lower": changes}.items():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3))
        settings = {**SETTINGS, **precision, "directory": tmp_path / name}
        data = TensorDataset(samples(0).tensors[0].float(), samples(0).tensors[1])
        meshwright.fit(model, data, loss, **settings)
        assert {one.dtype for one in model.parameters()} == {torch.float32}
        assert model(data.tensors[0]).dtype == torch.float32
        found[name] = _losses(tmp_path / name)
    assert found["fp32"] != found["lower"]
    torch.testing.assert_close(found["lower"], found["fp32"], rtol=1e-2, atol=0.0)


def test_every_block_is_compiled(tmp_path):
    from unittest.mock import patch

    compiled = []
    with patch.object(nn.Module, "compile", lambda module: compiled.append(module)):
        model = network()
        meshwright.fit(model, samples(0), loss, directory=tmp_path, compile=True, **SETTINGS)
    assert compiled == list(model[0])
