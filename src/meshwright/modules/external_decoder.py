"""A Hugging Face decoder outside of our families, built on the meta device and traced for the planner."""

import importlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from meshwright.errors import SpecError
from meshwright.modules.blocks import find_blocks
from meshwright.modules.tp_plan import read_tp_plan
from meshwright.ops.torch_storages import storage_id
from meshwright.plan.external import ExternalDecoder
from meshwright.spec.model import AttentionSpec, MlpSpec, ModelSpec, MoeSpec, RopeSpec

TRACED_TOKENS = 256
TP_DEGREES = (1, 2, 4, 8)


def external_decoder(path: Path) -> ExternalDecoder:
    """The decoder of a config.json, or of a folder that has one; SpecError for what is no causal decoder."""
    config, model = _built(path)
    text = config.get_text_config()
    block = list(find_blocks(model).values())[-1]
    return ExternalDecoder(
        name=type(model).__name__,
        model=_sizes(text, block, str(config.model_type)),
        num_parameters=sum(one.numel() for one in model.parameters()),
        saved_bytes_per_token=_saved_bytes_per_token(model, block),
        linear_flops_per_token=_linear_flops_per_token(model),
        tp_degrees=tuple(tp for tp in TP_DEGREES if tp == 1 or _allows_tp(model, tp)),
    )


def _built(path: Path) -> tuple[Any, nn.Module]:
    transformers = _transformers()
    folder = path if path.is_dir() else path.parent
    try:
        config = transformers.AutoConfig.from_pretrained(str(folder), local_files_only=True)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    except (ValueError, OSError, KeyError, ImportError) as error:
        fact = f"transformers builds no causal decoder from it: {str(error).splitlines()[0]}"
        raise SpecError(
            fact,
            where=str(path),
            hint="encoders, encoder-decoders and vision models train with meshwright.fit, without a plan",
        ) from None
    model.config.use_cache = False
    return config, model.train()


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError:
        raise SpecError(
            "a model outside of our families is read by transformers, which is not installed",
            where="MODEL",
            hint="pip install transformers",
        ) from None


def _sizes(text: Any, block: nn.Module, name: str) -> ModelSpec:
    """A decoder of ours with the sizes of the config, and an MLP as large as that of the traced block."""
    width, heads = int(text.hidden_size), int(text.num_attention_heads)
    kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    head_width = int(getattr(text, "head_dim", None) or width // heads)
    attention = AttentionSpec(num_heads=heads, num_kv_heads=kv_heads, head_width=head_width)
    return ModelSpec(
        family=name,
        vocab_size=int(text.vocab_size),
        num_layers=int(text.num_hidden_layers),
        width=width,
        max_positions=int(getattr(text, "max_position_embeddings", 8192)),
        attention=attention,
        mlp=_mlp(text, block, width, 2 * head_width * width * (heads + kv_heads)),
        moe=_moe(text),
        rope=RopeSpec(),
        tied_head=bool(getattr(text, "tie_word_embeddings", False)),
    )


def _mlp(text: Any, block: nn.Module, width: int, attention: int) -> MlpSpec:
    """Gated or not, with the width that gives the matrices of the block."""
    hidden = int(getattr(text, "intermediate_size", 4 * width))
    if _num_experts(text):
        return MlpSpec(width=hidden)
    matrices = sum(one.numel() for one in block.parameters() if one.ndim >= 2) - attention
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


def _allows_tp(model: nn.Module, tp: int) -> bool:
    try:
        read_tp_plan(model, tp)
    except SpecError:
        return False
    return True


def _forward(model: nn.Module, num_tokens: int) -> None:
    ids_BS = torch.zeros(1, num_tokens, dtype=torch.long, device="meta")
    # A mask of its own: transformers would look at the values of positions, which meta tensors do not have.
    mask = torch.ones(1, 1, num_tokens, num_tokens, dtype=torch.bool, device="meta")
    model(input_ids=ids_BS, attention_mask=mask, use_cache=False)


def _linear_flops_per_token(model: nn.Module) -> float:
    """Forward FLOPs of plain matmuls; attention, which grows with the sequence, is batched or fused."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        _forward(model, TRACED_TOKENS)
    found = {str(op): count for op, count in counter.get_flop_counts()["Global"].items()}
    linear = sum(count for op, count in found.items() if op.startswith(("aten.mm", "aten.addmm")))
    return linear / TRACED_TOKENS


def _saved_bytes_per_token(model: nn.Module, block: nn.Module) -> float:
    """Bytes that one block saves for backward per token; what grows with its square is left to the kernel."""
    once, twice = (_saved_bytes(model, block, size) for size in (TRACED_TOKENS, 2 * TRACED_TOKENS))
    return (4.0 * once - twice) / (2.0 * TRACED_TOKENS)


def _saved_bytes(model: nn.Module, block: nn.Module, num_tokens: int) -> int:
    parameters = {storage_id(one.untyped_storage()) for one in model.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage_id(storage) not in parameters:
            saved[storage_id(storage)] = storage
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    handles = [
        block.register_forward_pre_hook(lambda *_: hooks.__enter__()),
        block.register_forward_hook(lambda *_: hooks.__exit__(None, None, None)),
    ]
    try:
        _forward(model, num_tokens)
    finally:
        for handle in handles:
            handle.remove()
    return sum(storage.nbytes() for storage in saved.values())
