"""transformers' model of a ModelSpec, with the weights that every contender gets."""

import torch
from bench.contenders.protocol import Job, fill_weights
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from meshwright.models.hf_names import sources
from meshwright.spec.huggingface import to_config


def hf_model(job: Job) -> nn.Module:
    """The model on the job's device, in training mode."""
    spec = job.run.model
    config = AutoConfig.for_model(**to_config(spec))
    config.use_cache = False
    with torch.device(job.device):
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=job.setting("attention", "sdpa"), dtype=job.dtype
        )
    model.train()
    named, source_of = dict(model.named_parameters(remove_duplicate=False)), sources(spec)

    def tensor_of(name: str) -> Tensor:
        source = source_of[name]
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
