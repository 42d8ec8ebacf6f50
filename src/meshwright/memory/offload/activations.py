"""Activations in host memory between a block's forward and its backward.

Autograd hands over what it saves, storage by storage. In forward a block's storages are copied out while
the next block computes, and freed when that one is done; in backward the first tensor that is asked for
brings the whole block, and starts to bring the block before it. So two blocks of activations are on the
device, wherever a schedule stands. What a block shares with others stays: its parameters, also those that
autocast has narrowed, and its keyword inputs (rotary tables, document numbers). So does what is tiny.

Under recompute autograd saves a block's input only; what selective recompute keeps besides is handed over by
its own contexts.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.memory.offload.host import Copied, HostLink

# Below this a copy costs more than the bytes are worth: seeds, scalars, a few numbers per sequence.
SMALLEST_BYTES = 1024


def apply_activation_offload(blocks: Iterable[nn.Module], offload: "ActivationOffload") -> None:
    """Let every block keep what its backward needs on the host; names and parameters do not change."""
    for index, block in enumerate(blocks):
        block.forward = offload.around(block, block.forward, is_first=index == 0)


class Parcel:
    """One storage that autograd saved: still here, on the host, or back again."""

    def __init__(self, source: Tensor, bundle: "Bundle", link: HostLink) -> None:
        self.bundle = bundle
        self._link, self._num_bytes = link, source.nbytes
        self._here: Tensor | None = source
        self._home = link.pool.take(source.nbytes)
        self._sent, self._fetched = link.send(source, self._home), Copied()
        self._is_copy = False

    def leave(self) -> None:
        """The copy on the host is made: free the storage here."""
        self._sent.wait()
        self._here = None

    def fetch(self) -> None:
        """Start to bring it back, unless it never left."""
        if self._here is None:
            self._here = torch.empty(self._num_bytes, dtype=torch.uint8, device=self._link.device)
            self._is_copy = True
            self._link.account.hold_on_device(self._num_bytes)
            self._fetched = self._link.fetch(self._home, self._here)

    def bytes(self) -> Tensor:
        """The bytes on the device, complete for the current stream."""
        self.fetch()
        self._fetched.wait()
        assert self._here is not None
        return self._here

    def __del__(self) -> None:
        """Autograd has dropped the last tensor of it: no copy may still be under way when memory is freed."""
        self._sent.wait()
        self._fetched.wait()
        if self._is_copy:
            self._link.account.hold_on_device(-self._num_bytes)
        self._link.pool.give(self._home)


class Bundle:
    """All that one block saved in one forward pass. Autograd alone keeps parcels alive."""

    def __init__(self, kept: set[int], previous: "Bundle | None") -> None:
        self.kept = kept
        """Storages that stay where they are."""
        self._previous = previous
        self._parcels: dict[int, weakref.ref[Parcel]] = {}

    def parcel(self, tensor: Tensor, link: HostLink) -> Parcel:
        """The parcel of a tensor's storage; a storage that several tensors share moves once."""
        key = storage_key(tensor)
        known = self._parcels[key]() if key in self._parcels else None
        if known is None:
            known = Parcel(_all_bytes(tensor), self, link)
            self._parcels[key] = weakref.ref(known)
        return known

    def leave(self) -> None:
        """Free the block's storages on the device."""
        self._each(Parcel.leave)

    def come(self) -> None:
        """Backward begins here: bring everything, and start to bring the block before."""
        self._each(Parcel.fetch)
        if self._previous is not None:
            self._previous._each(Parcel.fetch)
            self._previous = None

    def _each(self, action: Callable[[Parcel], None]) -> None:
        for reference in self._parcels.values():
            parcel = reference()
            if parcel is not None:
                action(parcel)


class Saved:
    """A tensor that autograd saved: a view of a parcel."""

    def __init__(self, tensor: Tensor, parcel: Parcel) -> None:
        self._parcel, self._dtype = parcel, tensor.dtype
        self._geometry = (tensor.size(), tensor.stride(), tensor.storage_offset())

    def back(self) -> Tensor:
        """The tensor as it was, strides and all: other strides could choose other kernels."""
        self._parcel.bundle.come()
        return self._parcel.bytes().view(self._dtype).as_strided(*self._geometry)


class ActivationOffload:
    """The blocks of one model (or stage) in the order in which they run."""

    def __init__(self, link: HostLink) -> None:
        self._link = link
        self._last: Bundle | None = None

    def around(self, block: nn.Module, forward: Callable[..., Any], *, is_first: bool) -> Callable[..., Any]:
        """The same function; what it saves for backward goes to the host."""

        def offloaded(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            kept = {storage_key(tensor) for tensor in _tensors([*block.parameters(), *kwargs.values()])}
            leaving, bundle = self._last, Bundle(kept, None if is_first else self._last)
            self._last = bundle
            with torch.autograd.graph.saved_tensors_hooks(lambda tensor: self._pack(tensor, bundle), _unpack):
                result = forward(*args, **kwargs)
            if leaving is not None:
                leaving.leave()
            return result

        return offloaded

    def keep(self, tensor: Tensor) -> Callable[[], Tensor]:
        """See Keeper: of the block whose forward runs."""
        assert self._last is not None
        packed = self._pack(tensor, self._last)
        if isinstance(packed, Saved):
            return packed.back
        stays = packed.detach()
        return lambda: stays

    def _pack(self, tensor: Tensor, bundle: Bundle) -> Tensor | Saved:
        is_plain = not isinstance(tensor, DTensor) and tensor.device == self._link.device
        if not is_plain or tensor.nbytes < SMALLEST_BYTES:
            return tensor
        if storage_key(tensor) in bundle.kept or _only_leaf(tensor) in bundle.kept:
            return tensor
        return Saved(tensor, bundle.parcel(tensor, self._link))


def _all_bytes(tensor: Tensor) -> Tensor:
    """The whole storage that a tensor lies in. By `set_` a trace would never free it."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((size,), (1,), 0).view(torch.uint8)


def _unpack(saved: Tensor | Saved) -> Tensor:
    return saved.back() if isinstance(saved, Saved) else saved


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    """Plain tensors among values and tuples of values."""
    for value in values:
        if isinstance(value, DTensor):
            yield value.to_local().detach()
        elif isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from _tensors(value)


def _only_leaf(tensor: Tensor) -> int | None:
    """The storage that a tensor is made of alone: a parameter, transposed or narrowed by autocast."""
    node = tensor.grad_fn
    while node is not None and len(node.next_functions) == 1:
        node = node.next_functions[0][0]
    return next((storage_key(leaf) for leaf in _tensors([getattr(node, "variable", None)])), None)


def storage_key(tensor: Tensor) -> int:
    """The identity of a tensor's storage. Not its address: a tensor without data has none."""
    return tensor.untyped_storage()._cdata
