"""A Hugging Face model outside of our families, built on the meta device and traced for the planner.

Decoders, encoders (BERT), encoder-decoders (T5) and vision transformers (ViT): models of equal blocks.
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from meshwright.errors import SpecError
from meshwright.modules.blocks import find_blocks
from meshwright.modules.tp_plan import read_tp_plan
from meshwright.ops.torch_storages import storage_id
from meshwright.plan.external import ExternalKind, ExternalModel
from meshwright.spec.model import AttentionSpec, MlpSpec, ModelSpec, MoeSpec, RopeSpec

TRACED_TOKENS = 256
TP_DEGREES = (1, 2, 4, 8)
AUTO_CLASSES: dict[ExternalKind, str] = {
    "decoder": "AutoModelForCausalLM",
    "encoder": "AutoModelForMaskedLM",
    "encoder-decoder": "AutoModelForSeq2SeqLM",
    "vision": "AutoModelForImageClassification",
}
NO_EQUAL_BLOCKS = (
    "meshwright.fit(model, dataset, loss, ...) trains it without a plan (docs/guides/own_model.md)"
)


@dataclass(frozen=True)
class _Built:
    """A model on the meta device."""

    kind: ExternalKind
    config: Any
    model: nn.Module
    blocks: list[nn.Module]

    @property
    def text(self) -> Any:
        """The config that has the sizes of the blocks."""
        return self.config.get_text_config() if self.kind == "decoder" else self.config


def external_model(path: Path) -> ExternalModel:
    """The model of a config.json, or of a folder that has one; SpecError for one without equal blocks."""
    transformers = _transformers()
    config = _config(transformers, path)
    built = _built(transformers, config, path)
    model, tokens = _sizes(built, path), _block_tokens(built)
    return ExternalModel(
        name=type(built.model).__name__,
        kind=built.kind,
        model=model,
        num_parameters=sum(one.numel() for one in built.model.parameters()),
        saved_bytes_per_token=_saved_bytes_per_token(transformers, built, tokens, path),
        linear_flops_per_token=_linear_flops_per_token(built, tokens),
        fixed_length=tokens if built.kind == "vision" else None,
        tp_degrees=tuple(tp for tp in TP_DEGREES if tp == 1 or _allows_tp(built, tp)),
    )


# Building ------------------------------------------------------------------------------------------------


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError:
        raise SpecError(
            "a model outside of our families is read by transformers, which is not installed",
            where="MODEL",
            hint="pip install transformers",
        ) from None


def _config(transformers: Any, path: Path) -> Any:
    folder = path if path.is_dir() else path.parent
    try:
        return transformers.AutoConfig.from_pretrained(str(folder), local_files_only=True)
    except (ValueError, OSError, KeyError, ImportError) as error:
        fact = f"transformers cannot read it: {str(error).splitlines()[0]}"
        raise SpecError(fact, where=str(path), hint=NO_EQUAL_BLOCKS) from None


def _kind(transformers: Any, config: Any) -> ExternalKind | None:
    """What the class of the config is trained as; BERT can be a decoder, but is trained as an encoder."""
    if getattr(config, "is_encoder_decoder", False):
        return (
            "encoder-decoder" if type(config) in transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING else None
        )
    if type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False):
        return "encoder"
    if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return "decoder"
    return "vision" if type(config) in transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING else None


def _built(transformers: Any, config: Any, path: Path) -> _Built:
    kind = _kind(transformers, config)
    if kind is None:
        fact = (
            f"model_type {config.model_type!r} is no decoder, encoder, encoder-decoder or vision transformer"
        )
        raise SpecError(fact, where=str(path), hint=NO_EQUAL_BLOCKS)
    try:
        with torch.device("meta"):
            model = getattr(transformers, AUTO_CLASSES[kind]).from_config(config, dtype=torch.bfloat16)
    except (ValueError, OSError, KeyError, ImportError, AttributeError) as error:
        fact = f"transformers builds no {kind} from it: {str(error).splitlines()[0]}"
        raise SpecError(fact, where=str(path), hint=NO_EQUAL_BLOCKS) from None
    model.config.use_cache = False
    return _Built(kind, config, model.train(), list(find_blocks(model).values()))


def _inputs(built: _Built, num_tokens: int) -> dict[str, Any]:
    """Inputs of one sample; an image has the size of the config."""
    if built.kind == "vision":
        config = built.config
        height, width = _pair(config.image_size)
        return {"pixel_values": torch.zeros(1, config.num_channels, height, width, device="meta").bfloat16()}
    ids_BS = torch.zeros(1, num_tokens, dtype=torch.long, device="meta")
    # A mask of its own: transformers would look at the values of positions, which meta tensors do not have.
    mask = torch.ones(1, 1, num_tokens, num_tokens, dtype=torch.bool, device="meta")
    if built.kind == "encoder-decoder":
        return {"input_ids": ids_BS, "decoder_input_ids": ids_BS, "use_cache": False}
    if built.kind == "encoder":
        return {"input_ids": ids_BS}
    return {"input_ids": ids_BS, "attention_mask": mask, "use_cache": False}


def _pair(size: Any) -> tuple[int, int]:
    return (int(size), int(size)) if isinstance(size, int) else (int(size[0]), int(size[1]))


def _block_tokens(built: _Built) -> int:
    """Tokens that a block sees of one traced sample."""
    if built.kind != "vision":
        # Learned positions end somewhere, and twice as many tokens are traced too.
        return min(TRACED_TOKENS, int(getattr(built.text, "max_position_embeddings", None) or 8192) // 2)
    shapes: list[torch.Size] = []
    handle = built.blocks[-1].register_forward_pre_hook(lambda _, args: shapes.append(args[0].shape))
    with torch.no_grad():
        built.model(**_inputs(built, TRACED_TOKENS))
    handle.remove()
    return int(shapes[0][1])


# Sizes ---------------------------------------------------------------------------------------------------


def _sizes(built: _Built, path: Path) -> ModelSpec:
    """A decoder of ours with the sizes of the config, and an MLP as large as that of the mean block."""
    text = built.text
    try:
        width, heads = int(text.hidden_size), int(text.num_attention_heads)
        _pair(text.image_size if built.kind == "vision" else 0)
    except (AttributeError, TypeError):
        fact = f"{type(built.model).__name__} has no blocks of equal width"
        raise SpecError(fact, where=str(path), hint=NO_EQUAL_BLOCKS) from None
    kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    head_width = int(getattr(text, "head_dim", None) or getattr(text, "d_kv", None) or width // heads)
    return ModelSpec(
        family=str(built.config.model_type),
        vocab_size=_vocabulary(built, width),
        num_layers=len(built.blocks),
        width=width,
        max_positions=int(getattr(text, "max_position_embeddings", None) or 8192),
        attention=AttentionSpec(num_heads=heads, num_kv_heads=kv_heads, head_width=head_width),
        mlp=_mlp(text, built.blocks, width, 2 * head_width * width * (heads + kv_heads)),
        moe=_moe(text),
        rope=RopeSpec(),
        tied_head=bool(getattr(text, "tie_word_embeddings", False)) and built.kind != "vision",
    )


def _vocabulary(built: _Built, width: int) -> int:
    """Tokens of the vocabulary; a vision model has the number whose embedding and head are as large."""
    if built.kind != "vision":
        return int(built.text.vocab_size)
    in_blocks = sum(one.numel() for block in built.blocks for one in block.parameters())
    outside = sum(one.numel() for one in built.model.parameters()) - in_blocks
    return max(1, round(outside / (2 * width)))


def _mlp(text: Any, blocks: list[nn.Module], width: int, attention: int) -> MlpSpec:
    """Gated or not, with the width that gives the matrices of the mean block."""
    hidden = int(getattr(text, "intermediate_size", None) or getattr(text, "d_ff", None) or 4 * width)
    if _num_experts(text):
        return MlpSpec(width=hidden)
    matrices = sum(one.numel() for block in blocks for one in block.parameters() if one.ndim >= 2)
    matrices = matrices / len(blocks) - attention
    is_gated = matrices > 2.5 * width * hidden
    solved = max(1, round(matrices / ((3 if is_gated else 2) * width)))
    return MlpSpec(kind="swiglu" if is_gated else "gelu", width=solved)


def _num_experts(text: Any) -> int:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((int(found) for name in names if (found := getattr(text, name, None))), 0)


def _moe(text: Any) -> MoeSpec | None:
    if not _num_experts(text):
        return None
    width = int(getattr(text, "moe_intermediate_size", None) or text.intermediate_size)
    return MoeSpec(
        num_experts=_num_experts(text),
        top_k=int(getattr(text, "num_experts_per_tok", 2)),
        width=width,
        shared_width=int(getattr(text, "shared_expert_intermediate_size", 0) or 0),
    )


def _allows_tp(built: _Built, tp: int) -> bool:
    if built.kind != "decoder":
        return False
    try:
        read_tp_plan(built.model, tp)
    except SpecError:
        return False
    return True


# Tracing -------------------------------------------------------------------------------------------------


def _linear_flops_per_token(built: _Built, tokens: int) -> float:
    """Forward FLOPs of plain matmuls; attention, which grows with the sequence, is batched or fused."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        built.model(**_inputs(built, tokens))
    found = {str(op): count for op, count in counter.get_flop_counts()["Global"].items()}
    linear = sum(count for op, count in found.items() if op.startswith(("aten.mm", "aten.addmm")))
    return linear / tokens


def _saved_bytes_per_token(transformers: Any, built: _Built, tokens: int, path: Path) -> float:
    """Bytes that the mean block saves for backward per token.

    What grows with the square of the tokens is left to the kernel of attention, which does not keep it: two
    lengths tell it apart.
    """
    longer, longer_tokens = built, 2 * tokens
    if built.kind == "vision":
        config = _config(transformers, path)
        height, width = _pair(config.image_size)
        config.image_size = 2 * height if height == width else [2 * height, 2 * width]
        longer = _built(transformers, config, path)
        longer_tokens = _block_tokens(longer)
    once, more = _saved_bytes(built, tokens), _saved_bytes(longer, longer_tokens)
    squares = (tokens**2, longer_tokens**2)
    return (once * squares[1] - more * squares[0]) / (tokens * squares[1] - longer_tokens * squares[0])


def _saved_bytes(built: _Built, num_tokens: int) -> float:
    """Bytes that the mean block saves of one sample: traced once for each kind of block."""
    kinds: dict[tuple[type, int], list[nn.Module]] = {}
    for block in built.blocks:
        size = sum(one.numel() for one in block.parameters())
        kinds.setdefault((type(block), size), []).append(block)
    saved = sum(len(alike) * _saved_of_block(built, alike[-1], num_tokens) for alike in kinds.values())
    return saved / len(built.blocks)


def _saved_of_block(built: _Built, block: nn.Module, num_tokens: int) -> int:
    parameters = {storage_id(one.untyped_storage()) for one in built.model.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage_id(storage) not in parameters:
            saved[storage_id(storage)] = storage
        return tensor

    with _inside(block, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)):
        built.model(**_inputs(built, num_tokens))
    return sum(storage.nbytes() for storage in saved.values())


@contextmanager
def _inside(block: nn.Module, hooks: Any) -> Iterator[None]:
    """Hooks on saved tensors that are in effect while the block runs."""
    handles = [
        block.register_forward_pre_hook(lambda *_: hooks.__enter__()),
        block.register_forward_hook(lambda *_: hooks.__exit__(None, None, None)),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
