"""Every cp kind gives the attention of one device, its gradients, and sends what its docstring says."""

from contextlib import ExitStack
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from tests.support.documents import documents_of
from tests.support.reference_attention import reference_attention
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshwright.data.batches import Microbatch
from meshwright.errors import MeshError
from meshwright.models.layers.attend import Attend
from meshwright.ops import collectives
from meshwright.ops.attention import AttentionScope, full_sequence
from meshwright.ops.documents import one_document_each
from meshwright.parallel.cp import apply_cp, cp_groups, shard_microbatch, shard_sequence, unshard_sequence
from meshwright.parallel.cp.zigzag import chunk_numbers

B, S, H, K = 2, 32, 8, 8
SCALE = 0.3
# The same sums in another order: fp64 carries 16 digits, and no sum here has more than 32 terms.
RTOL, ATOL = 1e-10, 1e-12


class Case(NamedTuple):
    groups: int = 4
    value_width: int = K
    has_documents: bool = False
    window: int | None = None
    dtype: torch.dtype = torch.float64


class Layer(nn.Module):
    """What apply_cp looks for in a block."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.attend = Attend(dropout=dropout)


CASES = {
    "gqa": Case(),
    "mha": Case(groups=8),
    "documents": Case(has_documents=True),
    "window_small": Case(window=3),
    "window_large": Case(window=11),
    "window_documents": Case(window=6, has_documents=True),
    "narrow_values": Case(value_width=4),
    "wide_values_documents": Case(value_width=12, has_documents=True),
}
LAYOUTS = [
    ("gather", 2, 1), ("gather", 4, 1), ("ring", 2, 1), ("ring", 3, 1), ("ring", 4, 1),
    ("ulysses", 2, 1), ("ulysses", 4, 1), ("hierarchical", 4, 2),
]  # fmt: skip


def _length(cp: int) -> int:
    return S if S % (2 * cp) == 0 else 30


def _inputs(case: Case, length: int) -> list[torch.Tensor]:
    """q, k, v and the gradient of the output."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(H, K), (case.groups, K), (case.groups, case.value_width), (H, case.value_width)]
    return [
        torch.randn(B, length, *shape, dtype=torch.float64, generator=generator).to(case.dtype)
        for shape in shapes
    ]


def _documents(case: Case, length: int) -> torch.Tensor | None:
    """Borders inside chunks, at chunk borders (8 and 16), a document of one token, and one of everything."""
    if not case.has_documents:
        return None
    first = torch.repeat_interleave(torch.arange(5), torch.tensor([3, 5, 8, 1, length - 17]))
    return torch.stack([first, torch.zeros(length, dtype=torch.int64)])


class Recorder:
    """Calls of torch's collectives and the bytes this rank sends in each."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def watch(self, owner: object, name: str, label: str, sent_bytes) -> object:
        function = getattr(owner, name)

        def watched(*args, **kwargs):
            self.calls.append((label, sent_bytes(*args, **kwargs)))
            return function(*args, **kwargs)

        return patch.object(owner, name, watched)


def _bytes(x: torch.Tensor) -> int:
    return x.numel() * x.element_size()


def _recording(recorder: Recorder, stack: ExitStack) -> None:
    def share(whole, group) -> int:
        return _bytes(whole) * (group.size() - 1) // group.size()

    def sent(operations) -> int:
        return sum(_bytes(operation.tensor) for operation in operations if operation.op is dist.isend)

    watches = [
        (collectives, "all_gather_single", "all_gather", lambda whole, _, group: share(whole, group)),
        (collectives, "reduce_scatter_single", "reduce_scatter", lambda _, x, group: share(x, group)),
        (dist, "all_to_all_single", "all_to_all", lambda _, x, group: share(x, group)),
        (dist, "batch_isend_irecv", "message", sent),
    ]
    for owner, name, label, sent_bytes in watches:
        stack.enter_context(recorder.watch(owner, name, label, sent_bytes))


def _attend(kind: str, cp_inner: int, case: Case, stripes: int = 1) -> dict[str, object]:
    """One rank's rows of the output and the gradients, and what it sent forward and backward."""
    group = dist.group.WORLD
    cp, rank = group.size(), group.rank()
    layer = Layer()
    assert apply_cp(layer, cp_groups(group, cp_inner), kind, stripes) == 1
    length = _length(cp)
    q, k, v, grad = (shard_sequence(x, 1, rank, cp, stripes) for x in _inputs(case, length))
    documents = _documents(case, length)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    positions = torch.arange(length).expand(B, -1)
    recorder = Recorder()
    with ExitStack() as stack:
        _recording(recorder, stack)
        out = layer.attend(
            *leaves,
            documents=documents_of(documents),
            positions_BS=shard_sequence(positions, 1, rank, cp, stripes),
            window=case.window,
            scale=SCALE,
        )
        forward_calls, recorder.calls = recorder.calls, []
        out.backward(grad)
    tensors = [out.detach(), *(leaf.grad for leaf in leaves)]
    return {"tensors": tensors, "forward": forward_calls, "backward": recorder.calls}


def _one_device(case: Case, length: int) -> list[torch.Tensor]:
    q, k, v, grad = (x.double() for x in _inputs(case, length))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    rows = full_sequence(length, _documents(case, length))
    out = reference_attention(*leaves, AttentionScope(rows, rows, SCALE, case.window))
    out.backward(grad)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def _joined(results: list[dict], index: int, stripes: int = 1) -> torch.Tensor:
    shards = torch.cat([r["tensors"][index] for r in results], dim=1)
    return unshard_sequence(shards, 1, len(results), stripes)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("kind", "cp", "cp_inner"), LAYOUTS)
def test_equals_one_device(ranks, kind, cp, cp_inner, name):
    case = CASES[name]
    results = ranks.run(_attend, cp, kind, cp_inner, case)
    for index, expected in enumerate(_one_device(case, _length(cp))):
        torch.testing.assert_close(_joined(results, index), expected, rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize("name", ["documents", "window_documents", "wide_values_documents"])
@pytest.mark.parametrize(("cp", "stripes"), [(2, 2), (2, 4), (4, 2)])
def test_stripes_equal_one_device(ranks, cp, stripes, name):
    case = CASES[name]
    results = ranks.run(_attend, cp, "gather", 1, case, stripes)
    for index, expected in enumerate(_one_device(case, S)):
        torch.testing.assert_close(_joined(results, index, stripes), expected, rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize(
    ("kind", "cp", "cp_inner"), [("gather", 2, 1), ("ring", 4, 1), ("hierarchical", 4, 2)]
)
def test_bf16_stays_near_one_device(ranks, kind, cp, cp_inner):
    case = Case(has_documents=True, dtype=torch.bfloat16)
    results = ranks.run(_attend, cp, kind, cp_inner, case)
    for index, expected in enumerate(_one_device(case, _length(cp))):
        ours = _joined(results, index)
        assert ours.dtype == torch.bfloat16
        # 8 bits of mantissa, rounded a few times (weights, parts, output) on the way.
        assert (ours.double() - expected).norm() < 2**-6 * expected.norm()


def _expected_traffic(kind: str, cp: int, inner: int, case: Case) -> tuple[dict, dict]:
    """label -> (calls, bytes) of forward and backward, from the formulas in the docstrings."""
    element, wide = case.dtype.itemsize, max(case.dtype.itemsize, 4)
    length = _length(cp)
    key_elements = B * length * case.groups * (K + case.value_width)
    if kind == "gather":
        moved = key_elements * element * (cp - 1) // cp
        return {"all_gather": (1, moved)}, {"reduce_scatter": (1, moved)}
    if kind == "ring":
        moved = key_elements * (cp - 1) // cp
        return {"message": (cp - 1, moved * element)}, {"message": (2 * (cp - 1), moved * (element + wide))}
    exchanging = cp if kind == "ulysses" else inner
    row = H * K + case.groups * (K + case.value_width) + H * case.value_width
    swapped = (2, B * length // cp * row * element * (exchanging - 1) // exchanging)
    if kind == "ulysses":
        return {"all_to_all": swapped}, {"all_to_all": swapped}
    ring = cp // inner
    moved = key_elements // inner * (ring - 1) // ring
    return (
        {"all_to_all": swapped, "message": (ring - 1, moved * element)},
        {"all_to_all": swapped, "message": (2 * (ring - 1), moved * (element + wide))},
    )


def _totals(calls: list[tuple[str, int]]) -> dict[str, tuple[int, int]]:
    labels = {label for label, _ in calls}
    sizes = {label: [size for other, size in calls if other == label] for label in labels}
    return {label: (len(found), sum(found)) for label, found in sizes.items()}


@pytest.mark.parametrize(
    "case", [Case(), Case(has_documents=True, value_width=4), Case(dtype=torch.bfloat16)]
)
@pytest.mark.parametrize(("kind", "cp", "cp_inner"), LAYOUTS)
def test_sends_what_the_docstring_says(ranks, kind, cp, cp_inner, case):
    forward, backward = _expected_traffic(kind, cp, cp_inner, case)
    for result in ranks.run(_attend, cp, kind, cp_inner, case):
        assert _totals(result["forward"]) == forward
        assert _totals(result["backward"]) == backward


def test_zigzag_gives_every_rank_the_same_work():
    positions = torch.arange(48)
    costs = [int((shard_sequence(positions, 0, rank, 4) + 1).sum()) for rank in range(4)]
    assert len(set(costs)) == 1
    shards = torch.cat([shard_sequence(positions, 0, rank, 4) for rank in range(4)])
    assert torch.equal(unshard_sequence(shards, 0, 4), positions)


def test_stripes_spread_a_long_document_over_all_ranks():
    """Ten short documents before a long one: with one zig-zag few ranks hold the end of the long one."""
    work = torch.cat([torch.arange(4).repeat(10), torch.arange(88)]).float() + 1

    def slowest(stripes: int) -> float:
        ranks = torch.stack([shard_sequence(work, 0, rank, 4, stripes).sum() for rank in range(4)])
        return float(ranks.max() / ranks.mean())

    assert slowest(1) > 1.3 > 1.1 > slowest(4)
    assert sorted(n for rank in range(4) for n in chunk_numbers(rank, 4, 4)) == list(range(32))


def test_a_microbatch_is_sharded_along_its_sequence_alone():
    rows = torch.arange(16).expand(2, 16)
    offsets = torch.tensor([0, 5, 16, 32])
    whole = Microbatch(rows, rows + 1, rows / 16.0, 30, rows % 5, offsets, 16, torch.ones(2))
    local = shard_microbatch(whole, cp_rank=1, cp=2)
    held = [4, 5, 6, 7, 8, 9, 10, 11]
    for name, tensor in whole._asdict().items():
        if isinstance(tensor, torch.Tensor):
            expected = tensor[:, held] if tensor.ndim > 1 else tensor
            assert torch.equal(getattr(local, name), expected), name
    assert local.num_targets is None and local.longest_document == 16
    joined = whole._replace(document_offsets_P=None, longest_document=None)
    without = shard_microbatch(joined, cp_rank=0, cp=2)
    assert without.document_offsets_P is None and without.longest_document is None


def test_an_odd_sequence_is_refused():
    with pytest.raises(MeshError, match="18 tokens does not divide into 2 x cp = 8 chunks"):
        shard_sequence(torch.zeros(1, 18), 1, 0, 4)


@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("kind", ["gather", "ring", "ulysses", "hierarchical"])
def test_one_rank_of_a_large_world_without_data(kind, has_documents):
    """No value is read on the host: shapes alone carry forward and backward, with no other rank there."""
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    try:
        layer = Layer()
        apply_cp(layer, cp_groups(dist.group.WORLD, 2 if kind == "hierarchical" else 1), kind)
        with FakeTensorMode():
            q, k, v = (torch.randn(1, 64, heads, K, requires_grad=True) for heads in (H, H, H))
            documents = one_document_each(1, 64, q.device) if has_documents else None
            out = layer.attend(q, k, v, documents=documents, positions_BS=None, window=None, scale=SCALE)
            out.sum().backward()
        assert out.shape == q.shape
        assert k.grad.shape == k.shape
    finally:
        dist.destroy_process_group()


def _refusals() -> list[str]:
    group = dist.group.WORLD
    facts = []

    def refuse(action) -> None:
        with pytest.raises(MeshError) as caught:
            action()
        facts.append(caught.value.fact)

    refuse(lambda: cp_groups(group, 3))
    refuse(lambda: apply_cp(Layer(), cp_groups(group), "hierarchical"))
    refuse(lambda: apply_cp(Layer(dropout=0.1), cp_groups(group), "ring"))
    layer = Layer()
    apply_cp(layer, cp_groups(group), "ulysses")
    q, kv = torch.zeros(1, 4, 4, 8), torch.zeros(1, 4, 1, 8)
    refuse(lambda: layer.attend(q, kv, kv, documents=None, positions_BS=None, window=None, scale=1.0))
    return facts


def test_what_cannot_work_is_refused(ranks):
    assert ranks.run(_refusals, 2)[0] == [
        "cp_inner=3 does not divide cp=2",
        "cp_kind=hierarchical with cp_inner=1 exchanges no heads",
        "attention dropout 0.1 with cp_kind=ring, whose kernels have none",
        "2 ranks cannot share 4 query heads and 1 key heads evenly",
    ]
