"""Batch norm over ranks equals one batch norm over all samples, whatever each rank holds of them."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.errors import SpecError
from meshwright.ops.batch_norm import synchronise
from meshwright.rehearse.rank_pool import RankPool, rank_device

# Sums in another order cost float64 a few of its 16 digits.
RTOL = 1e-11
KINDS = {
    "2d": (nn.BatchNorm2d, (5, 4, 3)),
    "1d": (nn.BatchNorm1d, (5,)),
    "3d": (nn.BatchNorm3d, (5, 2, 2, 2)),
    "more": (lambda *args, **options: _Squared(*args, **options), (5, 4, 3)),
    "torch_sync": (nn.SyncBatchNorm, (5, 4, 3)),
}
SPLITS = {"even": (4, 4), "uneven": (7, 1), "four": (1, 3, 2, 2), "one_empty": (8, 0)}


def _samples(shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    # Far from zero: a variance made of two large sums would be wrong in its first digits.
    return torch.randn(8, *shape, generator=generator, dtype=torch.float64) * 3 + 1e4


def _norm(kind: str, **options) -> nn.Module:
    norm = KINDS[kind][0](5, **options).double().to(rank_device())
    if norm.affine:
        with torch.no_grad():
            norm.weight.copy_(torch.linspace(0.5, 1.5, 5))
            norm.bias.copy_(torch.linspace(-1, 1, 5))
    return norm


def _two_steps(norm: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Outputs and gradients of the second call, and the statistics after both."""
    norm(x + 1)
    x = x.clone().requires_grad_()
    y = norm(x)
    factors = torch.arange(y.numel(), dtype=y.dtype, device=y.device).view_as(y)
    # Values depend on the position in the global batch, so rank r's rows can be told apart.
    ((y * torch.sin(x.detach() + factors % y[0].numel() if len(y) else y)).sum()).backward()
    found = {"y": y.detach(), "x": x.grad}
    found |= {name: one.grad for name, one in norm.named_parameters()}
    return found | {name: one.clone() for name, one in norm.named_buffers()}


def _rank(kind: str, sizes: tuple[int, ...], options: dict) -> dict[str, Tensor]:
    norm = _norm(kind, **options)
    synchronise(norm, dist.group.WORLD)
    x = _samples(KINDS[kind][1]).to(rank_device()).split(sizes)[dist.get_rank()]
    return _two_steps(norm, x)


def check(pool: RankPool, kind: str, sizes: tuple[int, ...], **options) -> None:
    plain = "2d" if kind == "torch_sync" else kind  # which cannot run in one process on a CPU
    expected = _two_steps(_norm(plain, **options), _samples(KINDS[kind][1]).to(rank_device()))
    results = pool.run(_rank, len(sizes), kind, sizes, options)
    for name, full in expected.items():
        parts = [result[name] for result in results]
        if name in ("y", "x"):
            found = torch.cat(parts)
        elif name in ("weight", "bias"):
            found = torch.stack(parts).sum(0)
        else:
            assert all(torch.equal(part, parts[0]) for part in parts), name
            found = parts[0]
        assert torch.allclose(found, full.cpu(), rtol=RTOL, atol=RTOL), name


@pytest.mark.parametrize("split", SPLITS)
def test_equals_one_process(ranks, split):
    check(ranks, "2d", SPLITS[split])


@pytest.mark.parametrize("kind", ["1d", "3d"])
def test_other_shapes(ranks, kind):
    check(ranks, kind, (5, 3))


def test_cumulative_average_without_weights(ranks):
    check(ranks, "2d", (6, 2), momentum=None, affine=False)


def test_without_running_statistics(ranks):
    check(ranks, "2d", (6, 2), track_running_stats=False)


class _Squared(nn.BatchNorm2d):
    """A batch norm that does more, as timm's do."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square_()


class _Other(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean((0, 2, 3), keepdim=True)


@pytest.mark.parametrize("kind", ["more", "torch_sync"])
def test_the_own_forward_of_a_norm_runs_on(ranks, kind):
    check(ranks, kind, (6, 2))


def _unreached() -> str:
    norm = _Other(5)
    synchronise(norm, dist.group.WORLD)
    with pytest.raises(SpecError) as caught:
        norm(torch.randn(2, 5, 4, 3))
    return caught.value.fact


def test_a_norm_of_its_own_arithmetic_is_refused(ranks):
    (fact,) = ranks.run(_unreached, 1)
    assert fact == "the forward of _Other does not call torch's batch_norm"


def _evaluated() -> bool:
    norm, plain = _norm("2d"), _norm("2d")
    synchronise(norm, dist.group.WORLD)
    x = _samples((5, 4, 3))
    return torch.equal(norm.eval()(x), plain.eval()(x))


def test_evaluation_is_local(ranks):
    assert ranks.run(_evaluated, 2) == [True, True]
