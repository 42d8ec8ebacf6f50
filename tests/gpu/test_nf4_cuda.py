"""The NF4 kernel on a GPU: the bits of the definition in every dtype, and QLoRA steps with it."""

from functools import partial

import pytest
import torch
from tests.unit.ops.test_nf4 import weights

from meshwright.ops.grouped_mm import grouped_linear
from meshwright.ops.nf4 import concatenated_nf4, dequantise_nf4, quantise_nf4
from meshwright.ops.nf4_grouped import Nf4Experts, nf4_grouped_linear
from meshwright.ops.nf4_nested import NestedPlace, nest_absmax

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(96, 256), (4096, 4096), (3, 64), (1000, 1344)])
def test_the_kernel_equals_the_definition(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """fp32 product of value and absmax, rounded once: the CPU computes the same bits."""
    generator = torch.Generator().manual_seed(4)
    weight = weights() if shape == (96, 256) else torch.randn(shape, generator=generator)
    packed, absmax = quantise_nf4(weight)
    found = dequantise_nf4(packed.cuda(), absmax.cuda(), dtype)
    assert torch.equal(found.cpu(), dequantise_nf4(packed, absmax, dtype))


def test_quantising_on_the_device_gives_the_same_bytes() -> None:
    for weight in (weights(), weights().bfloat16()):
        here, there = quantise_nf4(weight), quantise_nf4(weight.cuda())
        assert all(torch.equal(one, other.cpu()) for one, other in zip(here, there, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_several_matrices_share_one_buffer(dtype: torch.dtype) -> None:
    parts = [quantise_nf4(part) for part in weights().split((32, 64))]
    packed, absmax = zip(*parts, strict=True)
    found = concatenated_nf4([one.cuda() for one in packed], [one.cuda() for one in absmax], dtype)
    assert torch.equal(found.cpu(), dequantise_nf4(*quantise_nf4(weights()), dtype))


def test_nesting_on_the_device_gives_the_same_codes_and_scales() -> None:
    weight_EFD = torch.randn(3, 100, 1344, generator=torch.Generator().manual_seed(6))
    absmax = quantise_nf4(weight_EFD)[1].view(torch.float32)
    here, there = nest_absmax(absmax), nest_absmax(absmax.cuda())
    assert all(torch.equal(one, other.cpu()) for one, other in zip(here, there, strict=True))


def test_the_kernel_runs_on_the_current_stream() -> None:
    """The buffer is written and read on one stream, also beside work on another."""
    weight = torch.randn(2048, 2048, generator=torch.Generator().manual_seed(1))
    packed, absmax = (one.cuda() for one in quantise_nf4(weight))
    expected = dequantise_nf4(packed, absmax, torch.bfloat16).float().sum()
    side, sums = torch.cuda.Stream(), []
    torch.cuda.synchronize()
    for stream in (side, torch.cuda.current_stream()) * 20:
        with torch.cuda.stream(stream):
            sums.append(dequantise_nf4(packed, absmax, torch.bfloat16).float().sum())
    torch.cuda.synchronize()
    assert all(torch.equal(one, expected) for one in sums)


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_grouped_matmuls_of_packed_experts(*, is_compiled: bool, is_nested: bool) -> None:
    """Outputs and input gradients are those of the dequantised experts, bit for bit."""
    generator = torch.Generator().manual_seed(3)
    counts_E = torch.tensor([130, 0, 70], device="cuda")
    weight_EFD = torch.randn(3, 256, 128, generator=generator)
    bytes_, absmax = quantise_nf4(weight_EFD)
    here = Nf4Experts(bytes_, absmax)
    if is_nested:
        codes, table = nest_absmax(absmax.view(torch.float32))
        here = Nf4Experts(bytes_, codes, table, NestedPlace(0, 0, 2, 0, 3))
    packed = Nf4Experts(*(one.cuda() if isinstance(one, torch.Tensor) else one for one in here))
    full_EFD = packed.dequantised(torch.bfloat16)
    assert torch.equal(full_EFD.cpu(), here.dequantised(torch.bfloat16))
    x = torch.randn(200, 128, generator=generator).cuda().bfloat16()
    dy = torch.randn(200, 256, generator=generator).cuda().bfloat16()

    def ours(x_ND: torch.Tensor) -> torch.Tensor:
        return nf4_grouped_linear(x_ND, packed, counts_E, torch.bfloat16)

    found = []
    plain = partial(grouped_linear, weight_EFD=full_EFD, counts_E=counts_E)
    for function in (torch.compile(ours) if is_compiled else ours, plain):
        own = x.clone().requires_grad_()
        y = function(own)
        y.backward(dy)
        found.append((y.detach(), own.grad))
    for one, expected in zip(*found, strict=True):
        assert torch.equal(one, expected)
