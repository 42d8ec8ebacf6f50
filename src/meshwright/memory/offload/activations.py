"""Activation offload: what a block saves for backward is in host memory between its forward and its backward.

Autograd hands over what it saves, storage by storage. In forward the storages of a block are copied to the
host while the next block computes, and freed when that block is done. In backward the first tensor that is
needed fetches all of its block and prefetches the block before it. So the activations of two blocks are on
the device, in any pipeline schedule. Storages that a block shares with others stay on the device: its
parameters, also as cast by autocast, and its keyword inputs (RoPE tables, document ids). So do tiny ones.

Under recompute autograd saves only the input of a block; the outputs that selective recompute also saves
come from its own contexts (`memory.saved_tensors`).
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.memory.offload.host import CopyEvent, HostLink
from meshwright.ops.torch_storages import storage_id

# Smaller tensors are not worth a copy: seeds, scalars, a few values per sequence.
SMALLEST_BYTES = 1024


def apply_activation_offload(blocks: Iterable[nn.Module], offload: "ActivationOffload") -> None:
    """Let every block save for backward on the host; names and parameters of the blocks do not change."""
    for index, block in enumerate(blocks):
        block.forward = offload.wrap(block, block.forward, is_first=index == 0)


class SavedStorage:
    """One storage that autograd saved: still on the device, on the host, or fetched back."""

    def __init__(self, source: Tensor, block: "BlockActivations", link: HostLink) -> None:
        self.block = block
        self._link, self._num_bytes = link, source.nbytes
        self._on_device: Tensor | None = source
        self._buffer = link.pool.take(source.nbytes)
        self._sent, self._fetched = link.send(source, self._buffer), CopyEvent()
        self._is_copy = False

    def free_device(self) -> None:
        """Free the device storage once it is copied to the host."""
        self._sent.wait()
        self._on_device = None

    def prefetch(self) -> None:
        """Start to fetch it, unless it is on the device."""
        if self._on_device is None:
            self._on_device = torch.empty(self._num_bytes, dtype=torch.uint8, device=self._link.device)
            self._is_copy = True
            self._link.counters.add_device_bytes(self._num_bytes)
            self._fetched = self._link.fetch(self._buffer, self._on_device)

    def bytes(self) -> Tensor:
        """The bytes on the device, ready for the current stream."""
        self.prefetch()
        self._fetched.wait()
        assert self._on_device is not None
        return self._on_device

    def __del__(self) -> None:
        """Autograd dropped the last tensor of it: wait for copies in flight before the memory is freed."""
        self._sent.wait()
        self._fetched.wait()
        if self._is_copy:
            self._link.counters.add_device_bytes(-self._num_bytes)
        self._link.pool.release(self._buffer)


class BlockActivations:
    """All that one block saved in one forward. Autograd alone keeps the storages alive."""

    def __init__(self, on_device: set[int], previous: "BlockActivations | None") -> None:
        self.on_device = on_device
        """Ids of storages that stay on the device."""
        self._previous = previous
        self._storages: dict[int, weakref.ref[SavedStorage]] = {}

    def save(self, tensor: Tensor, link: HostLink) -> SavedStorage:
        """The saved storage of a tensor; a storage that several tensors share is copied once."""
        key = _storage_id(tensor)
        known = self._storages[key]() if key in self._storages else None
        if known is None:
            known = SavedStorage(_all_bytes(tensor), self, link)
            self._storages[key] = weakref.ref(known)
        return known

    def free_device(self) -> None:
        """Free the storages of the block on the device."""
        self._each(SavedStorage.free_device)

    def prefetch(self) -> None:
        """Start to fetch the block, whose backward begins, and the block before it."""
        self._each(SavedStorage.prefetch)
        if self._previous is not None:
            self._previous._each(SavedStorage.prefetch)
            self._previous = None

    def _each(self, action: Callable[[SavedStorage], None]) -> None:
        for reference in self._storages.values():
            storage = reference()
            if storage is not None:
                action(storage)


class SavedView:
    """A tensor that autograd saved, as a view of a saved storage."""

    def __init__(self, tensor: Tensor, storage: SavedStorage) -> None:
        self._storage, self._dtype = storage, tensor.dtype
        self._geometry = (tensor.size(), tensor.stride(), tensor.storage_offset())

    def load(self) -> Tensor:
        """The tensor with its strides: other strides could select other kernels."""
        self._storage.block.prefetch()
        return self._storage.bytes().view(self._dtype).as_strided(*self._geometry)


class ActivationOffload:
    """Offload of the blocks of one model (or stage), in the order in which they run."""

    def __init__(self, link: HostLink) -> None:
        self._link = link
        self._last: BlockActivations | None = None

    def wrap(self, block: nn.Module, forward: Callable[..., Any], *, is_first: bool) -> Callable[..., Any]:
        """The same forward; what it saves for backward goes to the host."""

        def offloaded(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            staying = {_storage_id(tensor) for tensor in _tensors([*block.parameters(), *kwargs.values()])}
            previous, current = self._last, BlockActivations(staying, None if is_first else self._last)
            self._last = current
            # Where graphs break, the compiler would trace the hooks into those of autograd functions.
            untraced: Any = torch.compiler.disable
            hooks = torch.autograd.graph.saved_tensors_hooks(
                untraced(lambda tensor: self._pack(tensor, current)), untraced(_unpack)
            )
            with hooks:
                result = forward(*args, **kwargs)
            if previous is not None:
                previous.free_device()
            return result

        return offloaded

    def store(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Take over a tensor of the block whose forward runs (`SavedTensorStore`)."""
        assert self._last is not None
        packed = self._pack(tensor, self._last)
        if isinstance(packed, SavedView):
            return packed.load
        staying = packed.detach()
        return lambda: staying

    def _pack(self, tensor: Tensor, block: BlockActivations) -> Tensor | SavedView:
        is_plain = not isinstance(tensor, DTensor) and tensor.device == self._link.device
        if not is_plain or tensor.nbytes < SMALLEST_BYTES:
            return tensor
        if _storage_id(tensor) in block.on_device or _only_leaf(tensor) in block.on_device:
            return tensor
        return SavedView(tensor, block.save(tensor, self._link))


def _all_bytes(tensor: Tensor) -> Tensor:
    """The full storage of a tensor. Not by `set_`: a trace would never see it freed."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((size,), (1,), 0).view(torch.uint8)


def _unpack(saved: Tensor | SavedView) -> Tensor:
    return saved.load() if isinstance(saved, SavedView) else saved


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    """The plain tensors among values and tuples of values."""
    for value in values:
        if isinstance(value, DTensor):
            yield value.to_local().detach()
        elif isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from _tensors(value)


def _only_leaf(tensor: Tensor) -> int | None:
    """Storage id of the only leaf that a tensor derives from: a parameter, transposed or cast."""
    node = tensor.grad_fn
    while node is not None and len(node.next_functions) == 1:
        node = node.next_functions[0][0]
    return next((_storage_id(leaf) for leaf in _tensors([getattr(node, "variable", None)])), None)


def _storage_id(tensor: Tensor) -> int:
    return storage_id(tensor.untyped_storage())
