"""Each collective against the same thing computed from every rank's tensors in one process."""

import pytest
import torch
import torch.distributed as dist

from meshwright.errors import MeshError
from meshwright.ops import collectives

NUM_RANKS = 2
SHAPE = (4, 6, 8)


def _input(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(SHAPE, dtype=torch.float64, generator=generator)


def _run(name: str, args: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Output, and the gradient of sum(output x weights) where the weights differ by rank and place."""
    x = _input(dist.get_rank()).to(dtype).requires_grad_()
    y = getattr(collectives, name)(x, *args, dist.group.WORLD)
    weights = (torch.arange(y.numel()) + dist.get_rank()).reshape(y.shape).to(dtype) / y.numel()
    (y * weights).sum().backward()
    return y.detach(), x.grad


def _reference(name: str, args: tuple[int, ...]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The same with all inputs in one process, where autograd needs no collective."""
    xs = [_input(rank).requires_grad_() for rank in range(NUM_RANKS)]
    ys = {
        "all_gather": lambda dim: [torch.cat(xs, dim)] * NUM_RANKS,
        "reduce_scatter": lambda dim: list(sum(xs).chunk(NUM_RANKS, dim)),
        "all_to_all": lambda split, concat: [
            torch.cat([x.chunk(NUM_RANKS, split)[rank] for x in xs], concat) for rank in range(NUM_RANKS)
        ],
    }[name](*args)
    weights = [(torch.arange(y.numel()) + r).reshape(y.shape).double() / y.numel() for r, y in enumerate(ys)]
    sum((y * w).sum() for y, w in zip(ys, weights, strict=True)).backward()
    return [y.detach() for y in ys], [x.grad for x in xs]


CASES = [("all_gather", (0,)), ("all_gather", (1,)), ("reduce_scatter", (0,)), ("reduce_scatter", (2,))]
CASES += [("all_to_all", (2, 1)), ("all_to_all", (0, 2)), ("all_to_all", (1, 1))]


@pytest.mark.parametrize(("name", "args"), CASES)
def test_collective_and_its_gradient(ranks, name, args):
    outputs, grads = _reference(name, args)
    for rank, (y, grad) in enumerate(ranks.run(_run, NUM_RANKS, name, args, torch.float64)):
        # One addition of two numbers: the same on both sides, bit for bit.
        torch.testing.assert_close(y, outputs[rank], rtol=0, atol=0)
        torch.testing.assert_close(grad, grads[rank], rtol=1e-15, atol=0)


@pytest.mark.parametrize(
    ("name", "args"), [("all_gather", (1,)), ("reduce_scatter", (1,)), ("all_to_all", (2, 1))]
)
def test_bf16_over_gloo(ranks, name, args):
    outputs, _ = _reference(name, args)
    for rank, (y, _) in enumerate(ranks.run(_run, NUM_RANKS, name, args, torch.bfloat16)):
        assert y.dtype == torch.bfloat16
        # Inputs and sum are rounded once each to 8 bits; a sum that cancels keeps the error of its terms.
        torch.testing.assert_close(y.double(), outputs[rank], rtol=2**-7, atol=2**-6)


def test_all_reduce_forward_leaves_the_gradient_alone(ranks):
    total = _input(0) + _input(1)
    weights = torch.arange(total.numel()).reshape(SHAPE).double()
    for rank, (y, grad) in enumerate(ranks.run(_run, NUM_RANKS, "all_reduce_forward", (), torch.float64)):
        torch.testing.assert_close(y, total, rtol=0, atol=0)
        torch.testing.assert_close(grad, (weights + rank) / total.numel(), rtol=0, atol=0)


def test_all_reduce_backward_sums_the_gradient(ranks):
    weights = torch.arange(_input(0).numel()).reshape(SHAPE).double()
    for rank, (y, grad) in enumerate(ranks.run(_run, NUM_RANKS, "all_reduce_backward", (), torch.float64)):
        torch.testing.assert_close(y, _input(rank), rtol=0, atol=0)
        torch.testing.assert_close(grad, (2 * weights + 1) / weights.numel(), rtol=1e-15, atol=0)


def _refused() -> str:
    with pytest.raises(MeshError) as caught:
        collectives.all_to_all(torch.zeros(3, 4), 0, 1, dist.group.WORLD)
    return caught.value.fact


def test_uneven_parts_are_refused(ranks):
    assert ranks.run(_refused, 2)[0] == "dim 0 of shape (3, 4) does not divide into 2 equal parts"


def _there_and_back(dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A replicated tensor, scattered and gathered, with the same weights on every rank."""
    full = _input(0).requires_grad_()
    part = collectives.scatter_from_replicated(full, dim, dist.group.WORLD)
    gathered = collectives.gather_to_replicated(part * 2, dim, dist.group.WORLD)
    weights = torch.arange(gathered.numel()).reshape(gathered.shape).double()
    (gathered * weights).sum().backward()
    return part.detach(), gathered.detach(), full.grad, weights


@pytest.mark.parametrize("dim", [0, 2])
def test_replicated_tensors_are_scattered_and_gathered(ranks, dim):
    """Gradients are complete on every rank: nothing may be summed."""
    for rank, (part, gathered, grad, weights) in enumerate(ranks.run(_there_and_back, NUM_RANKS, dim)):
        assert torch.equal(part, _input(0).chunk(NUM_RANKS, dim)[rank])
        assert torch.equal(gathered, _input(0) * 2)
        assert torch.equal(grad, weights * 2)


COMPILED = {
    **{f"{name} {args}": (name, args) for name, args in CASES},
    "all_to_all_rows": ("all_to_all_rows", ([1, 3], [1, 3]), ([3, 1], [3, 1])),
    "all_reduce_forward": ("all_reduce_forward", ()),
    "all_reduce_backward": ("all_reduce_backward", ()),
    "gather_to_replicated": ("gather_to_replicated", (1,)),
    "scatter_from_replicated": ("scatter_from_replicated", (2,)),
}


def _compiled_and_eager(name: str, *args_of_ranks: tuple[object, ...]) -> list[torch.Tensor]:
    """Gradients of both, and both outputs."""
    args, group = args_of_ranks[dist.get_rank() % len(args_of_ranks)], dist.group.WORLD

    def between(x: torch.Tensor) -> torch.Tensor:
        """As inside a block: what comes before and after is of the same graph."""
        return torch.sin(getattr(collectives, name)(2 * x, *args, group))

    found = []
    for function in (between, torch.compile(between, backend="aot_eager", fullgraph=True)):
        x = _input(dist.get_rank()).requires_grad_()
        y = function(x)
        y.backward(torch.linspace(-1.0, 1.0, y.numel(), dtype=y.dtype).view(y.shape))
        found += [x.grad, y.detach()]
    torch.compiler.reset()
    return found


@pytest.mark.parametrize("case", COMPILED)
def test_a_compiled_graph_has_its_gradient(ranks, case):
    for grad, y, compiled_grad, compiled_y in ranks.run(_compiled_and_eager, NUM_RANKS, *COMPILED[case]):
        assert grad.abs().sum() > 0
        torch.testing.assert_close(compiled_grad, grad, rtol=1e-14, atol=0)
        torch.testing.assert_close(compiled_y, y, rtol=1e-14, atol=0)
