"""Attention kernels and cp on CUDA: bf16 against fp64 of the same inputs; NCCL ranks that share one card."""

import os
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from tests.support.documents import documents_of
from tests.support.reference_attention import reference_attention
from torch import nn

from meshwright.bench.kernel_time import profiled
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
from meshwright.ops.documents import host_number, self_segments
from meshwright.ops.varlen_attention import attend_segments, varlen_backward, varlen_forward
from meshwright.parallel.cp import apply_cp, cp_groups, shard_sequence, unshard_sequence
from meshwright.parallel.torch_graph_count import num_compiled_graphs

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


def _offsets(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths], device="cuda").cumsum(0).int()


LENGTHS = (1, 64, 130, 1, 0, 60, 0)
SEGMENTS = {
    # Documents of one token, of no token (padding), of 64 and of 130.
    "documents": (LENGTHS, LENGTHS, True, None),
    "window": (LENGTHS, LENGTHS, True, 33),
    # Chunks of a gather: queries at the end of their keys, and keys without queries.
    "chunk": ((0, 64, 30, 0, 50), (70, 64, 128, 33, 90), True, None),
    "chunk_window": ((0, 64, 30, 0, 50), (70, 64, 128, 33, 90), True, 40),
    # A step of a ring: some queries have no keys, and some keys no queries.
    "ring": ((40, 0, 64, 1, 0), (0, 33, 100, 70, 0), False, None),
}


@pytest.mark.parametrize("widths", [(64, 64), (128, 128), (192, 128)])
@pytest.mark.parametrize("name", SEGMENTS)
def test_varlen_kernel_equals_the_dense_one(name, widths):
    """bf16 on the card against fp64 on the CPU, forward and backward, with grouped heads."""
    queries, keys, causal, window = SEGMENTS[name]
    num_queries, num_keys = sum(queries), sum(keys)
    q = _heads((num_queries, 8, widths[0]), 0, torch.bfloat16)
    # Strided, as slices of a fused projection are.
    k, v = (_heads((num_keys, 5, width), seed, torch.bfloat16)[:, :2] for seed, width in enumerate(widths, 1))
    bounds = (_offsets(*queries), _offsets(*keys), host_number(max(*queries, *keys)))
    exact_bounds = [x.cpu() for x in bounds]
    out, lse = varlen_forward(q, k, v, bounds, causal, window, 0.2)
    exact = [x.cpu().double() for x in (q, k, v)]
    exact_out, exact_lse = varlen_forward(*exact, exact_bounds, causal, window, 0.2)
    _close(out.cpu(), exact_out, BF16)
    torch.testing.assert_close(
        lse.double().cpu().clamp(min=-1e30), exact_lse.clamp(min=-1e30), rtol=0, atol=1e-2
    )
    assert out.is_contiguous() and lse.shape == (8, num_queries)
    grad = _heads((num_queries, 8, widths[1]), 3, torch.bfloat16)
    ours = varlen_backward((grad, q, k, v, out, lse), bounds, causal, window, 0.2)
    saved = (grad.cpu().double(), *exact, exact_out, exact_lse)
    wanted = varlen_backward(saved, exact_bounds, causal, window, 0.2)
    for found, exact_grad in zip(ours, wanted, strict=True):
        _close(found.cpu(), exact_grad, BF16)
    is_unseen = (wanted[2] == 0).flatten(1).all(1)  # keys without queries
    assert not ours[1].cpu()[is_unseen].any() and not ours[2].cpu()[is_unseen].any()


def test_keys_of_other_documents_weigh_nothing():
    """Values of other documents may be infinite."""
    ids_BS = _documents(256)
    segments = self_segments(documents_of(ids_BS))
    q, k, v = (_heads((2, 256, heads, 64), seed, torch.bfloat16) for seed, heads in enumerate((8, 2, 2)))
    plain = attend_segments(q, k, v, segments, scale=0.2)
    v[0, ids_BS[0] == 1] = float("inf")
    leaked = attend_segments(q, k, v, segments, scale=0.2)
    assert torch.equal(leaked[0, ids_BS[0] != 1], plain[0, ids_BS[0] != 1])


@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("window", [None, 64, 100])
@pytest.mark.parametrize(("groups", "value_width"), [(8, 64), (2, 64), (2, 32)])
def test_attention_of_one_device(has_documents, window, groups, value_width):
    """All paths of `Attend` against the definition: causal, documents, windows that divide 512 or not."""
    shapes = [(8, 64), (groups, 64), (groups, value_width), (8, value_width)]
    tensors = [_heads((2, 512, *shape), seed, torch.bfloat16) for seed, shape in enumerate(shapes)]
    documents = _documents(512) if has_documents else None
    results = []
    rows = full_sequence(512, documents)
    for is_ours in (True, False):
        *leaves, grad = (x if is_ours else x.double() for x in tensors)
        leaves = [x.clone().requires_grad_() for x in leaves]
        if is_ours:
            out = Attend()(
                *leaves, documents=documents_of(documents), positions_BS=None, window=window, scale=0.2
            )
        else:
            out = reference_attention(*leaves, AttentionScope(rows, rows, 0.2, window))
        out.backward(grad)
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for ours, exact in zip(*results, strict=True):
        _close(ours, exact, BF16)


@pytest.mark.parametrize(("groups", "value_width"), [(2, 64), (2, 32)])
def test_compiled_windows(groups, value_width):
    """Two causal calls, with what the compiler makes of reordered rows, against the definition."""
    shapes = [(8, 64), (groups, 64), (groups, value_width), (8, value_width)]
    tensors = [_heads((2, 512, *shape), seed, torch.bfloat16) for seed, shape in enumerate(shapes)]
    rows, results = full_sequence(512), []
    for is_ours in (True, False):
        *leaves, grad = (x if is_ours else x.double() for x in tensors)
        leaves = [x.clone().requires_grad_() for x in leaves]
        if is_ours:
            settings = {"documents": None, "positions_BS": None, "window": 128, "scale": 0.2}
            out = torch.compile(Attend())(*leaves, **settings)
        else:
            out = reference_attention(*leaves, AttentionScope(rows, rows, 0.2, 128))
        out.backward(grad)
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for ours, exact in zip(*results, strict=True):
        _close(ours, exact, BF16)


def _kernels(*, has_documents: bool, window: int | None, is_compiled: bool = False) -> str:
    """Names of the attention kernels of a call."""
    layer = torch.compile(Attend()) if is_compiled else Attend()
    q, k, v = (_heads((2, 512, heads, 64), seed, torch.bfloat16) for seed, heads in enumerate((8, 2, 2)))
    documents = documents_of(_documents(512) if has_documents else None)

    def call() -> None:
        layer(q, k, v, documents=documents, positions_BS=None, window=window, scale=0.2)

    call()
    return " ".join(profiled(call, num_steps=1).attention_kernels)


def test_the_kernel_of_each_case():
    """The rule in the docstring of `Attend`, by the names in the profile."""
    has_cudnn = torch.cuda.get_device_capability() >= (9, 0)
    assert "flash_fwd" in _kernels(has_documents=True, window=None)
    assert "flash_fwd" in _kernels(has_documents=True, window=64)
    assert "flash_fwd" in _kernels(has_documents=False, window=64)
    assert "flash_fwd" in _kernels(has_documents=False, window=100, is_compiled=True)
    if has_cudnn:
        for window in (None, 64):
            found = _kernels(has_documents=False, window=window, is_compiled=window is not None)
            assert "flash_fwd" not in found and ("cudnn" in found or "sdpa" in found or "fmha" in found)


def test_other_documents_need_no_other_graph():
    """Offsets and the longest document change with every batch; a compiled graph serves them all."""
    torch.compiler.reset()
    layer = torch.compile(Attend())
    q, k, v = (_heads((2, 512, heads, 64), seed, torch.bfloat16) for seed, heads in enumerate((8, 2, 2)))
    before = num_compiled_graphs()
    for count in (3, 9, 33, 80):
        ids_BS = torch.arange(512, device="cuda").expand(2, -1) * count // 512
        documents = documents_of(ids_BS)
        settings = {"positions_BS": None, "window": None, "scale": 0.2}
        out = layer(q, k, v, documents=documents, **settings)
        torch.testing.assert_close(out, Attend()(q, k, v, documents=documents, **settings))
    assert num_compiled_graphs() - before <= 2  # one for the first size, one for all others


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = Attend()


def _tensors() -> list[torch.Tensor]:
    return [_heads((2, 512, heads, 64), seed, torch.bfloat16) for seed, heads in enumerate((8, 4, 4, 8))]


def _nccl_rank(rank: int, cp: int, kind: str, has_documents: bool, window: int | None, folder: str) -> None:
    # Ranks with one host name refuse to share a card; each its own lets them.
    os.environ.update(NCCL_HOSTID=f"rank{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    store = dist.FileStore(os.path.join(folder, "store"), cp)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=cp, device_id=torch.device("cuda", 0))
    layer = Layer()
    apply_cp(layer, cp_groups(dist.group.WORLD, 2 if kind == "hierarchical" else 1), kind)
    *leaves, grad = (shard_sequence(x, 1, rank, cp) for x in _tensors())
    leaves = [leaf.requires_grad_() for leaf in leaves]
    documents = documents_of(_documents(512) if has_documents else None)
    out = layer.attend(*leaves, documents=documents, positions_BS=None, window=window, scale=0.2)
    out.backward(grad)
    torch.save([out.detach(), *(leaf.grad for leaf in leaves)], os.path.join(folder, f"{rank}.pt"))
    dist.destroy_process_group()


LAYOUTS = [("gather", 2), ("ring", 2), ("ulysses", 2), ("ring", 4), ("hierarchical", 4)]


@pytest.mark.parametrize(
    ("kind", "cp", "has_documents", "window"),
    [
        *((*layout, has_documents, None) for layout in LAYOUTS for has_documents in (False, True)),
        ("gather", 2, False, 100),
        ("gather", 2, True, 100),
    ],
)
def test_cp_over_nccl(kind, cp, has_documents, window):
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_nccl_rank, args=(cp, kind, has_documents, window, folder), nprocs=cp)
        shards = [torch.load(os.path.join(folder, f"{rank}.pt")) for rank in range(cp)]
    *leaves, grad = (x.double() for x in _tensors())
    leaves = [leaf.requires_grad_() for leaf in leaves]
    rows = full_sequence(512, _documents(512) if has_documents else None)
    out = reference_attention(*leaves, AttentionScope(rows, rows, 0.2, window))
    out.backward(grad)
    for index, exact in enumerate([out.detach(), *(leaf.grad for leaf in leaves)]):
        _close(unshard_sequence(torch.cat([s[index] for s in shards], 1), 1, cp), exact, BF16)
