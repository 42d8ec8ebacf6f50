"""The kernel of dropout and compiled dropout on a GPU: the masks of the definition, in every dtype."""

import pytest
import torch
from torch import Tensor

from meshwright.ops.dropout import DropoutMask, is_kept
from meshwright.ops.dropout_keys import sequence_keys, token_keys

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # torch's own compiler uses what torch has deprecated.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def _keys(num_sequences: int = 3, length: int = 50) -> Tensor:
    return token_keys(sequence_keys(7, 2, torch.arange(num_sequences)), length)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("probability", [0.001, 0.1, 0.5, 0.9])
def test_the_kernel_equals_the_definition(dtype: torch.dtype, probability: float) -> None:
    """The CPU computes the same product in fp32, rounded once."""
    for width, first_feature in ((1024, 0), (1030, 4096)):
        x = torch.rand(3, 50, width, generator=torch.Generator().manual_seed(1)).to(dtype) + 1
        found = DropoutMask(_keys().cuda(), first_feature, probability).drop(x.cuda())
        assert torch.equal(found.cpu(), DropoutMask(_keys(), first_feature, probability).drop(x))


def test_more_elements_than_32_bits_count() -> None:
    length, width = 2**20 + 8, 2048
    keys = _keys(1, length)
    x = torch.ones(1, length, width, dtype=torch.bfloat16, device="cuda")
    dropped = DropoutMask(keys.cuda(), 0, 0.5).drop(x)
    for part in (slice(0, 64), slice(-64, None)):
        assert torch.equal(dropped[0, part].cpu() > 0, is_kept(keys[0, part], 0, width, 0.5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiled_code_has_the_same_masks_and_gradients(dtype: torch.dtype) -> None:
    """A is the identity: outputs are inputs that were kept, or zero."""
    mask, weight = DropoutMask(_keys().cuda(), 128, 0.3), torch.eye(256, device="cuda", dtype=dtype)
    x = torch.rand(3, 50, 256, device="cuda").to(dtype) + 1
    found = []
    for function in (torch.compile(mask.linear, fullgraph=True), mask.linear):
        each, factor = x.clone().requires_grad_(), weight.clone().requires_grad_()
        y = function(each, factor)
        y.backward(torch.ones_like(y))
        found.append((y.detach(), each.grad, factor.grad))
    (y, dx, dweight), (plain_y, plain_dx, plain_dweight) = found
    assert dx is not None and plain_dx is not None
    assert torch.equal(y > 0, plain_y > 0) and torch.equal(dx > 0, y > 0) and torch.equal(dx, plain_dx)
    assert torch.equal((y > 0).cpu(), is_kept(_keys(), 128, 256, 0.3))
    torch.testing.assert_close(dweight, plain_dweight)
