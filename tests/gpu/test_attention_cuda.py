"""Attention kernels and cp on CUDA: bf16 against fp64 of the same inputs; NCCL ranks that share one card."""

import os
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from tests.support.reference_attention import reference_attention
from torch import nn

from meshwright.models.layers.attend import Attend
from meshwright.ops import attention_aten
from meshwright.ops.attention import (
    AttentionScope,
    Rows,
    attend,
    full_sequence,
    masked_score,
)
from meshwright.ops.attention_aten import CUDNN, EFFICIENT, FLASH, PLAIN, SdpaArgs
from meshwright.ops.attention_tasks import Chunk
from meshwright.parallel.cp import apply_cp, cp_groups, shard_sequence, unshard_sequence

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# bf16 keeps 8 bits: inputs are exact here, so what remains is the rounding of weights, out and grads,
# each at most 2^-9 of its size; the bound leaves room for a handful of them.
BF16 = 2**-6
FP32 = 1e-3  # tensor-float sums inside the efficient kernel: 10 bits


def _close(ours: torch.Tensor, exact: torch.Tensor, bound: float) -> None:
    assert ours.isfinite().all()
    assert (ours.double() - exact.double()).norm() <= bound * exact.double().norm()


def _heads(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, device="cuda", generator=generator).to(dtype)


def _some_rows(length: int, heads: int, width: int, *, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """x_BHSK as a chunk of longer rows, the way parts of a sequence reach a kernel: not dense in memory."""
    return _heads((2, length + 24, heads, width), seed, dtype)[:, 8 : 8 + length].transpose(1, 2)


KERNELS = [
    (kernel, causal, has_bias, torch.bfloat16, widths)
    for kernel, causal, has_bias in [
        (FLASH, False, False), (FLASH, True, False), (CUDNN, False, False), (CUDNN, True, False),
        (CUDNN, False, True), (EFFICIENT, False, False), (EFFICIENT, True, False), (EFFICIENT, False, True),
    ]
    for widths in [(64, 64), (128, 64), (192, 128), (256, 256)]
]  # fmt: skip
KERNELS += [
    (EFFICIENT, causal, not causal, torch.float32, widths)
    for causal, widths in [(True, (64, 64)), (False, (64, 32))]
]


@pytest.mark.parametrize("length", [256, 200])
@pytest.mark.parametrize(("kernel", "causal", "has_bias", "dtype", "widths"), KERNELS)
def test_kernel_equals_plain(kernel, causal, has_bias, dtype, widths, length):
    """Forward, and a backward whose out and lse come from more keys than the block has."""
    q = _some_rows(length, 8, widths[0], seed=0, dtype=dtype)
    k = _some_rows(length, 2, widths[0], seed=1, dtype=dtype)
    v = _some_rows(length, 2, widths[1], seed=2, dtype=dtype)
    bias = None
    if has_bias:
        hidden = torch.rand(2, 1, length, length, device="cuda") < 0.5
        hidden[:, :, 3] = True
        bias = torch.zeros(2, 1, length, length, dtype=dtype, device="cuda")
        bias.masked_fill_(hidden, masked_score(dtype))
    bound = BF16 if dtype == torch.bfloat16 else FP32
    rule = SdpaArgs(0.2, causal=causal, bias_B1ST=bias)
    exact = SdpaArgs(0.2, causal=causal, bias_B1ST=None if bias is None else bias.double())
    seen = slice(4, None) if has_bias else slice(None)  # row 3 sees nothing: only its weight matters
    out, lse = kernel.forward(q, k, v, rule)
    exact_out, exact_lse = PLAIN.forward(q.double(), k.double(), v.double(), exact)
    _close(out[:, :, seen], exact_out[:, :, seen], bound)
    torch.testing.assert_close(lse[:, :, seen].double(), exact_lse[:, :, seen], rtol=0, atol=1e-2)
    assert lse.shape == q.shape[:3]
    merged_lse = torch.logaddexp(exact_lse, torch.full_like(exact_lse, 3.0))
    merged_out = _some_rows(length, 8, widths[1], seed=3, dtype=dtype).copy_(exact_out * 0.5)
    grad = _some_rows(length, 8, widths[1], seed=4, dtype=dtype)
    ours = kernel.backward(grad, q, k, v, merged_out, merged_lse.float(), rule)
    doubles = [x.double() for x in (grad, q, k, v, merged_out)]
    for grads in zip(ours, PLAIN.backward(*doubles, merged_lse, exact), strict=True):
        _close(*grads, bound)


def test_kernel_choice():
    def chosen(width: int, dtype: torch.dtype, *, has_bias: bool = False) -> attention_aten.Kernel:
        x = torch.zeros(1, 1, 8, width, dtype=dtype, device="cuda")
        return attention_aten.choose_kernel(x, x, has_bias=has_bias)

    assert chosen(128, torch.bfloat16) in (CUDNN, FLASH)
    assert chosen(128, torch.bfloat16, has_bias=True) in (CUDNN, EFFICIENT)
    assert chosen(128, torch.float32) is EFFICIENT
    assert chosen(128, torch.float64) is PLAIN
    assert chosen(20, torch.bfloat16) is PLAIN


def _documents(length: int) -> torch.Tensor:
    first = torch.repeat_interleave(torch.arange(3), torch.tensor([length // 3, 5, length - length // 3 - 5]))
    return torch.stack([first, torch.zeros(length, dtype=torch.int64)]).cuda()


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("value_width", [64, 32])
def test_attend_in_chunks(window, has_documents, value_width):
    length = 256
    rows = full_sequence(length, _documents(length) if has_documents else None)
    pieces = Rows(tuple(Chunk(start, 64) for start in range(0, length, 64)), rows.documents_BS)
    tensors = [
        _heads((2, length, heads, width), seed, torch.bfloat16)
        for seed, (heads, width) in enumerate([(8, 64), (2, 64), (2, value_width), (8, value_width)])
    ]
    results = []
    for function, keys, dtype in [
        (attend, pieces, torch.bfloat16),
        (reference_attention, rows, torch.float64),
    ]:
        *leaves, grad = (x.to(dtype) for x in tensors)
        leaves = [x.clone().requires_grad_() for x in leaves]
        out = function(*leaves, AttentionScope(keys, keys, 0.2, window))
        out.backward(grad)
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for ours, exact in zip(*results, strict=True):
        _close(ours, exact, BF16)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = Attend()


def _tensors() -> list[torch.Tensor]:
    return [_heads((2, 512, heads, 64), seed, torch.bfloat16) for seed, heads in enumerate((8, 4, 4, 8))]


def _nccl_rank(rank: int, cp: int, kind: str, has_documents: bool, folder: str) -> None:
    # Ranks with one host name refuse to share a card; each its own lets them.
    os.environ.update(NCCL_HOSTID=f"rank{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    store = dist.FileStore(os.path.join(folder, "store"), cp)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=cp, device_id=torch.device("cuda", 0))
    layer = Layer()
    apply_cp(layer, cp_groups(dist.group.WORLD, 2 if kind == "hierarchical" else 1), kind)
    *leaves, grad = (shard_sequence(x, 1, rank, cp) for x in _tensors())
    leaves = [leaf.requires_grad_() for leaf in leaves]
    documents = shard_sequence(_documents(512), 1, rank, cp) if has_documents else None
    out = layer.attend(*leaves, documents_BS=documents, positions_BS=None, window=None, scale=0.2)
    out.backward(grad)
    torch.save([out.detach(), *(leaf.grad for leaf in leaves)], os.path.join(folder, f"{rank}.pt"))
    dist.destroy_process_group()


LAYOUTS = [("gather", 2), ("ring", 2), ("ulysses", 2), ("ring", 4), ("hierarchical", 4)]


@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize(("kind", "cp"), LAYOUTS)
def test_cp_over_nccl(kind, cp, has_documents):
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_nccl_rank, args=(cp, kind, has_documents, folder), nprocs=cp)
        shards = [torch.load(os.path.join(folder, f"{rank}.pt")) for rank in range(cp)]
    *leaves, grad = (x.double() for x in _tensors())
    leaves = [leaf.requires_grad_() for leaf in leaves]
    rows = full_sequence(512, _documents(512) if has_documents else None)
    out = reference_attention(*leaves, AttentionScope(rows, rows, 0.2))
    out.backward(grad)
    for index, exact in enumerate([out.detach(), *(leaf.grad for leaf in leaves)]):
        _close(unshard_sequence(torch.cat([s[index] for s in shards], 1), 1, cp), exact, BF16)
