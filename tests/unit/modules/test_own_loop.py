"""A loop of one's own over ranks equals the plain loop it was; stopped and resumed it goes the same way."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.support.module_training import NUM_STEPS, OPTIMIZERS, train_plain_loop
from tests.support.user_modules import BATCH, SLOW_IMPORTS, user_module
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import meshwright
from meshwright.data.order import SampleOrder
from meshwright.errors import MeshwrightError, SpecError

RANKS_IMPORT = SLOW_IMPORTS
RTOL = 1e-9
NUM_SAMPLES, EPOCHS = 29, 2
BUILD = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-5),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, dampening=0.3),
}


class Net(nn.Module):
    """With blocks, a single number, a frozen parameter, one that nothing uses, and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(2)])
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))
        self.norm = nn.BatchNorm1d(3, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.scale * self.frozen


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(*torch.randn(2, NUM_SAMPLES, 3, generator=generator, dtype=torch.float64))


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net().double()


def plain(kind: str, batch: int, num_steps: int | None = None) -> tuple[list[float], dict[str, Tensor]]:
    """One process over full batches, in the order that the loaders share."""
    model, order, data = net(), SampleOrder(NUM_SAMPLES, 0, True), samples()
    optimizer = BUILD[kind](model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    losses = []
    for epoch in range(EPOCHS):
        ids = order.sample_ids(epoch * NUM_SAMPLES, NUM_SAMPLES)
        for start in range(0, NUM_SAMPLES, batch):
            x, y = data[ids[start : start + batch]]
            loss = mse_loss(model(x), y, reduction="sum") / y.numel()
            loss.backward()
            nn.utils.clip_grad_norm_([one for one in model.parameters() if one.grad is not None], 0.5)
            model.unused.grad = torch.zeros_like(model.unused)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            losses.append(float(loss.detach()))
    return losses, {name: one.detach().clone() for name, one in model.named_parameters()}


def own_loop(
    kind: str, batch: int, settings: dict, directory: str | None = None, stop_at: int | None = None
) -> tuple[list[float], dict[str, Tensor]]:
    """The same loop in a few more words; ranks start from different weights."""
    model = net(seed=dist.get_rank() if dist.is_initialized() else 0)
    optimizer = BUILD[kind](model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    loader = DataLoader(samples(), batch_size=batch, shuffle=True)
    keep = {"scheduler": scheduler} if directory else None
    run = meshwright.prepare(
        model,
        optimizer,
        loader,
        directory=directory,
        keep=keep,
        device="cpu",
        compute="fp64",
        max_grad_norm=0.5,
        **settings,
    )
    losses = []
    for _ in range(run.epoch, EPOCHS):
        for x, y in run.loader:
            run.backward(mse_loss(model(x), y, reduction="sum"), y.numel())
            step = run.step()
            if step is None:
                continue
            scheduler.step()
            losses.append(float(step.loss))
            if step.number == stop_at:
                run.save()
                return losses, {}
    weights = {one.name: one.as_global(one.shard).full_tensor() for one in run._program.shards}
    run.end()
    return losses, {name: weight.clone() for name, weight in weights.items()}


def same(found: tuple, expected: tuple) -> None:
    (losses, weights), (plain_losses, plain_weights) = found, expected
    torch.testing.assert_close(losses, plain_losses, rtol=RTOL, atol=0.0)
    torch.testing.assert_close(weights, plain_weights, rtol=RTOL, atol=1e-12)


def _several(kind: str, cases: list[tuple[int, dict]]) -> list[tuple]:
    return [own_loop(kind, batch, settings) for batch, settings in cases]


@pytest.mark.parametrize("kind", BUILD)
def test_any_split_equals_the_plain_loop(ranks, kind):
    """29 samples in batches of 8: the last has five, and 5 x 1 of accumulation 4 ends early."""
    cases = [
        (4, {}),
        (2, {"accumulation": 2}),
        (1, {"accumulation": 4, "zero": 1}),
        (4, {"zero": 2, "recompute": "full"}),
    ]
    expected = plain(kind, 8)
    for by_rank in ranks.run(_several, 2, kind, cases):
        for found in by_rank:
            same(found, expected)


def test_ranks_without_a_sample_count_for_nothing(ranks):
    """Batches of 28: the last holds one sample for four ranks."""
    for found in ranks.run(own_loop, 4, "momentum", 7, {}):
        same(found, plain("momentum", 28))


def test_one_process_needs_no_launcher():
    found = own_loop("adamw", 8, {"zero": 3})
    assert not dist.is_initialized()
    same(found, plain("adamw", 8))


def _stop_and_go(kind: str, directory: str, zero: int) -> list[float]:
    settings = {"zero": zero} if dist.get_world_size() > 1 else {}
    return own_loop(kind, 8 // dist.get_world_size(), settings, directory, stop_at=3)[0]


def _go_on(kind: str, directory: str, zero: int) -> tuple:
    return own_loop(kind, 8 // dist.get_world_size(), {"zero": zero} if zero else {}, directory)


@pytest.mark.parametrize("kind", BUILD)
def test_resumed_on_other_ranks_it_goes_the_same_way(ranks, tmp_path, kind):
    """Stopped after step 3, in mid-epoch, on two ranks; resumed on one, which has other micro-batches."""
    expected_losses, expected_weights = plain(kind, 8)
    begun = ranks.run(_stop_and_go, 2, kind, str(tmp_path), 2)[0]
    losses, weights = ranks.run(_go_on, 1, kind, str(tmp_path), 0)[0]
    same((begun + losses, weights), (expected_losses, expected_weights))


def test_an_average_and_an_update_rule_of_ours():
    model = net()
    run = meshwright.prepare(
        model, None, [torch.ones(2, 3)], device="cpu", optim={"kind": "muon", "lr": 1e-2, "ema_decay": 0.5}
    )
    before = copy.deepcopy(model.state_dict())
    for x in run.loader:
        run.backward(model(x.float()).sum(), 6)
        report = run.step(learning_rate=0.1)
    run.end()
    assert report.number == run.num_steps == 1
    assert not torch.equal(model.blocks[0][0].weight, before["blocks.0.0.weight"])


class Unknown(torch.optim.SGD):
    """An optimizer of an unknown kind."""


BAD = {
    "a setting that is not there": ({"zeroo": 1}, "there is no setting 'zeroo'"),
    "a wrong value": ({"zero": 7}, "parallel.zero is 7"),
    "expert parallel": (
        {"parallel": {"ep": 2, "dp_shard": 2, "zero": 1}},
        "ep=2 for a user module",
    ),
    "a pipeline": ({"parallel": {"pp": 2}}, "pp=2 in a loop of your own"),
    "a pattern of nothing": ({"blocks": "layers.*"}, "'layers.*' matches none"),
    "fp16 without a scale": ({"compute": "fp16"}, "compute=fp16 without loss_scale"),
    "two optimizers": ({"optim": {"lr": 0.1}}, "both optimizer and optim are set"),
    "more ranks than there are": ({"dp_replicate": 4}, "parallel asks for 4 ranks"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_settings_are_errors_before_the_first_step(case):
    settings, fact = BAD[case]
    model = net()
    try:
        with pytest.raises(MeshwrightError) as caught:
            meshwright.prepare(model, BUILD["adamw"](model), [], device="cpu", **settings)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    assert fact in str(caught.value)


def _refusals() -> list[str]:
    """The errors of two ranks for optimizers and modules that cannot be sharded."""
    facts = []
    for zero, change in [(1, "optimizer"), (3, "number"), (0, "state"), (0, "others"), (3, "shared")]:
        model = net()
        optimizer = (Unknown if change == "optimizer" else torch.optim.SGD)(
            model.parameters(), lr=0.1, momentum=0.9
        )
        if change == "state":
            model(torch.ones(2, 3).double()).sum().backward()
            optimizer.step()
        if change == "others":
            optimizer = torch.optim.SGD(net().parameters(), lr=0.1)
        if change == "shared":
            model.scale = nn.Parameter(torch.ones(1).double())
            model.blocks[1][0].weight = model.blocks[0][0].weight
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            meshwright.prepare(model, optimizer, [], device="cpu", zero=zero)
        except SpecError as error:
            facts.append(error.fact)
    return facts


def test_what_cannot_be_sharded_is_an_error(ranks):
    expected = [
        "Unknown may need full parameters",
        "scale is a scalar, which ZeRO-3 cannot shard",
        "SGD already has state",
        "SGD holds 7 parameters that the model does not have",
        "blocks.0.0.weight is shared by blocks.0 and blocks.1",
    ]
    for facts in ranks.run(_refusals, 2):
        assert len(facts) == len(expected)
        assert all(fact.startswith(begin) for fact, begin in zip(facts, expected, strict=True)), facts


def test_a_mean_is_refused():
    model = net()
    run = meshwright.prepare(model, BUILD["adamw"](model), [], device="cpu")
    with pytest.raises(SpecError, match="where \\(sum, count\\) was expected"):
        run.backward(model(torch.ones(2, 3)), 6)
    run.end()


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"optimizer": "adamw"}, "'adamw' is not a torch optimizer"),
        ({"optimizer": "lbfgs"}, "LBFGS calls a closure for the loss"),
        ({"model": len}, "builtin_function_or_method is not an nn.Module"),
        ({"keep": {"rates": object()}}, "keep has no effect without a directory"),
        ({"checkpoint": {"every_steps": 5}}, "checkpoint has no effect without a directory"),
    ],
    ids=["no optimizer", "a closure", "no module", "keep", "checkpoint"],
)
def test_bad_input_is_an_error_before_anything_is_changed(changes, fact):
    model = net()
    given = {"model": model, "optimizer": BUILD["adamw"](model), **changes}
    if given["optimizer"] == "lbfgs":
        given["optimizer"] = torch.optim.LBFGS(model.parameters())
    with pytest.raises(SpecError, match=fact) as caught:
        meshwright.prepare(loader=[], device="cpu", **given)
    assert caught.value.where and caught.value.hint
    assert not dist.is_initialized()


def test_a_step_without_gradients_is_refused():
    model = net()
    run = meshwright.prepare(model, BUILD["adamw"](model), [], device="cpu")
    with pytest.raises(SpecError, match=r"step\(\) without a backward\(\)"):
        run.step()
    run.end()


def test_importing_the_package_loads_no_torch():
    import subprocess
    import sys

    program = "import sys, meshwright; assert 'torch' not in sys.modules; assert 'fit' in dir(meshwright)"
    subprocess.run([sys.executable, "-c", program], check=True)
    assert Path(meshwright.__file__).name == "__init__.py"


def _decoder_loop(name: str, settings: dict) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Three batches in order through a decoder of transformers, the same as in `train_plain_loop`."""
    user, optim = user_module(name), OPTIMIZERS["adamw"]
    torch.manual_seed(dist.get_rank())
    model = user.build()
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=optim.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        weight_decay=optim.weight_decay,
    )
    parts = zip(*(user.batch(step) for step in range(NUM_STEPS)), strict=True)
    loader = DataLoader(TensorDataset(*map(torch.cat, parts)), batch_size=BATCH)
    run = meshwright.prepare(
        model,
        optimizer,
        loader,
        device="cpu",
        compute="fp64",
        max_grad_norm=optim.max_grad_norm,
        **settings,
    )
    steps = []
    for batch in run.loader:
        run.backward(*user.loss(model, batch))
        steps.append(run.step())
    run.end()
    weights = {one.name: one.as_global(one.shard).full_tensor().clone() for one in run._program.shards}
    return [float(one.loss) for one in steps], [float(one.grad_norm) for one in steps], weights


@pytest.mark.parametrize("name", ["starcoder2"])
def test_tp_in_a_loop_equals_the_plain_loop(ranks, name):
    """The plan is what the decoder publishes; the module is called as before."""
    expected = train_plain_loop(name, "adamw")
    for losses, norms, weights in ranks.run(_decoder_loop, 2, name, {"tp": 2}):
        torch.testing.assert_close(losses, expected.losses, rtol=RTOL, atol=0.0)
        torch.testing.assert_close(norms, expected.grad_norms, rtol=RTOL, atol=0.0)
        torch.testing.assert_close(weights, expected.weights, rtol=RTOL, atol=1e-10)
