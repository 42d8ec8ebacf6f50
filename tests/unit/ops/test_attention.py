"""Attention by parts equals the definition, and every kernel the plain one; tasks cover each pair once."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.reference_attention import reference_attention
from tests.support.soak import examples

from meshwright.ops import attention_aten
from meshwright.ops.attention import (
    AttentionScope,
    Rows,
    attend,
    full_sequence,
    masked_score,
    visible,
)
from meshwright.ops.attention_tasks import Chunk, Coverage, Tiling, coverage_of, plan_tasks

B, S, K = 2, 24, 8
# Two exact formulas in fp64 that add in another order.
EXACT = {"rtol": 1e-11, "atol": 1e-13}


def _qkv(heads: int, groups: int, value_width: int, dtype: torch.dtype = torch.float64, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(B, S, heads, K), (B, S, groups, K), (B, S, groups, value_width)]
    return [torch.randn(s, dtype=torch.float64, generator=generator).to(dtype) for s in shapes]


def _documents() -> torch.Tensor:
    """Ragged: lengths 1, 7, 13, 3 and one sequence that is a single document."""
    first = torch.repeat_interleave(torch.arange(4), torch.tensor([1, 7, 13, 3]))
    return torch.stack([first, torch.zeros(S, dtype=torch.int64)])


def _with_grads(function, q, k, v, scope):
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = function(*leaves, scope)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
    (out * weights).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("window", [None, 1, 5, 24])
@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize(("heads", "groups", "value_width"), [(4, 4, 8), (4, 2, 8), (4, 1, 5), (4, 2, 12)])
def test_equals_the_definition(window, has_documents, heads, groups, value_width):
    rows = full_sequence(S, _documents() if has_documents else None)
    scope = AttentionScope(rows, rows, scale=0.3, window=window)
    inputs = _qkv(heads, groups, value_width)
    for ours, plain in zip(
        _with_grads(attend, *inputs, scope), _with_grads(reference_attention, *inputs, scope), strict=True
    ):
        torch.testing.assert_close(ours, plain, **EXACT)


@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("window", [None, 7])
def test_queries_with_gaps_see_what_the_full_sequence_would(has_documents, window):
    """Head and tail of a sequence against all keys give those rows of the full result."""
    documents = _documents() if has_documents else None
    full = full_sequence(S, documents)
    q, k, v = _qkv(4, 2, 6)
    expected = reference_attention(q, k, v, AttentionScope(full, full, scale=0.3, window=window))
    held = torch.cat([torch.arange(6, 12), torch.arange(18, 24)])
    queries = Rows((Chunk(6, 6), Chunk(18, 6)), None if documents is None else documents[:, held])
    keys = Rows(tuple(Chunk(start, 6) for start in range(0, S, 6)), documents)
    ours = attend(q[:, held], k, v, AttentionScope(queries, keys, scale=0.3, window=window))
    torch.testing.assert_close(ours, expected[:, held], **EXACT)


def test_gradcheck():
    q, k, v = (x[:1, :6].clone().requires_grad_() for x in _qkv(2, 1, 3))
    rows = full_sequence(6)
    scope = AttentionScope(rows, rows, scale=0.5, window=4)
    assert torch.autograd.gradcheck(lambda *leaves: attend(*leaves, scope), (q, k, v))


@pytest.mark.parametrize("window", [None, 7])
def test_masks_are_split_into_bands(monkeypatch, window):
    rows = full_sequence(S, _documents())
    scope = AttentionScope(rows, rows, scale=0.3, window=window)
    inputs = _qkv(4, 2, 8)
    expected = _with_grads(reference_attention, *inputs, scope)
    monkeypatch.setattr(
        "meshwright.ops.attention.TILING", Tiling(max_rows=10, max_elements=B * S * 5, align=2)
    )
    for ours, plain in zip(_with_grads(attend, *inputs, scope), expected, strict=True):
        torch.testing.assert_close(ours, plain, **EXACT)


def test_bands_reach_only_keys_in_order_and_window():
    full = (Chunk(0, 24),)
    tiling = Tiling(max_rows=8, align=4)
    tasks = plan_tasks(full, full, has_documents=True, tiling=tiling)
    assert [task.keys for task in tasks] == [slice(0, 8), slice(0, 16), slice(0, 24)]
    tasks = plan_tasks(full, full, window=3, tiling=tiling)
    assert [task.keys for task in tasks] == [slice(0, 8), slice(4, 16), slice(12, 24)]
    tasks = plan_tasks(full, full, has_documents=True, tiling=Tiling(max_elements=24 * 5))
    assert [task.queries.stop - task.queries.start for task in tasks] == [5, 5, 5, 5, 4]


def test_bf16_is_as_close_to_fp64_as_bf16_inputs_allow():
    exact, rounded = _qkv(4, 2, 8), _qkv(4, 2, 8, torch.bfloat16)
    rows = Rows(tuple(Chunk(start, 6) for start in range(0, S, 6)))
    scope = AttentionScope(rows, full_sequence(S), scale=0.3)
    for ours, plain in zip(
        _with_grads(attend, *rounded, scope), _with_grads(reference_attention, *exact, scope), strict=True
    ):
        assert ours.dtype == torch.bfloat16
        # 8 bits of mantissa: each rounding of inputs, weights and output moves a value by 2^-9 of its scale.
        assert (ours.double() - plain).norm() < 2**-6 * plain.norm()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("causal", "has_bias"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize(("groups", "value_width"), [(4, 8), (2, 8), (1, 4), (2, 16)])
def test_cpu_kernel_equals_plain_kernel(dtype, causal, has_bias, groups, value_width):
    q, k, v = (x.transpose(1, 2) for x in _qkv(4, groups, value_width, dtype))
    bias = None
    if has_bias:
        hidden = torch.rand(B, 1, S, S, generator=torch.Generator().manual_seed(1)) < 0.5
        bias = torch.zeros(B, 1, S, S, dtype=dtype).masked_fill(hidden, masked_score(dtype))
    rule = attention_aten.SdpaArgs(0.3, causal=causal, bias_B1ST=bias)
    kernel = attention_aten.choose_kernel(q, v, has_bias=has_bias)
    assert kernel is attention_aten.FLASH_CPU
    tolerance = EXACT if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}  # fp32 rounds at 6e-8
    out, lse = attention_aten.PLAIN.forward(q, k, v, rule)
    for ours, plain in zip(kernel.forward(q, k, v, rule), (out, lse), strict=True):
        torch.testing.assert_close(ours, plain, **tolerance)
    arguments = (torch.cos(out), q, k, v, out, lse, rule)
    for ours, plain in zip(
        kernel.backward(*arguments), attention_aten.PLAIN.backward(*arguments), strict=True
    ):
        torch.testing.assert_close(ours, plain, **tolerance)


@pytest.mark.parametrize("kernel", [attention_aten.FLASH_CPU, attention_aten.PLAIN])
def test_a_row_that_sees_nothing_weighs_nothing(kernel):
    q, k, v = (x.transpose(1, 2) for x in _qkv(4, 2, 8))
    bias = torch.full((B, 1, S, S), masked_score(torch.float64), dtype=torch.float64)
    out, lse = kernel.forward(q, k, v, attention_aten.SdpaArgs(0.3, bias_B1ST=bias))
    assert out.isfinite().all()
    assert (torch.exp(lse + 1e6) == 0).all()


@st.composite
def _layouts(draw):
    """Chunks of queries and of keys, each ascending with gaps, of one sequence."""
    length = draw(st.integers(1, 4))
    places = st.lists(st.integers(0, 7), min_size=1, max_size=5, unique=True).map(sorted)
    chunks = [tuple(Chunk(place * length, length) for place in draw(places)) for _ in range(2)]
    return chunks[0], chunks[1]


_TILINGS = st.builds(Tiling, st.integers(1, 9), st.integers(1, 64), st.integers(1, 5))


@given(_layouts(), st.none() | st.integers(1, 12), st.booleans(), _TILINGS)
@examples(60)
def test_tasks_cover_each_visible_pair_once(layout, window, has_documents, tiling):
    queries, keys = layout
    scope = AttentionScope(Rows(queries), Rows(keys), scale=1.0, window=window)
    seen = visible(scope, slice(None), slice(None), torch.device("cpu"))[0]
    counted = torch.zeros(seen.shape, dtype=torch.int64)
    for task in plan_tasks(queries, keys, window=window, has_documents=has_documents, tiling=tiling):
        block = counted[task.queries, task.keys]
        if task.coverage is Coverage.FULL:
            block += 1
        elif task.coverage is Coverage.CAUSAL:
            assert block.shape[0] == block.shape[1]
            block += torch.ones_like(block).tril()
        else:
            block += seen[task.queries, task.keys]
    assert torch.equal(counted, seen.long())


def test_coverage_of_a_window():
    query = Chunk(8, 4)
    covers = [coverage_of(query, Chunk(start, 4), 5, has_documents=False) for start in (0, 4, 8, 12)]
    assert covers == [Coverage.NONE, Coverage.MASKED, Coverage.CAUSAL, Coverage.NONE]
    assert coverage_of(query, Chunk(4, 4), 8, has_documents=False) is Coverage.FULL


def test_each_step_of_a_zigzag_ring_is_one_unmasked_call():
    """Rank r against the keys of any owner: two runs of 4 rows each, cp 4."""
    shards = [(Chunk(4 * rank, 4), Chunk(4 * (7 - rank), 4)) for rank in range(4)]
    for queries in shards:
        tasks = [plan_tasks(queries, keys) for keys in shards]
        assert all(len(calls) == 1 for calls in tasks)
        assert [calls[0].coverage for calls in tasks].count(Coverage.CAUSAL) == 1
        assert all(calls[0].coverage is not Coverage.MASKED for calls in tasks)
