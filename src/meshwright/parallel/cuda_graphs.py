"""CUDA graphs: forward and backward of a micro-batch are recorded once and replayed with one launch.

The host launches hundreds of kernels for each micro-batch. Where they are short (small models, few tokens),
the device waits for the host. A replay costs the host one call.

A graph reads and writes fixed addresses. The fields of each micro-batch are copied into the tensors that the
graph was recorded with, and gradients are added to buffers that live as long as the program. What the host
would decide anew for every micro-batch is fixed at its upper bound: the longest document, the number of
targets, and the number of document offsets, of which powers of two are recorded.

Gradients are reduced after the last replay, so dp is not overlapped with backward here.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from meshwright.data.microbatch import Microbatch
from meshwright.ops import torch_foreach as foreach
from meshwright.parallel.program import SingleProgram, model_arguments

_WARM_UP = 2  # runs before recording: kernels are compiled and tuned, and workspaces allocated


class GraphedProgram(SingleProgram):
    """A `SingleProgram` on one CUDA device whose micro-batches are replayed."""

    _gradients: Sequence[Tensor] = ()
    _graphs: dict[tuple[int, ...], "_Graph"]

    def accumulate(self, microbatches: Sequence[Microbatch], *, scale: float = 1.0) -> Tensor:
        """Implements `Program.accumulate`."""
        locals_ = [at_upper_bounds(self._localise(each, scale)) for each in microbatches]
        self._reset_gradients(locals_[0])
        parts = []
        for index, microbatch in enumerate(locals_):
            with self._reducer.microbatch(is_last=index == len(locals_) - 1):
                parts.append(self._graph_for(microbatch).replay(microbatch))
        return torch.stack(parts).sum() / scale

    def _reset_gradients(self, example: Microbatch) -> None:
        """Give every parameter its buffer, filled with zeros."""
        if not self._gradients:
            self._allocate_gradients(example)
        foreach.zero_(list(self._gradients))
        for parameter, gradient in zip(self._trainable, self._gradients, strict=True):
            parameter.grad = gradient

    def _allocate_gradients(self, example: Microbatch) -> None:
        """Keep the gradients of an ordinary backward, which have the dtype and the layout that is wanted."""
        with self._reducer.microbatch(is_last=False):
            self._forward(example).backward()
        self._trainable = [one for one in self._model.parameters() if one.grad is not None]
        self._gradients = [one.grad for one in self._trainable if one.grad is not None]
        self._graphs = {}

    def _graph_for(self, microbatch: Microbatch) -> "_Graph":
        offsets = microbatch.document_offsets_P
        key = (*microbatch.tokens_BS.shape, 0 if offsets is None else len(offsets))
        if key not in self._graphs:
            self._graphs[key] = self._record(microbatch)
        return self._graphs[key]

    def _record(self, microbatch: Microbatch) -> "_Graph":
        """Record a graph; gradients that this step has accumulated before are put back."""
        before = [gradient.clone() for gradient in self._gradients]
        inputs = microbatch.each(torch.clone)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP):
                self._add_gradients(inputs)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.empty_cache()  # activations of the runs before, which the graph cannot use
        graph = torch.cuda.CUDAGraph()
        # One graph runs at a time, so all share the memory of the first one's activations.
        pool = next(iter(self._graphs.values())).graph.pool() if self._graphs else None
        with torch.cuda.graph(graph, pool=pool):
            loss = self._add_gradients(inputs)
        foreach.copy_(list(self._gradients), before)
        return _Graph(graph, inputs, loss)

    def _add_gradients(self, microbatch: Microbatch) -> Tensor:
        """Forward, and backward into the buffers. Not `Tensor.backward`: it would run on the stream on which
        hooks of the parameters were registered, which cannot be recorded."""
        with self._wgrad_fusion.microbatch():
            loss = self._forward(microbatch)
            found = torch.autograd.grad(loss, self._trainable, allow_unused=True)
        pairs = [(buffer, one) for buffer, one in zip(self._gradients, found, strict=True) if one is not None]
        foreach.add_([buffer for buffer, _ in pairs], [one for _, one in pairs])
        return loss.detach()

    def _forward(self, microbatch: Microbatch) -> Tensor:
        return self._model(microbatch.tokens_BS, **model_arguments(microbatch))


class _Graph:
    """A recorded micro-batch with the tensors that it reads and its loss."""

    def __init__(self, graph: torch.cuda.CUDAGraph, inputs: Microbatch, loss: Tensor) -> None:
        self.graph, self._inputs, self._loss = graph, inputs, loss

    def replay(self, microbatch: Microbatch) -> Tensor:
        """Add the gradients of a micro-batch to the buffers; the loss."""
        for mine, new in zip(self._inputs, microbatch, strict=True):
            if isinstance(mine, Tensor) and isinstance(new, Tensor):
                mine.copy_(new)
        self.graph.replay()
        return self._loss.clone()


def at_upper_bounds(microbatch: Microbatch) -> Microbatch:
    """The same micro-batch with host numbers that are equal for all micro-batches of its shape."""
    batch, sequence = microbatch.tokens_BS.shape
    offsets = microbatch.document_offsets_P
    if offsets is None:
        return microbatch._replace(num_targets=batch * sequence)
    width = 1 << (len(offsets) - 1).bit_length()
    return microbatch._replace(
        num_targets=batch * sequence,
        longest_document=sequence,
        document_offsets_P=functional.pad(offsets, (0, width - len(offsets)), value=batch * sequence),
    )
