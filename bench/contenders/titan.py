"""torchtitan: its own Llama and block-causal masks, compiled block by block as it does, in a plain loop."""

from types import SimpleNamespace
from typing import Any

import torch
from bench.contenders.protocol import (
    IGNORED,
    Clock,
    Job,
    autocast_of,
    endless,
    fill_weights,
    inputs_of,
    loader_of,
    optimizer_of,
)
from torch import Tensor, nn
from torch.nn import functional
from torchtitan.models.llama3.model.args import RoPEScalingArgs, TransformerModelArgs
from torchtitan.models.llama3.model.model import Transformer

from meshwright.bench.random_tokens import RandomTokens

_NAMES = {
    "embedding.tokens": "tok_embeddings",
    "head": "output",
    "blocks": "layers",
    "attention.query": "attention.wq",
    "attention.key": "attention.wk",
    "attention.value": "attention.wv",
    "attention.output": "attention.wo",
    "mlp_norm": "ffn_norm",
    "mlp.gate": "feed_forward.w1",
    "mlp.down": "feed_forward.w2",
    "mlp.up": "feed_forward.w3",
}


def titan_model(job: Job) -> nn.Module:
    """torchtitan's Transformer on the job's device, with the weights that every contender gets."""
    with torch.device(job.device):
        model = Transformer(_arguments(job)).to(job.dtype)
        model.freqs_cis = model._precompute_freqs_cis()
    if job.run.model.tied_head:
        model.output.weight = model.tok_embeddings.weight
    named = dict(model.named_parameters(remove_duplicate=False))
    fill_weights(job, lambda name: _titan_tensor(named, name, job.run.model.attention.head_width))
    return model


def _arguments(job: Job) -> TransformerModelArgs:
    spec, rope = job.run.model, job.run.model.rope
    assert rope is not None
    scaling = rope.scaling
    return TransformerModelArgs(
        dim=spec.width,
        n_layers=spec.num_layers,
        n_heads=spec.attention.num_heads,
        n_kv_heads=spec.attention.num_kv_heads,
        vocab_size=spec.vocab_size,
        multiple_of=spec.mlp.width,  # its width is rounded up to a multiple of this
        ffn_dim_multiplier=0.1,
        norm_eps=spec.norm_eps,
        rope_theta=rope.theta,
        rope_scaling_args=RoPEScalingArgs(scaling_factor=1.0)
        if scaling is None
        else RoPEScalingArgs(
            scaling.factor,
            scaling.low_frequency_factor,
            scaling.high_frequency_factor,
            scaling.original_positions,
        ),
        max_seq_len=job.run.data.sequence_length,
        attn_type=job.setting("attention", "sdpa"),
        attn_mask_type="block_causal" if job.has_documents else "causal",
        eos_id=RandomTokens.eos_id,
    )


def _titan_tensor(named: dict[str, Tensor], name: str, head_width: int) -> Tensor:
    """Its parameter of our name. It rotates neighbouring elements where we rotate halves of a head."""
    theirs = name
    for ours, other in _NAMES.items():
        theirs = theirs.replace(f"{ours}.", f"{other}.")
    tensor = named[theirs]
    if ".wq." in theirs or ".wk." in theirs:
        return tensor.unflatten(0, (-1, head_width // 2, 2)).transpose(1, 2)
    return tensor


def masks_of(model: Any, job: Job, tokens: Tensor) -> Any:
    """Its attention metadata of one micro-batch; None where documents are joined."""
    if not job.has_documents:
        return None
    return model.get_attention_masks(tokens, SimpleNamespace(eos_id=RandomTokens.eos_id))


def contend(job: Job, clock: Clock) -> None:
    """Train in a plain loop until the clock stops it."""
    model = titan_model(job)
    optimizer = optimizer_of(model, job)
    if job.setting("compile", True):
        for block in model.layers.values():
            block.compile(fullgraph=True)
    loss_of = torch.compile(_loss) if job.setting("compile", True) else _loss
    rows, more = endless(loader_of(job)), True
    while more:
        total = torch.zeros((), device=job.device)
        for _ in range(job.run.accumulation):
            tokens, targets, _ = inputs_of(job, next(rows).to(job.device, non_blocking=True))
            with autocast_of(job):
                logits = model(tokens, attention_masks=masks_of(model, job, tokens))
                loss = loss_of(logits, targets) / job.run.accumulation
            del logits
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.run.optim.max_grad_norm or 1e9)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        more = clock.after_step(total)


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED)
