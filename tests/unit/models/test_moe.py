"""Routing, capacity, empty experts, and a load-balancing loss that does not depend on the sharding."""

import pytest
import torch
from tests.support.shrunk_families import shrunk_family
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from meshwright.models import build_decoder, initialise
from meshwright.models.balance import pop_routing_records, update_balance_bias
from meshwright.models.layers.moe import Moe, RowInputs
from meshwright.models.layers.routing import Capacity, Router
from meshwright.ops.expert_rows import rows_by_expert
from meshwright.spec import MoeSpec

SAME_FLOAT64 = {"rtol": 1e-11, "atol": 1e-13}
PLAIN = MoeSpec(num_experts=4, top_k=2, width=6, aux_loss=0.3)


def _moe(spec: MoeSpec = PLAIN, width: int = 5) -> Moe:
    torch.manual_seed(0)
    moe = Moe(spec, width).double()
    for parameter in moe.parameters():
        nn.init.normal_(parameter, std=0.5)
    return moe


def _x(num_sequences: int = 3, num_positions: int = 8, width: int = 5) -> Tensor:
    shape = (num_sequences, num_positions, width)
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def _by_hand(moe: Moe, x_BSD: Tensor) -> Tensor:
    """Every expert on every token, then weighted."""
    experts_BSC, weights_BSC, _ = moe.router(x_BSD)
    experts = moe.experts
    gate = torch.einsum("bsd,efd->bsef", x_BSD, experts.gate)
    up = torch.einsum("bsd,efd->bsef", x_BSD, experts.up)
    all_BSED = torch.einsum("bsef,edf->bsed", functional.silu(gate) * up, experts.down)
    combine_BSE = torch.zeros_like(all_BSED[..., 0]).scatter(-1, experts_BSC, weights_BSC)
    return torch.einsum("bse,bsed->bsd", combine_BSE, all_BSED)


def test_dropless_equals_every_expert_on_every_token() -> None:
    moe, x_BSD = _moe(), _x()
    torch.testing.assert_close(moe(x_BSD), _by_hand(moe, x_BSD), **SAME_FLOAT64)


def test_shared_experts_see_every_token() -> None:
    moe = _moe(PLAIN.with_(shared_width=7))
    assert moe.shared is not None
    x_BSD = _x()
    torch.testing.assert_close(moe(x_BSD), _by_hand(moe, x_BSD) + moe.shared(x_BSD), **SAME_FLOAT64)


def test_an_expert_without_tokens_gets_a_zero_gradient() -> None:
    moe = _moe()
    with torch.no_grad():
        moe.router.weight[2] = 0
        moe.router.weight[[0, 1, 3]] = 0
        moe.router.weight[2, 0] = -50
    x_BSD = _x().abs()
    moe(x_BSD).sum().backward()
    assert moe.load[2] == 0 and int(moe.load.sum()) == 3 * 8 * 2
    assert moe.experts.gate.grad is not None and not moe.experts.gate.grad[2].any()
    assert moe.experts.gate.grad.any()


def test_no_token_at_all() -> None:
    moe = _moe()
    x_TD = torch.zeros(0, 5, dtype=torch.float64, requires_grad=True)
    rows = rows_by_expert(torch.zeros(0, 2, dtype=torch.int64))
    moe.experts(
        x_TD, rows, RowInputs(x_TD.new_zeros(0), None), torch.zeros(4, dtype=torch.int64)
    ).sum().backward()
    assert moe.experts.down.grad is not None and not moe.experts.down.grad.any()


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalise", [True, False])
def test_weights_of_the_chosen(score: str, normalise: bool) -> None:
    spec = MoeSpec(num_experts=4, top_k=2, width=6, score=score, normalise_top_k=normalise, routed_scale=2.5)
    router = _moe(spec).router
    experts_BSC, weights_BSC, scores_BSE = router(_x())
    chosen = scores_BSE.gather(-1, experts_BSC)
    expected = chosen / chosen.sum(-1, keepdim=True) if normalise else chosen
    torch.testing.assert_close(weights_BSC, expected * 2.5, **SAME_FLOAT64)
    assert torch.equal(chosen, scores_BSE.topk(2).values)


def test_groups_limit_the_choice() -> None:
    spec = MoeSpec(num_experts=8, top_k=3, width=6, num_groups=4, top_groups=2, group_score="top2_sum")
    experts_BSC = _moe(spec).router(_x()).experts_BSC
    assert all(len({int(expert) // 2 for expert in row}) <= 2 for row in experts_BSC.flatten(0, 1))


def test_the_balance_bias_moves_the_choice_but_not_the_weights() -> None:
    spec = MoeSpec(
        num_experts=4, top_k=1, width=6, score="sigmoid", normalise_top_k=False, has_balance_bias=True
    )
    router = _moe(spec).router
    assert isinstance(router, Router) and router.balance_bias is not None
    router.balance_bias[3] = 100.0
    experts_BSC, weights_BSC, scores_BSE = router(_x())
    assert (experts_BSC == 3).all()
    assert torch.equal(weights_BSC, scores_BSE[..., 3:])


def test_capacity_keeps_the_first_choices_of_each_sequence() -> None:
    capacity = Capacity(PLAIN.with_(top_k=1, capacity_factor=1.0))
    experts_BSC = torch.tensor([[0, 0, 1, 0, 2, 1, 1, 0], [3, 3, 3, 0, 1, 2, 0, 1]])[..., None]
    accepted = capacity(experts_BSC)[..., 0].int().tolist()  # 8 tokens / 4 experts: two each
    assert accepted == [[1, 1, 1, 0, 1, 1, 0, 0], [1, 1, 0, 1, 1, 1, 1, 1]]


def test_capacity_drops_what_is_over_it_and_nothing_else() -> None:
    moe = _moe(PLAIN.with_(capacity_factor=1.0))
    x_BSD = _x()
    routing = moe.router(x_BSD)
    kept_BSC = Capacity(moe.moe)(routing.experts_BSC)
    assert not kept_BSC.all()
    weights_BSC = routing.weights_BSC * kept_BSC
    reference = _moe()
    reference.load_state_dict(moe.state_dict())
    reference.router.forward = lambda x: routing._replace(weights_BSC=weights_BSC)  # type: ignore[method-assign]
    torch.testing.assert_close(moe(x_BSD), _by_hand(reference, x_BSD), **SAME_FLOAT64)
    roomy = _moe(PLAIN.with_(capacity_factor=4.0))
    torch.testing.assert_close(roomy(x_BSD), _moe()(x_BSD), **SAME_FLOAT64)


def _router_gradient(parts: list[Tensor], *, recompute: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of the balancing loss alone, its value and the load, over these micro-batches."""
    moe = _moe()
    for x_BSD in parts:
        weights_B = torch.full((len(x_BSD),), 1 / 3, dtype=torch.float64)
        x_BSD = x_BSD.clone().requires_grad_()
        run = lambda x, w=weights_B: moe(x, sequence_weights_B=w)  # noqa: E731
        y_BSD = checkpoint(run, x_BSD, use_reentrant=False) if recompute else run(x_BSD)
        y_BSD.backward(torch.zeros_like(y_BSD))  # nothing but the balancing loss acts
    assert moe.router.weight.grad is not None
    return moe.router.weight.grad, moe.balance_loss.clone(), moe.load.clone()


def test_the_balance_loss_does_not_depend_on_the_sharding() -> None:
    x_BSD = _x()
    full = _router_gradient([x_BSD])
    assert full[0].any() and full[1] > 0
    for parts in (x_BSD.split(1), x_BSD.split(2)):
        for found, expected in zip(_router_gradient(list(parts)), full, strict=True):
            # the record of the loss is float32, the gradient float64
            torch.testing.assert_close(
                found, expected, rtol=1e-6 if expected.ndim == 0 else 1e-11, atol=1e-13
            )


def test_recompute_counts_once_and_changes_nothing() -> None:
    for found, expected in zip(
        _router_gradient([_x()], recompute=True), _router_gradient([_x()]), strict=True
    ):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_balance_loss_by_its_formula(score: str) -> None:
    moe = _moe(PLAIN.with_(score=score))
    x_BSD = _x()
    experts_BSC, _, scores_BSE = moe.router(x_BSD)
    probability = scores_BSE / scores_BSE.sum(-1, keepdim=True)
    expected = torch.zeros((), dtype=torch.float64)
    for b in range(3):
        fraction = torch.bincount(experts_BSC[b].flatten(), minlength=4) / (8 * 2)
        expected = expected + 4 * (fraction * probability[b].mean(0)).sum()
    found = moe.balance(moe.router(x_BSD), torch.ones(3, dtype=torch.float64))
    torch.testing.assert_close(found, 0.3 * expected, **SAME_FLOAT64)


def test_layers_that_no_gradient_reaches_are_counted_too() -> None:
    """Where everything up to them is frozen there is no backward, which counts otherwise."""
    records = []
    for is_trained in (True, False):
        moe = _moe().requires_grad_(is_trained)
        y_BSD = moe(_x(), sequence_weights_B=torch.ones(3, dtype=torch.float64))
        if is_trained:
            y_BSD.sum().backward()
        records.append((moe.load.clone(), moe.balance_loss.clone()))
    assert records[0][0].sum() == 3 * 8 * 2 and records[0][1] > 0
    assert all(torch.equal(*pair) for pair in zip(*records, strict=True))


def test_the_bias_of_a_frozen_router_stays() -> None:
    moe = _moe(PLAIN.with_(has_balance_bias=True, balance_bias_rate=0.1))
    moe.router.weight.requires_grad_(False)
    update_balance_bias(moe, {"": torch.tensor([4, 0, 0, 0])})
    assert moe.router.balance_bias is not None and not moe.router.balance_bias.any()


def test_evaluation_counts_nothing() -> None:
    moe = _moe()
    with torch.no_grad():
        moe(_x(), sequence_weights_B=torch.ones(3))
    assert not moe.load.any() and not moe.balance_loss.any()


def test_records_are_taken_once_and_the_bias_steps_towards_even_use() -> None:
    model = build_decoder(shrunk_family("deepseek-v3"))
    initialise(model, 0)
    tokens_BS = torch.arange(20).view(2, 10)
    positions_BS = torch.arange(10).expand(2, 10)
    model(
        tokens_BS, positions_BS=positions_BS, targets_BS=tokens_BS, sequence_weights_B=torch.ones(2)
    ).backward()
    records = pop_routing_records(model)
    assert list(records) == ["blocks.1.mlp", "blocks.2.mlp"]
    assert all(int(load_E.sum()) == 2 * 10 * 3 and loss > 0 for load_E, loss in records.values())
    assert not any(load_E.any() for load_E, _ in pop_routing_records(model).values())
    update_balance_bias(model, {name: load_E for name, (load_E, _) in records.items()})
    load_E, bias_E = records["blocks.1.mlp"][0], model.blocks["1"].mlp.router.balance_bias
    torch.testing.assert_close(bias_E, 0.001 * torch.sign(load_E.float().mean() - load_E))
