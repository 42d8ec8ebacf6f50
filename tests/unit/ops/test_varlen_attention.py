"""Attention inside segments and windows without masks equals the definition, forward and backward."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.documents import documents_of
from tests.support.reference_attention import reference_attention
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.hardware.simulated_device import HOPPER
from meshwright.models.layers.attend import Attend
from meshwright.ops.attention import AttentionScope, full_sequence
from meshwright.ops.attention_tasks import Chunk
from meshwright.ops.documents import (
    Segments,
    chunk_segments,
    document_ids,
    host_number,
    one_document_each,
    rows_before,
    self_segments,
)
from meshwright.ops.varlen_attention import attend_segments, has_varlen, varlen_forward
from meshwright.ops.window_attention import _WindowAttention, has_window_kernel

B, S, K = 2, 24, 8
# Two exact formulas in fp64 that add in another order.
EXACT = {"rtol": 1e-11, "atol": 1e-13}
SCALE = 0.3


def _qkv(heads: int, groups: int, value_width: int, length: int = S) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(heads, K), (groups, K), (groups, value_width)]
    return [torch.randn(B, length, *shape, dtype=torch.float64, generator=generator) for shape in shapes]


def _ids() -> torch.Tensor:
    """Lengths 1, 7, 13, 3, and one sequence that is a single document."""
    first = torch.repeat_interleave(torch.arange(4), torch.tensor([1, 7, 13, 3]))
    return torch.stack([first, torch.zeros(S, dtype=torch.int64)])


def _with_grads(function, *inputs: torch.Tensor) -> list[torch.Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
    (out * weights).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def _same(ours, exact, inputs: list[torch.Tensor]) -> None:
    for found, wanted in zip(_with_grads(ours, *inputs), _with_grads(exact, *inputs), strict=True):
        torch.testing.assert_close(found, wanted, **EXACT)


@pytest.mark.parametrize("window", [None, 1, 5, 24])
@pytest.mark.parametrize(("heads", "groups", "value_width"), [(4, 4, 8), (4, 2, 8), (4, 1, 5), (4, 2, 12)])
def test_documents_equal_the_definition(window, heads, groups, value_width):
    rows, segments = full_sequence(S, _ids()), self_segments(documents_of(_ids()), window)
    scope = AttentionScope(rows, rows, SCALE, window)
    _same(
        lambda *qkv: attend_segments(*qkv, segments, scale=SCALE),
        lambda *qkv: reference_attention(*qkv, scope),
        _qkv(heads, groups, value_width),
    )


@pytest.mark.parametrize("window", [2, 3, 8, 12])
@pytest.mark.parametrize(("heads", "groups", "value_width"), [(4, 4, 8), (4, 2, 5)])
def test_two_causal_calls_equal_a_window(window, heads, groups, value_width):
    rows = full_sequence(S)
    scope = AttentionScope(rows, rows, SCALE, window)
    _same(
        lambda *qkv: _WindowAttention.apply(*qkv, window, SCALE, None),
        lambda *qkv: reference_attention(*qkv, scope),
        _qkv(heads, groups, value_width),
    )


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("start", [0, 6, 18])
def test_a_chunk_of_queries_sees_its_documents_up_to_its_end(start, window):
    q, k, v = _qkv(4, 2, 8)
    chunk, rows = Chunk(start, 6), full_sequence(S, _ids())
    held = slice(start, start + 6)
    segments = chunk_segments(documents_of(_ids()), B, S, chunk)._replace(window=window)
    scope = AttentionScope(rows, rows, SCALE, window)
    _same(
        lambda *qkv: attend_segments(qkv[0][:, held], *qkv[1:], segments, scale=SCALE),
        lambda *qkv: reference_attention(*qkv, scope)[:, held],
        [q, k, v],
    )


def test_a_query_without_keys_weighs_nothing():
    q, k, v = (x.flatten(0, 1) for x in _qkv(4, 2, 8))
    bounds = torch.tensor([0, 10, 20, 48]), torch.tensor([0, 10, 10, 48])
    out, lse = varlen_forward(q, k, v, [*bounds, host_number(38)], False, None, SCALE)
    assert not out[10:20].any()
    assert (lse[:, 10:20] == torch.finfo(torch.float64).min / 2).all() and lse[:, :10].abs().max() < 100


lengths = st.lists(st.integers(1, 9), min_size=1, max_size=6)


@given(lengths, st.integers(1, 4), st.integers(0, 3))
def test_offsets_over_held_rows_count_them(documents, num_chunks, held):
    """Row by row: how many held rows come before each document."""
    length = sum(documents)
    ids = torch.repeat_interleave(torch.arange(len(documents)), torch.tensor(documents)).expand(B, -1)
    found = documents_of(ids)
    assert torch.equal(document_ids(found, B, length).diff() != 0, ids.diff() != 0)
    size = max(1, length // num_chunks)
    chunk = Chunk(min(held * size, length - size), size)
    positions = torch.arange(B * length) % length
    is_held = (positions >= chunk.start) & (positions < chunk.end)
    wanted = [int(is_held[: int(offset)].sum()) for offset in found.offsets_P]
    assert rows_before(found.offsets_P, length, (chunk,), slice(0, size)).tolist() == wanted


def test_which_tensors_have_a_kernel():
    half, double = torch.zeros(1, 8, 2, 64, dtype=torch.bfloat16), torch.zeros(1, 8, 2, 64).double()
    assert has_varlen(half, half) and has_varlen(double, double)
    assert has_varlen(half, half, HOPPER) and not has_varlen(double.float(), half, HOPPER)
    assert not has_varlen(half[..., :20], half, HOPPER)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert has_varlen(double.float(), half, HOPPER)
    longer = half.expand(16, -1, -1, -1).reshape(1, 128, 2, 64)
    assert not has_window_kernel(longer, half, 64, HOPPER)
    with patch.object(torch.compiler, "is_compiling", return_value=True):
        assert has_window_kernel(longer, half, 64, HOPPER)
        assert not has_window_kernel(longer, half, 32, HOPPER) and not has_window_kernel(longer, half, 64)


@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("window", [None, 512, 700])
def test_no_tensor_of_pairs_is_ever_made(has_documents, window):
    """On a simulated card nothing has the size of queries x keys, forward or backward."""
    layer = Attend()
    layer.simulated = HOPPER
    num_rows = 4096
    largest: list[int] = []
    with FakeTensorMode(), _Sizes(largest):
        q, k, v = (
            torch.empty(1, num_rows, heads, 64, dtype=torch.bfloat16, requires_grad=True)
            for heads in (8, 2, 2)
        )
        documents = one_document_each(1, num_rows, q.device) if has_documents else None
        if documents is None and window is None:
            return  # torch's own causal SDPA
        out = layer(q, k, v, documents=documents, positions_BS=None, window=window, scale=SCALE)
        out.sum().backward()
    assert out.shape == q.shape and k.grad is not None
    assert max(largest) <= q.numel() < num_rows**2


class _Sizes(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self, largest: list[int]) -> None:
        super().__init__()
        self._largest = largest

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, tuple | list) else (out,):
            if isinstance(one, torch.Tensor):
                self._largest.append(one.numel())
        return out


def test_segments_are_plain_values():
    """Offsets of both sides are one tensor where every document sees itself."""
    documents = documents_of(_ids())
    segments = self_segments(documents)
    assert isinstance(segments, Segments) and segments.causal and segments.window is None
    assert segments.query_offsets_P is segments.key_offsets_P is documents.offsets_P
    assert documents.longest_1.device.type == "cpu" and int(documents.longest_1) == S
