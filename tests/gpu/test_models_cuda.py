"""The decoder on CUDA in bf16 against float64 on the CPU, from the same initial weights."""

import pytest
import torch
from tests.support.documents import document_arguments
from tests.support.shrunk_families import TINY_FAMILIES, shrunk_family

from meshwright.models import build_decoder, initialise
from meshwright.ops.expert_rows import rows_by_expert, sum_rows
from meshwright.ops.grouped_mm import grouped_linear
from meshwright.spec import ModelSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# bf16 rounds at 2^-9; three layers of products and sums of such numbers stay well inside this.
BF16 = 0.05


def _relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    exact = exact.detach().double()
    return float((found.detach().double().cpu() - exact).norm() / exact.norm())


def test_the_grouped_kernel_equals_one_matmul_per_group() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    x_ND = torch.randn(96, 64, device="cuda", generator=generator).bfloat16().requires_grad_()
    weight_EFD = torch.randn(5, 32, 64, device="cuda", generator=generator).bfloat16().requires_grad_()
    counts_E = torch.tensor([40, 0, 1, 55, 0], device="cuda")
    y_NF = grouped_linear(x_ND, weight_EFD, counts_E)
    grads = torch.autograd.grad(y_NF.square().sum(), (x_ND, weight_EFD))
    exact = [tensor.detach().double().cpu().requires_grad_() for tensor in (x_ND, weight_EFD)]
    exact_NF = grouped_linear(exact[0], exact[1], counts_E.cpu())
    exact_grads = torch.autograd.grad(exact_NF.square().sum(), exact)
    assert _relative(y_NF, exact_NF) < BF16
    assert all(_relative(*pair) < BF16 for pair in zip(grads, exact_grads, strict=True))
    assert not grads[1][[1, 4]].any()  # experts without tokens


@pytest.mark.parametrize("num_kept", [None, 300])
def test_rows_of_experts_are_summed_by_the_kernel(num_kept: int | None) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    experts_TC = torch.rand(128, 16, device="cuda", generator=generator).topk(4).indices
    rows = rows_by_expert(experts_TC, num_kept)
    y_ND, other_ND = (
        torch.randn(len(rows.choice_N), 5000, device="cuda", generator=generator).bfloat16() for _ in range(2)
    )
    found_TD = sum_rows(y_ND, other_ND, rows.place_TC)
    exact_TD = sum_rows(y_ND.double().cpu(), other_ND.double().cpu(), rows.place_TC.cpu())
    assert _relative(found_TD, exact_TD) < 2**-8  # rounded once
    assert torch.equal(found_TD, sum_rows(y_ND, other_ND, rows.place_TC))  # in the same order each time


def _loss_and_gradients(
    spec: ModelSpec, device: str, dtype: torch.dtype, *, autocast: bool = False
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model = build_decoder(spec, dtype=dtype)
    initialise(model, 0, device=device)
    tokens_BS = torch.randint(67, (2, 32), generator=torch.Generator().manual_seed(0)).to(device)
    documents_BS = torch.tensor([[0] * 20 + [1] * 12, [0] * 32], device=device)
    with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
        loss = model(
            tokens_BS,
            positions_BS=torch.arange(32, device=device).expand(2, 32),
            **document_arguments(documents_BS),
            targets_BS=tokens_BS.roll(-1, 1),
            weights_BS=torch.full((2, 32), 1 / 64, device=device),
            sequence_weights_B=torch.full((2,), 0.5, device=device),
        )
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", TINY_FAMILIES)
@pytest.mark.parametrize("autocast", [True, False])
def test_bf16_training_follows_float64(name: str, autocast: bool) -> None:
    spec = shrunk_family(name)
    dtype = torch.float32 if autocast else torch.bfloat16
    loss, grads = _loss_and_gradients(spec, "cuda", dtype, autocast=autocast)
    exact, exact_grads = _loss_and_gradients(spec, "cpu", torch.float64)
    assert abs(float(loss) - float(exact)) < 0.01 * float(exact)
    assert grads.keys() == exact_grads.keys()
    whole = torch.cat([grads[key].double().cpu().flatten() for key in grads])
    exact_whole = torch.cat([exact_grads[key].flatten() for key in grads])
    # Routing is a choice: where two scores are closer than a rounding, a token changes its expert.
    bound = 0.3 if spec.moe else BF16
    assert _relative(whole, exact_whole) < bound
