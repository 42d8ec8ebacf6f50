"""What makes the compiled bf16 step fast, on CUDA: kernels against float64, training steps against eager."""

import pytest
import torch
from tests.support.runs import tiny_run
from torch import Tensor

from meshwright.mesh import build_mesh, join_world, leave_world
from meshwright.models.layers.fused import fused_projection_of
from meshwright.ops.adapted_swiglu import adapted_swiglu, swiglu_gradient_with_amax
from meshwright.ops.fused_linear import accumulate_wgrad, pack_weights
from meshwright.ops.gelu import gelu_gradient
from meshwright.ops.loss import linear_cross_entropy
from meshwright.ops.loss_rows import PLAIN
from meshwright.ops.swiglu import swiglu_gradient
from meshwright.spec import ParallelSpec, PrecisionSpec, RunSpec
from meshwright.train.build import build_data, build_training
from meshwright.train.step import train_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# bf16 rounds at 2^-9: what is rounded once is within this, in the norm.
ONE_ROUNDING = 4e-3


def _normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(shape, device="cuda", generator=generator) * scale).bfloat16()


def _error(found: Tensor, exact: Tensor) -> float:
    return float(((found.double() - exact.double()).norm() / exact.double().norm()).detach())


@pytest.mark.parametrize("num_columns", [50_257, 128_256])
def test_one_pass_over_logits(num_columns: int) -> None:
    from meshwright.ops.loss_triton import TRITON

    padded = -num_columns % 64 + num_columns
    logits_TV = _normal(300, padded, scale=4.0)
    logits_TV[:, num_columns:] = 0
    logits_TV[7, num_columns - 1] = 300.0  # far above all before it: they are rescaled
    targets_T = torch.randint(num_columns, (300,), device="cuda")
    exact_TV = logits_TV[:, :num_columns].double()
    true = PLAIN.unscaled_gradient(exact_TV, targets_T)
    found = TRITON.unscaled_gradient(logits_TV[:, :num_columns], targets_T)
    torch.testing.assert_close(
        (found.sum_exp_T.log() + found.max_T).double(),
        true.sum_exp_T.log() + true.max_T,
        rtol=1e-6,
        atol=1e-6,
    )
    assert torch.equal(found.target_logit_T.double(), true.target_logit_T)
    scaled_TV = logits_TV[:, :num_columns].double() / found.sum_exp_T[:, None]
    assert _error(scaled_TV, exact_TV / true.sum_exp_T[:, None]) < ONE_ROUNDING
    assert not logits_TV[:, num_columns:].any()


def test_loss_and_gradients_follow_float64() -> None:
    x_BSD, weight_VD = _normal(2, 600, 256, seed=1), _normal(50_257, 256, seed=2, scale=0.1)
    targets_BS = torch.randint(50_257, (2, 600), device="cuda")
    weights_BS = torch.full((2, 600), 1 / 1200, device="cuda")
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        operands = [one.to(dtype).requires_grad_() for one in (x_BSD, weight_VD)]
        loss = linear_cross_entropy(*operands, targets_BS, weights_BS, chunk_bytes=2**26)
        results.append((loss, *torch.autograd.grad(loss, operands)))
    # Logits are rounded to bf16 too, and a chance is as far off as its logit: 3 x 2^-9 in the norm.
    assert all(_error(*pair) < 3 * ONE_ROUNDING for pair in zip(*results, strict=True))


def test_activations() -> None:
    dh_TF, gate_up_T2F = _normal(1000, 1100, seed=3), _normal(1000, 2200, seed=4)
    exact = swiglu_gradient(dh_TF.double(), gate_up_T2F.double())
    assert _error(swiglu_gradient(dh_TF, gate_up_T2F), exact) < ONE_ROUNDING
    dy_T2F, amax_T = swiglu_gradient_with_amax(dh_TF, gate_up_T2F)
    assert _error(dy_T2F, exact) < ONE_ROUNDING
    assert torch.equal(amax_T, dy_T2F.abs().amax(1).float())
    u_TR, b_2FR = _normal(1000, 24, seed=5), _normal(2200, 24, seed=6, scale=0.1)
    found = adapted_swiglu(gate_up_T2F, u_TR, b_2FR)
    exact = adapted_swiglu(*(one.double() for one in (gate_up_T2F, u_TR, b_2FR)))
    # h is that of rounded gates and ups, and is rounded itself.
    assert all(_error(*pair) < 3 * ONE_ROUNDING for pair in zip(found, exact, strict=True))
    found = gelu_gradient(dh_TF, gate_up_T2F[:, :1100].contiguous())
    exact = gelu_gradient(dh_TF.double(), gate_up_T2F[:, :1100].double())
    assert _error(found[0], exact[0]) < ONE_ROUNDING
    assert _error(found[1], exact[1]) < 1e-5  # summed in float32 before anything is rounded


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_wgrad_matmuls_add_to_totals(dtype: torch.dtype) -> None:
    dy_TN, x_TK = _normal(512, 192, seed=5), _normal(512, 64, seed=6)
    grad_buffers = [_normal(128, 64, seed=7).to(dtype), _normal(64, 64, seed=8).to(dtype)]
    exact = torch.cat(grad_buffers).double() + dy_TN.double().mT @ x_TK.double()
    accumulate_wgrad(grad_buffers, dy_TN, x_TK)
    assert _error(torch.cat(grad_buffers), exact) < (ONE_ROUNDING if dtype == torch.bfloat16 else 1e-5)


def _losses(run: RunSpec) -> list[float]:
    mesh = build_mesh(ParallelSpec(), join_world("cuda"))
    training, batches = build_training(run, mesh), build_data(run, mesh)
    has_joint = any(map(fused_projection_of, training.program.stages[0].modules()))
    assert has_joint == (run.compile and run.model.mlp.kind == "swiglu")
    losses = [float(train_step(training, next(batches), learning_rate=0.01).loss) for _ in range(4)]
    batches.close()
    leave_world()
    return losses


@pytest.mark.parametrize("weights", ["fp32", "bf16_exact"])
def test_compiled_steps_follow_eager_ones(weights: str) -> None:
    precision = PrecisionSpec(
        compute="bf16", weights=weights, gradients="bf16" if weights != "fp32" else "fp32"
    )
    run = tiny_run("gqa", device="cuda", precision=precision)
    torch.testing.assert_close(_losses(run.with_(compile=True)), _losses(run), rtol=1e-2, atol=0)


@pytest.mark.parametrize("family", ["gpt", "gqa"])
def test_compiled_tf32_steps_follow_eager_fp64_ones(family: str) -> None:
    """The first step sees the weights, all others see gradients. Adam makes the sign of each one count."""
    run = tiny_run(family, device="cuda", precision=PrecisionSpec(compute="tf32"))
    exact = run.with_(precision=PrecisionSpec(compute="fp64"))
    torch.testing.assert_close(_losses(run.with_(compile=True)), _losses(exact), rtol=5e-3, atol=0)


def test_packed_matrices_are_one_view() -> None:
    from meshwright.ops.fused_linear import concatenated

    weights = [torch.nn.Parameter(_normal(rows, 64, seed=rows)) for rows in (128, 32)]
    pack_weights(weights)
    assert concatenated(weights, torch.bfloat16).data_ptr() == weights[0].data_ptr()
