"""8-bit moments: what a code loses, where blocks lie, and noise that no shard changes."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import is_concrete_int

from meshwright.optim import low_bit
from meshwright.optim.build import build_optimizer
from meshwright.optim.full_parameter import FullParameter, unsharded
from meshwright.optim.low_bit import Adam8Bit, block_amax, dequantise
from meshwright.optim.rounding_noise import draw, noise_grid, step_key
from meshwright.spec import OptimSpec

SHAPE = torch.Size((6, 700))
SHARDS = {
    "rows": (slice(2, 5), slice(0, 700)),
    "inside a block": (slice(0, 6), slice(130, 700)),
    "both, and within one block": (slice(3, 4), slice(300, 420)),
    "nothing": (slice(6, 6), slice(0, 700)),
}


def shard_at(slices: tuple[slice, ...], shape: torch.Size = SHAPE) -> FullParameter:
    return FullParameter("w", shape, slices, (), lambda tensor: tensor)


FULL = shard_at((slice(0, 6), slice(0, 700)))


@pytest.mark.parametrize("shard", SHARDS)
def test_blocks_are_those_of_the_full_parameter(shard):
    """The amax of all shards together is that of the full parameter; a shard knows only its own blocks."""
    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    expected = torch.stack([values[:, i : i + 256].abs().amax(1) for i in (0, 256, 512)], dim=1)
    assert torch.equal(block_amax(values, FULL), expected)
    rows, columns = SHARDS[shard]
    masked = torch.zeros(SHAPE)
    masked[:, columns] = values[:, columns]
    assert torch.equal(
        block_amax(values[SHARDS[shard]], shard_at(SHARDS[shard])), block_amax(masked, FULL)[rows]
    )


def quantised_and_back(key: str, moment: torch.Tensor, step: int) -> torch.Tensor:
    full = unsharded("w", moment)
    state = {f"{key}_scale": block_amax(moment, full)}
    noise = draw(noise_grid(full, moment.device), step_key(step, moment.device)).first / 2**16
    state[f"{key}_code"] = low_bit._quantise_to_code(
        moment,
        low_bit._scale_per_element(state[f"{key}_scale"], full, moment.dtype),
        key,
        noise.view_as(moment),
    )
    return dequantise(state, key, full, moment.dtype)


@pytest.mark.parametrize(("key", "ratio"), [("exp_avg", 2 ** (16 / 126)), ("exp_avg_sq", 2 ** (24 / 254))])
def test_a_code_is_a_neighbour_and_right_on_average(key, ratio):
    """Values over three decades; a level is at most one step away, and rounding has no bias."""
    sizes = 10 ** -torch.linspace(0, 3, 256, dtype=torch.float64).repeat(4, 1)
    back = torch.stack([quantised_and_back(key, sizes, step) for step in range(200)])
    assert ((back / sizes).log().abs() <= 1.0001 * torch.tensor(ratio).log()).all()
    # The worst spread of one draw is half a step, 5%; the mean of 800 is known to 0.2%.
    mean = back.mean((0, 1)) / sizes[0]
    assert (mean - 1).abs().max() < 0.01
    assert (mean - 1).mean().abs() < 0.001


def test_extremes():
    """Zero stays zero, the largest value is exact, a tiny second moment is never lost."""
    moment = torch.tensor([[1.0, 1e-30, 0.0]])
    second = quantised_and_back("exp_avg_sq", moment, 0)
    assert second[0, 0] == 1.0 and second[0, 1] > 0 and second[0, 2] == 0
    first = quantised_and_back("exp_avg", -moment, 0)
    assert first[0, 0] == -1.0 and first[0, 2] == 0
    assert not quantised_and_back("exp_avg_sq", torch.zeros(2, 3), 0).any()


def losses(kind: str, num_steps: int = 150) -> float:
    """Least squares with noisy gradients; the loss at the end."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(512, 32, generator=generator)
    targets = features @ torch.randn(32, 8, generator=generator)
    targets += torch.randn(targets.shape, generator=generator)
    weight = nn.Parameter(torch.zeros(8, 32))
    optim = OptimSpec(kind=kind, lr=0.05, beta2=0.999, weight_decay=0.0)
    optimizer = build_optimizer({"weight": weight}, optim)
    for _ in range(num_steps):
        rows = torch.randint(512, (64,), generator=generator)
        weight.grad = torch.autograd.grad(
            nn.functional.mse_loss(features[rows] @ weight.T, targets[rows]), weight
        )[0]
        optimizer.step()
    assert isinstance(optimizer, Adam8Bit) == (kind == "adamw_8bit")
    return nn.functional.mse_loss(features @ weight.detach().T, targets).item()


def test_learns_like_adamw():
    """From a loss of about 33 down to the noise of the targets; 0.04% apart when this was written."""
    exact, coded = losses("adamw"), losses("adamw_8bit")
    assert exact < 1.1
    assert coded < 1.02 * exact


@pytest.mark.parametrize("weights", ("fp32", "bf16_exact", "bf16_stochastic"))
def test_one_pass_equals_the_update_step_by_step(monkeypatch, weights):
    """Full blocks go through one pass; forced the other way, weights and codes come out the same."""
    dtype = torch.float64 if weights == "fp32" else torch.bfloat16
    found = []
    for is_fused in (True, False):
        if not is_fused:
            monkeypatch.setattr(low_bit, "_has_full_blocks", lambda part: False)
        generator = torch.Generator().manual_seed(0)
        weight = nn.Parameter(torch.randn(3, 4, 512, generator=generator).to(dtype))
        optimizer = build_optimizer({"w": weight}, OptimSpec(kind="adamw_8bit", lr=0.01), weights=weights)
        for _ in range(4):
            weight.grad = torch.randn(3, 4, 512, generator=generator).to(dtype)
            optimizer.step()
        found.append({"weight": optimizer.master(weight), **optimizer.state[weight]})
        found[-1].pop("lower_bits", None)
    for key, value in found[0].items():
        away = (value.double() - found[1][key].double()).abs()
        # fp32 arithmetic in another order moves a number by its last bit, which rarely tips a rounding.
        allowed = (
            0.0 if dtype == torch.float64 and "code" in key else 1e-12 if dtype == torch.float64 else 1e-2
        )
        assert away.mean() <= allowed, key
    assert found[0]["exp_avg_code"].unique().numel() > 100


def test_the_compiler_knows_the_size_of_a_block_alone(monkeypatch):
    """Else one kernel would become two, with 6 bytes per element in memory between them."""
    are_known = []

    def look(module, _):
        traced = [node.meta["example_value"] for node in module.graph.find_nodes(op="placeholder")]
        of_blocks = (one for one in traced if isinstance(one, torch.Tensor) and one.ndim == 3)
        are_known.extend([is_concrete_int(size) for size in one.shape] for one in of_blocks)
        return module.forward

    compiled = torch.compile(low_bit.blockwise_pass, dynamic=True, fullgraph=True, backend=look)
    monkeypatch.setattr(low_bit, "fused_kernel", lambda *_: nullcontext(compiled))
    weight = nn.Parameter(torch.ones(6, 1024).bfloat16())
    optimizer = build_optimizer({"w": weight}, OptimSpec(kind="adamw_8bit"), weights="bf16_stochastic")
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert are_known == [[False, False, True]] * 6  # weight, gradient, two codes and their scales
