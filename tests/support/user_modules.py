"""Modules as users bring them: unmodified, small, each with batches and a loss.

They come from transformers, timm, torchvision and plain torch. `user_module(name)` finds one by name.
"""

import dataclasses
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from tests.support.vision_modules import (
    timm_convnext,
    timm_resnet,
    timm_vit,
    torchvision_mobilenet,
    torchvision_resnet,
)
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.overrides import TorchFunctionMode

BATCH = 8
# Importing transformers takes longer than training; the pool of ranks imports it once.
SLOW_IMPORTS = ("transformers.models.resnet.modeling_resnet", "transformers.models.gemma3.modeling_gemma3")
Batch = tuple[Tensor, Tensor]


def resnet() -> nn.Module:
    """A CNN in channels_last, from transformers."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 12], depths=[2, 2], layer_type="basic", num_labels=5
    )
    torch.manual_seed(0)
    return ResNetForImageClassification(config).to(memory_format=torch.channels_last)


def vit() -> nn.Module:
    """A vision transformer, from transformers."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=24,
        image_size=16,
        patch_size=8,
        num_labels=5,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(0)
    return ViTForImageClassification(config)


def bert() -> nn.Module:
    """A masked language model from transformers, whose head is tied to its embedding table."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=37,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=12,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(0)
    return BertForMaskedLM(config)


def decoder(family: str, **changes: Any) -> nn.Module:
    """A causal language model from transformers, of a family that meshwright has no model code for."""
    import transformers

    prefix = "Gemma3Text" if family == "Gemma3" else family
    sizes = {
        "vocab_size": 38,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 16,
        "pad_token_id": 3,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "use_cache": False,
    }
    config = getattr(transformers, f"{prefix}Config")(**sizes | changes)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    # In every submodule, because recompute and pipelines call submodules directly.
    for module in [model, *model.base_model.children(), *model.base_model.layers]:
        module.forward = in_double(module.forward)
    return model


def sequential() -> nn.Module:
    """Layers that run one after the other, which a pipeline can split as they are."""
    torch.manual_seed(0)
    layers = [
        nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True, norm_first=True)
        for _ in range(4)
    ]
    return nn.Sequential(nn.Embedding(37, 16), *layers, nn.LayerNorm(16), nn.Linear(16, 37))


def mlp() -> nn.Module:
    """No attention: the gradient of a key bias is rounding noise, which some optimizers amplify."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 16)) for _ in range(2)]
    return nn.Sequential(nn.Embedding(37, 16), *blocks, nn.Linear(16, 37))


def cnn() -> nn.Module:
    """Convolutions with batch norm, in channels_last."""
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        for _ in range(3)
    ]
    ends = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), *blocks, *ends)
    return model.to(memory_format=torch.channels_last)


def plain_image_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    images, labels = batch
    return cross_entropy(model(images), labels, reduction="sum"), len(labels)


def plain_token_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    tokens, targets = batch
    return cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum"), (
        targets >= 0
    ).sum()


def image_batch(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(BATCH, 3, 16, 16, generator=generator, dtype=torch.float64)
    return images.to(memory_format=torch.channels_last), torch.randint(5, (BATCH,), generator=generator)


def token_batch(step: int) -> Batch:
    """Rows with one to twelve targets, so that ranks and micro-batches have unequal numbers of them."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(37, (BATCH, 12), generator=generator)
    lengths = torch.randint(1, 13, (BATCH, 1), generator=generator)
    return tokens, tokens.roll(1, 1).masked_fill(torch.arange(12) >= lengths, -100)


def image_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    images, labels = batch
    return cross_entropy(model(pixel_values=images).logits, labels, reduction="sum"), len(labels)


def token_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    tokens, targets = batch
    logits = model(input_ids=tokens).logits
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), (targets >= 0).sum()


class InDouble(TorchFunctionMode):
    """Replaces float32 by float64: decoders of transformers normalise in float32 whatever the weights are."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if one is torch.float32 else one for one in args)
        kwargs = {key: torch.float64 if one is torch.float32 else one for key, one in (kwargs or {}).items()}
        return func(*args, **kwargs)


def in_double(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The same forward, run under `InDouble`."""

    @wraps(forward)
    def doubled(*args: Any, **kwargs: Any) -> Any:
        with InDouble():
            return forward(*args, **kwargs)

    return doubled


@dataclasses.dataclass(frozen=True)
class UserModule:
    """A module with batches and a loss for it."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss: Callable[[nn.Module, Batch], tuple[Tensor, Any]]


MODULES = {
    "resnet": UserModule(resnet, image_batch, image_loss),
    "vit": UserModule(vit, image_batch, image_loss),
    "bert": UserModule(bert, token_batch, token_loss),
}
GEMMA = {"head_dim": 4, "query_pre_attn_scalar": 4, "attn_implementation": "sdpa"}
DECODERS = {
    # Queries and keys are normalised over all heads, so its tp plan gathers them.
    "olmo2": UserModule(partial(decoder, "Olmo2", tie_word_embeddings=False), token_batch, token_loss),
    # Norms per head between two sharded matmuls; a scaled embedding tied to the head; sliding windows.
    "gemma3": UserModule(partial(decoder, "Gemma3", sliding_window=4, **GEMMA), token_batch, token_loss),
    # Biases everywhere.
    "starcoder2": UserModule(
        partial(
            decoder, "Starcoder2", residual_dropout=0.0, embedding_dropout=0.0, tie_word_embeddings=False
        ),
        token_batch,
        token_loss,
    ),
}
MORE_DECODERS = {
    "gemma3_untied": UserModule(
        partial(decoder, "Gemma3", sliding_window=4, tie_word_embeddings=False, **GEMMA),
        token_batch,
        token_loss,
    ),
    "gemma2": UserModule(
        partial(decoder, "Gemma2", head_dim=4, query_pre_attn_scalar=4), token_batch, token_loss
    ),
    "phi3": UserModule(partial(decoder, "Phi3"), token_batch, token_loss),
    "cohere": UserModule(partial(decoder, "Cohere"), token_batch, token_loss),
    "glm4": UserModule(partial(decoder, "Glm4", head_dim=4), token_batch, token_loss),
    "granite": UserModule(partial(decoder, "Granite"), token_batch, token_loss),
    "olmo": UserModule(partial(decoder, "Olmo"), token_batch, token_loss),
}
# Plain torch: always installed.
PLAIN = {
    "sequential": UserModule(sequential, token_batch, plain_token_loss),
    "mlp": UserModule(mlp, token_batch, plain_token_loss),
    "cnn": UserModule(cnn, image_batch, plain_image_loss),
}
VISION = {
    "timm resnet": UserModule(timm_resnet, image_batch, plain_image_loss),
    "timm convnext": UserModule(timm_convnext, image_batch, plain_image_loss),
    "timm vit": UserModule(timm_vit, image_batch, plain_image_loss),
    "torchvision mobilenet": UserModule(torchvision_mobilenet, image_batch, plain_image_loss),
    "torchvision resnet": UserModule(torchvision_resnet, image_batch, plain_image_loss),
}


def user_module(name: str) -> UserModule:
    return (MODULES | DECODERS | MORE_DECODERS | PLAIN | VISION)[name]
