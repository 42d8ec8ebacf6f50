"""A small dataset wholly on the device: samples are read once at the start, and batches are gathered there.

The samples are what the dataset returned then, so a random transform would be drawn once, not in each epoch.
"""

from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor
from torch.utils.data import default_collate

from meshwright.errors import DataError
from meshwright.modules.dataset import LoaderOptions, SampleSet, load_microbatches
from meshwright.ops.trees import map_tensors, map_together, on_device, tensors_of
from meshwright.units import show_bytes

_CHUNK_SAMPLES = 256
# The rest of the memory is for the model and its activations.
_MAX_SHARE = 0.5


class DeviceSamples:
    """All samples of a dataset as tensors on the device, dim 0 is the sample."""

    def __init__(self, dataset: SampleSet, options: LoaderOptions, device: torch.device) -> None:
        """Reads every sample; DataError where they would take more than half of the free memory."""
        if options.collate not in (None, default_collate):
            fact, hint = "samples on the device cannot go through a collate function", "leave one of them out"
            raise DataError(fact, where="data.on_device", hint=hint)
        self.device, count = device, len(dataset)
        ids = np.array_split(np.arange(count), -(-count // _CHUNK_SAMPLES))
        chunks: list[Any] = []
        try:
            for content in load_microbatches(dataset, [part.tolist() for part in ids], options):
                if not chunks:
                    _require_memory(content, count / len(ids[0]), device)
                chunks.append(on_device(content, device))
        except RuntimeError as error:
            if "equal size" not in str(error):  # torch's words for samples of different shapes
                raise
            raise _unequal(error) from None
        self._samples = _joined(chunks)

    @property
    def num_bytes(self) -> int:
        """Bytes of all samples on the device."""
        return sum(one.nbytes for one in tensors_of(self._samples))

    def take(self, sample_ids: list[int]) -> Any:
        """The collated batch of these samples; nothing is copied from the host but their numbers."""
        ids = torch.as_tensor(sample_ids, device=self.device)
        return map_tensors(self._samples, lambda one: one.index_select(0, ids))


def _joined(chunks: list[Any]) -> Any:
    """Chunks of equal structure concatenated along dim 0."""

    def join(*parts: Any) -> Any:
        if all(isinstance(part, Tensor) for part in parts):
            return torch.cat(parts)
        kind = type(parts[0]).__name__
        hint = "return tensors and numbers of equal shapes from the dataset"
        raise DataError(f"samples contain a {kind}, not tensors only", where="data.on_device", hint=hint)

    try:
        return map_together(join, chunks)
    except (RuntimeError, ValueError) as error:
        raise _unequal(error) from None


def _unequal(error: Exception) -> DataError:
    hint = "samples on the device have equal shapes: pad them in the dataset, or leave on_device out"
    return DataError(f"samples cannot be stacked: {error}", where="data.on_device", hint=hint)


def _require_memory(content: Any, num_chunks: float, device: torch.device) -> None:
    needed = sum(one.nbytes for one in tensors_of(content)) * num_chunks
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    if needed > _MAX_SHARE * free:
        raise DataError(
            f"all samples take {show_bytes(int(needed))}, and {show_bytes(free)} are free on {device.type}",
            where="data.on_device",
            hint="leave on_device out: batches are then read ahead and copied",
        )
