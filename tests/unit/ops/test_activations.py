"""GELU and SwiGLU as compiled blocks have them, against torch's own; their Triton kernels, interpreted."""

import torch
from tests.support.triton_interpreter import IS_INTERPRETED, needs_triton, printed_in_interpreter
from torch.nn import functional

from meshwright.ops.adapted_swiglu import adapted_swiglu, swiglu_gradient_with_amax
from meshwright.ops.gelu import biased_gelu, gelu_by_sigmoid, gelu_gradient
from meshwright.ops.swiglu import swiglu, swiglu_gradient


def test_silu_of_halves_equals_the_plain_form() -> None:
    generator = torch.Generator().manual_seed(1)
    gate_up = torch.randn(2, 3, 10, generator=generator, dtype=torch.float64, requires_grad=True)
    plain = functional.silu(gate_up[..., :5]) * gate_up[..., 5:]
    (wanted,) = torch.autograd.grad(plain.square().sum(), gate_up)
    ours = swiglu(gate_up)
    assert torch.equal(ours, plain)
    (grad,) = torch.autograd.grad(ours.square().sum(), gate_up)
    torch.testing.assert_close(grad, wanted, rtol=1e-13, atol=1e-15)


def test_gelu_by_sigmoid_is_the_tanh_form() -> None:
    x = torch.linspace(-9, 9, 501, dtype=torch.float64, requires_grad=True)
    plain, ours = functional.gelu(x, approximate="tanh"), gelu_by_sigmoid(x)
    # 1 + tanh cancels far below zero, where the sigmoid does not.
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-15)
    wanted, grad = (torch.autograd.grad(y.sum(), x)[0] for y in (plain, ours))
    torch.testing.assert_close(grad, wanted, rtol=1e-11, atol=1e-14)


def test_a_bias_gets_its_gradient_from_the_activation_behind_it() -> None:
    generator = torch.Generator().manual_seed(3)
    shapes = ((2, 3, 5), (4, 5), (4,))
    x_BSK, weight, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes
    )
    plain = functional.gelu(functional.linear(x_BSK, weight, bias), approximate="tanh")
    ours = biased_gelu(functional.linear(x_BSK, weight, bias.detach()), bias)
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-15)
    wanted, found = (torch.autograd.grad(y.square().sum(), (x_BSK, weight, bias)) for y in (plain, ours))
    for grad, true in zip(found, wanted, strict=True):
        torch.testing.assert_close(grad, true, rtol=1e-11, atol=1e-14)


def test_tracing_knows_the_shapes() -> None:
    torch.library.opcheck(swiglu_gradient, (torch.randn(3, 4), torch.randn(3, 8)))
    torch.library.opcheck(gelu_gradient, (torch.randn(3, 4), torch.randn(3, 4)))
    torch.library.opcheck(adapted_swiglu, (torch.randn(3, 8), torch.randn(3, 2), torch.randn(8, 2)))
    torch.library.opcheck(swiglu_gradient_with_amax, (torch.randn(3, 4), torch.randn(3, 8)))


def test_what_adapters_add_comes_before_the_activation() -> None:
    generator = torch.Generator().manual_seed(4)
    plain, u, b = (torch.randn(shape, generator=generator) for shape in ((3, 10), (3, 2), (10, 2)))
    y, h = adapted_swiglu(plain, u, b)
    torch.testing.assert_close(y, plain + u @ b.mT)
    torch.testing.assert_close(h, functional.silu(y[:, :5]) * y[:, 5:])


def test_the_amax_of_the_gradient_is_that_of_its_rows_and_shows_nan() -> None:
    dh_TF, gate_up_T2F = torch.randn(3, 4), torch.randn(3, 8)
    dy_T2F, amax_T = swiglu_gradient_with_amax(dh_TF, gate_up_T2F)
    assert torch.equal(dy_T2F, swiglu_gradient(dh_TF, gate_up_T2F))
    assert torch.equal(amax_T, dy_T2F.abs().amax(1))
    dh_TF[1, 2] = torch.nan
    assert swiglu_gradient_with_amax(dh_TF, gate_up_T2F)[1].isinf().tolist() == [False, True, False]


@needs_triton
def test_interpreted_passes_equal_the_plain_ones() -> None:
    assert printed_in_interpreter(__name__) == ["float32", "bfloat16"]


def compare(dtype: torch.dtype) -> None:
    """Of widths and numbers of rows that fill no block."""
    from meshwright.ops.adapted_swiglu_triton import add_and_activate
    from meshwright.ops.gelu_triton import gelu_backward
    from meshwright.ops.swiglu_triton import swiglu_backward

    generator = torch.Generator().manual_seed(2)
    dh_TF, gate_up_T2F = (torch.randn(3, width, generator=generator).to(dtype) for width in (1100, 2200))
    rounding = 2e-6 if dtype == torch.float32 else 1e-2  # of the last bit; bf16 has 8
    wanted = swiglu_gradient(dh_TF, gate_up_T2F)
    torch.testing.assert_close(swiglu_backward(dh_TF, gate_up_T2F), wanted, rtol=rounding, atol=1e-6)
    amax_T = torch.empty(3)
    assert torch.equal(swiglu_backward(dh_TF, gate_up_T2F, amax_T), swiglu_backward(dh_TF, gate_up_T2F))
    torch.testing.assert_close(amax_T, wanted.abs().amax(1).float(), rtol=rounding, atol=1e-6)
    # The interpreter reads bf16 operands of a matmul as integers.
    factors = [torch.randn(shape, generator=generator) for shape in ((3, 6), (2200, 6))]
    plain_T2F = gate_up_T2F.float()
    found, wanted = add_and_activate(plain_T2F, *factors), adapted_swiglu(plain_T2F, *factors)
    for ours, plain in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)  # sums of seven in another order
    dh_TF, y_TF = (torch.randn(300, 270, generator=generator).to(dtype) for _ in range(2))
    (dy_TF, sums_F), (true_TF, true_F) = gelu_backward(dh_TF, y_TF), gelu_gradient(dh_TF, y_TF)
    torch.testing.assert_close(dy_TF, true_TF, rtol=rounding, atol=1e-6)
    torch.testing.assert_close(sums_F, true_F, rtol=1e-5, atol=1e-4)  # of 300 numbers in another order
    print(str(dtype).removeprefix("torch."))


if __name__ == "__main__" and IS_INTERPRETED:
    compare(torch.float32)
    compare(torch.bfloat16)
