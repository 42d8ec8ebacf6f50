"""Accelerators that the runtime does not support, each refused with the reason and what to do instead."""

import re

from meshwright.errors import SpecError

_RUNTIME = "training runs on CUDA and ROCm devices and on CPUs, with torch's FSDP2, DTensor and NCCL"
_OTHER = {
    r"(google |cloud )?tpu\b|v5e\b|v5litepod|v5p\b|v6e\b|trillium|ironwood": (
        "a TPU",
        "PyTorch reaches it through torch_xla, which has its own sharding",
        "MaxText or torch_xla train on TPUs",
    ),
    r"(aws )?(trainium|trn\d|inferentia|inf\d)": (
        "an AWS Neuron device",
        "PyTorch reaches it through torch-neuronx, which has its own sharding",
        "NeuronX Distributed trains on Trainium",
    ),
    r"(intel )?(gaudi|hpu\b)": (
        "an Intel Gaudi",
        "PyTorch reaches it through its own plug-in and collectives",
        "Optimum Habana trains on Gaudi",
    ),
}


def refuse_other_accelerator(name: str) -> None:
    """SpecError for the name of an accelerator that the runtime cannot use, such as `tpu-v5e`."""
    for pattern, (kind, reason, instead) in _OTHER.items():
        if re.match(pattern, name):
            raise SpecError(
                f"{name} is {kind}, which is not supported: {reason}",
                where="--on",
                hint=f"{_RUNTIME}: plan for a GPU cluster such as h100:8x4; {instead}",
            )
