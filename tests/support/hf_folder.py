"""A Hugging Face folder loaded into a decoder, or into a stage of one."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshwright.models.hf_weights import HuggingFaceReader
from meshwright.ops.sharded import local_slices


@torch.no_grad()
def load_folder(model: nn.Module, reader: HuggingFaceReader) -> None:
    """Load every parameter and saved buffer of the model; each rank reads its own shards."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name in reader.names():
        if name in tensors:
            _local(tensors[name]).copy_(reader.read_slice(name, local_slices(tensors[name])))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
