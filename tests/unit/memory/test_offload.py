"""Offload moves bytes and never changes values: what moves, when it is freed, what stays on the device."""

import gc
from itertools import pairwise
from mmap import PAGESIZE

import pytest
import torch
from tests.support.runs import MODELS, MORE_OPTIMIZERS, OPTIMIZERS, tiny_run
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from meshwright.adapters.attach import attach_adapters
from meshwright.errors import PlanError, RunError, SpecError
from meshwright.memory.offload import activations, budget, host
from meshwright.memory.offload.activations import ActivationOffload, apply_activation_offload
from meshwright.memory.offload.embedding import move_embedding
from meshwright.memory.offload.host import HostLink
from meshwright.memory.offload.states import StreamedOptimizer, build_streamed_optimizer, optimizer_buckets
from meshwright.memory.offload.weights import OffloadedWeights
from meshwright.memory.recompute import apply_recompute
from meshwright.models.decoder import Decoder, build_decoder
from meshwright.models.initialise import initialise
from meshwright.optim.build import build_optimizer, state_tensors
from meshwright.optim.full_parameter import unsharded
from meshwright.spec import AdapterSpec, MemorySpec

CPU = torch.device("cpu")
NUM_LAYERS = 4


def _model(*, dropout: float = 0.1, num_layers: int = NUM_LAYERS) -> Decoder:
    model = build_decoder(MODELS["gqa"].with_(num_layers=num_layers, dropout=dropout), dtype=torch.float64)
    initialise(model, 0)
    return model


def _loss(model: Decoder, num_sequences: int = 2) -> Tensor:
    torch.manual_seed(1)
    shape = (num_sequences, 16)
    tokens_BS = torch.randint(60, shape, generator=torch.Generator().manual_seed(2))
    return model(tokens_BS, positions_BS=torch.arange(16).expand(shape), targets_BS=tokens_BS.roll(-1, 1))


def _gradients(model: Decoder) -> list[Tensor]:
    _loss(model).backward()
    return [parameter.grad for parameter in model.parameters()]


# --- the pool ---


def test_a_released_buffer_is_reused() -> None:
    link = HostLink(CPU)
    first = link.pool.take(4096)
    link.pool.release(first)
    assert link.pool.take(4096) is first
    assert link.pool.take(4096) is not first
    assert (link.counters.pool_bytes, link.counters.host_bytes) == (8192, 8192)


@pytest.mark.parametrize("num_bytes", [1, 4096, 100_000])
def test_pinned_buffers_share_no_page(num_bytes: int) -> None:
    pages = [host._full_pages(num_bytes) for _ in range(3)]
    assert all(one.data_ptr() % PAGESIZE == 0 and one.nbytes % PAGESIZE == 0 for one in pages)
    assert all(num_bytes <= one.nbytes < num_bytes + PAGESIZE for one in pages)
    assert len({one.data_ptr() for one in pages}) == 3
    assert host.HostBuffer(pages[0]).bytes.view(torch.float64).numel() == pages[0].nbytes // 8


def test_too_much_for_the_host_is_an_error() -> None:
    link = HostLink(CPU, limit_bytes=5000)
    link.pool.take(4096)
    with pytest.raises(RunError, match="may use") as error:
        link.pool.take(4096)
    assert error.value.where == "memory.offload"


# --- optimizer states ---


def _streamed(model: Decoder, kind: str, weights: OffloadedWeights) -> StreamedOptimizer:
    shards = dict(model.named_parameters())
    full_parameters = {name: unsharded(name, shard) for name, shard in shards.items()}
    optim = (OPTIMIZERS | MORE_OPTIMIZERS)[kind]
    return build_streamed_optimizer(shards, optim, full_parameters, weights=weights, with_states=True)


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    tensors = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.nbytes for value in tensors if isinstance(value, Tensor) and value.ndim)


@pytest.mark.parametrize("kind", [*OPTIMIZERS, *MORE_OPTIMIZERS])
def test_states_move_once_each_way_and_are_the_same(kind: str) -> None:
    plain, moved = _model(), _model()
    weights = OffloadedWeights(HostLink(CPU))
    optim, counters = (OPTIMIZERS | MORE_OPTIMIZERS)[kind], weights.link.counters
    usual, streamed = build_optimizer(dict(plain.named_parameters()), optim), _streamed(moved, kind, weights)
    total = _state_bytes(streamed)
    assert total == counters.host_bytes == counters.sent_bytes == _state_bytes(usual)
    for _ in range(2):
        for model, optimizer in ((plain, usual), (moved, streamed)):
            _gradients(model)
            optimizer.step()
            optimizer.zero_grad()
    assert (counters.fetched_bytes, counters.sent_bytes) == (2 * total, 3 * total)
    assert counters.device_bytes == 0
    for (name, a), b in zip(plain.named_parameters(), moved.parameters(), strict=True):
        assert torch.equal(a, b), name
    shards = dict(moved.named_parameters())
    for name, found in state_tensors(streamed, shards, optim).items():
        for key, value in state_tensors(usual, dict(plain.named_parameters()), optim)[name].items():
            assert torch.equal(found[key], value), (name, key)


def test_a_stage_that_trains_nothing_has_no_states_to_move() -> None:
    """A pipeline stage may have no adapter; its steps do nothing."""
    weights = OffloadedWeights(HostLink(CPU))
    optimizer = build_streamed_optimizer({}, OPTIMIZERS["adamw"], {}, weights=weights, with_states=True)
    optimizer.step()
    assert not optimizer.state


def test_two_buckets_at_most_are_on_the_device() -> None:
    model = _model()
    weights = OffloadedWeights(HostLink(CPU))
    optimizer = _streamed(model, "adamw", weights)
    _gradients(model)
    optimizer.step()
    each = [
        2 * sum(shard.nbytes for shard in part.values())
        for part in optimizer_buckets(dict(model.named_parameters()), OffloadedWeights(weights.link))
    ]
    pairs = [a + b for a, b in pairwise(each)]
    assert len(each) > 4 * NUM_LAYERS
    assert weights.link.counters.peak_device_bytes == max(pairs)


# --- a token table ---


def test_an_adapter_beside_a_table_on_the_host_is_trained() -> None:
    """B of the adapter is on the device and gets the gradient that it has beside a table on the device."""
    gradients = []
    for is_moved in (False, True):
        model = build_decoder(MODELS["gqa"])
        attach_adapters(model, AdapterSpec(rank=3, alpha=8, targets=("embedding",)), torch.float32)
        initialise(model, 0)
        assert model.embedding is not None and model.embedding.tokens.adapter is not None
        model.embedding.tokens.weight.requires_grad_(False)
        if is_moved:
            move_embedding(model, HostLink(CPU))
        model.embedding.tokens(torch.tensor([[3, 5, 3]])).sum().backward()
        gradients.append(model.embedding.tokens.adapter.lora_B.grad)
    assert gradients[0] is not None and gradients[0][3].any()
    assert torch.equal(gradients[0], gradients[1])


# --- activations ---


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("every", [1, 2])
def test_activations_are_the_same_with_dropout(recompute: str, every: int) -> None:
    expected = _gradients(_model())
    model, link = _model(), HostLink(CPU)
    offload = ActivationOffload(link)
    memory = MemorySpec(recompute=recompute, recompute_every=1 if recompute == "none" else every)
    apply_recompute(model.blocks.values(), memory, store=offload)
    apply_activation_offload(model.blocks.values(), offload)
    found = _gradients(model)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert link.counters.sent_bytes > 0
    assert (link.counters.host_bytes, link.counters.device_bytes) == (0, 0)


def test_a_recomputed_block_moves_its_input_only() -> None:
    model, link = _model(dropout=0.0), HostLink(CPU)
    apply_recompute(model.blocks.values(), MemorySpec(recompute="full"))
    apply_activation_offload(model.blocks.values(), ActivationOffload(link))
    input_bytes = 2 * 16 * model.spec.width * 8
    _gradients(model)
    assert link.counters.sent_bytes == NUM_LAYERS * input_bytes
    # The last block's never left before they were wanted.
    assert link.counters.fetched_bytes == (NUM_LAYERS - 1) * input_bytes


def test_what_selective_recompute_saves_is_offloaded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every matmul's output, attention's with its statistics, and the input; none stays on the device."""
    storages: list[StorageWeakRef] = []
    save = activations.BlockActivations.save

    def recorded(
        self: activations.BlockActivations, tensor: Tensor, link: HostLink
    ) -> activations.SavedStorage:
        storages.append(StorageWeakRef(tensor.untyped_storage()))
        return save(self, tensor, link)

    monkeypatch.setattr(activations.BlockActivations, "save", recorded)
    model, link = _model(dropout=0.0), HostLink(CPU)
    offload = ActivationOffload(link)
    apply_recompute(model.blocks.values(), MemorySpec(recompute="selective"), store=offload)
    apply_activation_offload(model.blocks.values(), offload)
    loss = _loss(model)
    spec, tokens = model.spec, 2 * 16
    heads = spec.attention.num_heads * spec.attention.head_width
    groups = spec.attention.num_kv_heads * spec.attention.head_width
    elements = (
        3 * spec.width + 2 * heads + 2 * groups + 2 * spec.mlp.width
    )  # input and two outputs of width D
    statistics = tokens * spec.attention.num_heads * 4
    each = tokens * elements * 8
    assert NUM_LAYERS * each <= link.counters.sent_bytes <= NUM_LAYERS * (each + 2 * statistics)
    gc.collect()
    per_block = len(storages) // NUM_LAYERS
    assert all(one.expired() for one in storages[:-per_block]), "a storage is still on the device"
    loss.backward()
    assert link.counters.fetched_bytes > 0
    assert (link.counters.host_bytes, link.counters.device_bytes) == (0, 0)


class _InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).relu_()


def test_a_saved_output_that_is_changed_in_place_is_an_error() -> None:
    block, offload = _InPlace(), ActivationOffload(HostLink(CPU))
    apply_recompute([block], MemorySpec(recompute="selective"), store=offload)
    apply_activation_offload([block], offload)
    with pytest.raises(SpecError, match="in place") as caught:
        block(torch.randn(32, 16, requires_grad=True))
    assert caught.value.where == "memory.recompute"


def test_storages_are_freed_and_two_blocks_come_back_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    storages: list[tuple[activations.BlockActivations, StorageWeakRef, int]] = []
    save = activations.BlockActivations.save

    def recorded(
        self: activations.BlockActivations, tensor: Tensor, link: HostLink
    ) -> activations.SavedStorage:
        if activations._storage_id(tensor) not in self._storages:
            storage = tensor.untyped_storage()
            storages.append((self, StorageWeakRef(storage), storage.nbytes()))
        return save(self, tensor, link)

    monkeypatch.setattr(activations.BlockActivations, "save", recorded)
    model, link = _model(), HostLink(CPU)
    apply_activation_offload(model.blocks.values(), ActivationOffload(link))
    loss = _loss(model)
    gc.collect()
    bundles = list(dict.fromkeys(bundle for bundle, _, _ in storages))
    assert len(bundles) == NUM_LAYERS
    by_block = [[one for one in storages if one[0] is bundle] for bundle in bundles]
    sizes = [sum(size for _, _, size in block) for block in by_block]
    for block in by_block[:-1]:
        assert len(block) > 8
        assert all(reference.expired() for _, reference, _ in block), "a storage is still on the device"
    assert link.counters.sent_bytes == link.counters.host_bytes == sum(sizes)
    loss.backward()
    assert link.counters.fetched_bytes == sum(sizes[:-1])
    assert max(sizes) < link.counters.peak_device_bytes <= 2 * max(sizes)


def test_parameters_and_what_blocks_share_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under autocast a block saves narrowed copies of its weights: they would travel every micro-batch."""
    moved: list[tuple[int, ...]] = []
    save = activations.BlockActivations.save

    def recorded(
        self: activations.BlockActivations, tensor: Tensor, link: HostLink
    ) -> activations.SavedStorage:
        moved.append(tuple(tensor.shape))
        return save(self, tensor, link)

    monkeypatch.setattr(activations.BlockActivations, "save", recorded)
    model, link = build_decoder(MODELS["gqa"].with_(num_layers=1)), HostLink(CPU)
    initialise(model, 0)
    shapes = {tuple(parameter.shape) for parameter in model.parameters() if parameter.ndim == 2}
    apply_activation_offload(model.blocks.values(), ActivationOffload(link))
    with torch.autocast("cpu", torch.bfloat16):
        _loss(model, num_sequences=5).backward()  # no activation has the shape of a weight
    assert moved
    assert not [shape for shape in moved if shape in shapes or shape[::-1] in shapes]


def test_a_second_pass_needs_no_new_host_memory() -> None:
    model, link = _model(), HostLink(CPU)
    apply_activation_offload(model.blocks.values(), ActivationOffload(link))
    _gradients(model)
    once = link.counters.pool_bytes
    _gradients(model)
    assert link.counters.pool_bytes == once == link.counters.peak_host_bytes


def test_nothing_moves_without_gradients() -> None:
    model, link = _model(), HostLink(CPU)
    apply_activation_offload(model.blocks.values(), ActivationOffload(link))
    with torch.no_grad():
        _loss(model)
    assert link.counters.sent_bytes == 0


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_what_a_compiled_block_saves_moves_too(recompute: str) -> None:
    torch._dynamo.reset()
    expected = _gradients(_model(dropout=0.0))
    model, link = _model(dropout=0.0), HostLink(CPU)
    apply_recompute(model.blocks.values(), MemorySpec(recompute=recompute))
    for block in model.blocks.values():
        block.forward = torch.compile(block.forward, backend="aot_eager")
    apply_activation_offload(model.blocks.values(), ActivationOffload(link))
    found = _gradients(model)
    # The compiler may fuse differently, so not bit by bit.
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    input_bytes = 2 * 16 * model.spec.width * 8
    assert link.counters.sent_bytes > 5 * NUM_LAYERS * input_bytes
    assert link.counters.host_bytes == 0


# --- weights ---


def _hosted(model: Decoder) -> OffloadedWeights:
    weights = OffloadedWeights(HostLink(CPU))
    weights.apply(dict(model.blocks.items()))
    weights.move_to_host()
    return weights


def test_weights_of_two_blocks_are_on_the_device() -> None:
    expected = _gradients(_model())
    model = _model()
    block_bytes = sum(parameter.nbytes for parameter in model.blocks["0"].parameters())
    weights = _hosted(model)
    counters = weights.link.counters
    counters.peak_device_bytes = 0
    held = [parameter.untyped_storage().nbytes() for parameter in model.blocks.parameters()]
    assert set(held) == {0}
    found = _gradients(model)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert counters.host_bytes == counters.sent_bytes == NUM_LAYERS * block_bytes
    assert counters.fetched_bytes == 2 * NUM_LAYERS * block_bytes
    assert (counters.device_bytes, counters.peak_device_bytes) == (0, 2 * block_bytes)


def test_weights_changed_on_the_device_are_written_back() -> None:
    model = _model()
    weights = _hosted(model)
    with weights.all_on_device(changing=True), torch.no_grad():
        for parameter in model.blocks.parameters():
            parameter.fill_(2.0)
    assert all(parameter.untyped_storage().nbytes() == 0 for parameter in model.blocks.parameters())
    with weights.all_on_device():
        assert all(bool((parameter == 2.0).all()) for parameter in model.blocks.parameters())


# --- room on the host ---


def test_too_little_host_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny_run("gqa", optim="adamw", memory=MemorySpec(offload="optimizer"))
    machine = budget.this_machine()
    assert budget.host_budget(run) > 0
    small = type(machine)(cores=machine.cores, free_memory_bytes=1000)
    monkeypatch.setattr(budget, "this_machine", lambda: small)
    with pytest.raises(
        PlanError, match=r"needs .* of host memory on a rank, and this machine has 900"
    ) as error:
        budget.host_budget(run)
    assert error.value.where == "memory.offload"
