"""transformers' model of a ModelSpec, with the weights that every contender gets."""

import torch
from bench.contenders.protocol import Job, fill_weights
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from meshwright.spec.huggingface import to_config
from meshwright.spec.huggingface.names import sources


def hf_model(job: Job) -> nn.Module:
    """The model on the job's device, in training mode."""
    spec = job.run.model
    config = AutoConfig.for_model(**to_config(spec))
    config.use_cache = False
    with torch.device(job.device):
        model = AutoModelForCausalLM.from_config(
            config,
            attn_implementation=job.setting("attention", "sdpa"),
            dtype=job.dtype,
            **({"experts_implementation": "grouped_mm"} if spec.moe else {}),
        )
    model.train()
    named, source_of = dict(model.named_parameters(remove_duplicate=False)), sources(spec)

    def tensor_of(name: str) -> Tensor:
        source = source_of[name]
        if source.stacked:
            return _experts(named, source.names[0])
        tensor = named[source.names[0]]
        tensor = tensor.t() if source.transposed else tensor
        if source.third is None:
            return tensor
        rows = tensor.shape[0] // 3
        return tensor[source.third * rows : (source.third + 1) * rows]

    fill_weights(job, tensor_of)
    if job.setting("recompute", False):
        model.gradient_checkpointing_enable()
    return model


def _experts(named: dict[str, Tensor], first_expert: str) -> Tensor:
    """A matrix of all experts: transformers holds them stacked, gate and up in one tensor."""
    layer, _, matrix = first_expert.rpartition(".0.")
    if matrix == "down_proj.weight":
        return named[f"{layer}.down_proj"]
    gate, up = named[f"{layer}.gate_up_proj"].chunk(2, dim=1)
    return gate if matrix == "gate_proj.weight" else up
