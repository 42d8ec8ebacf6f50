"""Context parallel for a Hugging Face decoder whose attention goes through the library's attention interface.

transformers calls attention by a name in its registry; ours is registered there and named in the model's
config. It gets q, k, v of this rank's rows and is one of the kinds of `parallel/cp`. Each rank gets its rows
of every [B, S, ...] tensor of a batch, and the positions of these rows; the loss of a rank is the loss of
its rows.

Not every loss can be sharded like this (one that shifts targets inside cannot), and nothing shows it from the
outside. So it is verified on a batch before training: the losses of the shards must add up to the full loss.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshwright.errors import MeshError, SpecError
from meshwright.mesh import Mesh
from meshwright.models.layers.attend import Attend
from meshwright.modules.module_program import Loss, require_pair
from meshwright.ops.trees import map_tensors, on_device, tensors_of
from meshwright.parallel.cp import cp_groups, shard_sequence
from meshwright.parallel.cp.replace_attend import build_attend

_WHERE = "parallel.cp"
Localise = Callable[[Any], Any]
"""From a batch of the loader to this rank's part of it."""
# The same numbers, summed in another order in fp32.
_SAME_LOSS = 1e-4
_UNKNOWN = {"softcap": "caps its logits", "s_aux": "has sinks", "position_bias": "adds biases by position"}


def unsharded(batch: Any) -> Any:
    """The full batch: this rank's part where cp is 1."""
    return batch


def require_interface(model: nn.Module, cp: int) -> None:
    """Refuse a module whose attention cannot be replaced from the outside.

    transformers has no public name for the two attributes read here.
    """
    kind, config = type(model).__name__, getattr(model, "config", None)
    implementation = getattr(config, "_attn_implementation", None)
    if getattr(config, "is_encoder_decoder", False):
        fact = f"{kind} has an encoder and a decoder, and cp supports decoders only"
    elif implementation is None or not getattr(model, "_supports_attention_backend", False):
        fact = f"cp={cp}, but {kind} does not call attention through the attention interface of transformers"
    elif implementation == "eager":
        fact = f"{kind} uses eager attention, which cp cannot shard over ranks"
        hint = "build it with attn_implementation='sdpa' if its attention allows that, or use cp=1"
        raise SpecError(fact, where=_WHERE, hint=hint)
    elif getattr(config, "attention_dropout", 0.0):
        rate = config.attention_dropout  # pyright: ignore[reportOptionalMemberAccess]
        fact = f"{kind} has attention_dropout={rate:g}, which attention over several ranks does not support"
        raise SpecError(fact, where=_WHERE, hint="set attention_dropout to 0 in the model's config, or cp=1")
    else:
        return
    hint = "use cp=1; recompute and offload save memory for long sequences"
    raise SpecError(fact, where=_WHERE, hint=hint)


def apply_cp_attention(model: nn.Module, loss: Loss, batch: Any, mesh: Mesh) -> Localise:
    """Shard the attention of a module that tp has not sharded yet; all ranks call it.

    `batch` is a micro-batch to verify on. Returns the function that takes this rank's part of a batch.
    """
    cp = mesh.parallel.cp
    require_interface(model, cp)
    group = mesh.group("cp")

    def localise(content: Any) -> Any:
        _require_one_length(content)
        return map_tensors(
            content, lambda one: shard_sequence(one, 1, group.rank(), cp) if one.ndim > 1 else one
        )

    batch = on_device(batch, mesh.device)
    local = localise(batch)
    full = _sum_and_count(model, loss, batch)
    _replace_attention(model, mesh)
    _add_positions(model, group.rank(), cp)
    sharded = _sum_and_count(model, loss, local)
    dist.all_reduce(sharded, group=group)
    _require_same(full, sharded)
    return localise


def _require_one_length(content: Any) -> None:
    shapes = [tuple(one.shape) for one in tensors_of(content)]
    if len({shape[1] for shape in shapes if len(shape) > 1}) != 1:
        raise SpecError(
            f"cp shards the sequence, dim 1 of every tensor, and a batch has shapes {shapes}",
            where=_WHERE,
            hint="return [samples, positions] tensors of one length, or use cp=1",
        )


def _replace_attention(model: Any, mesh: Mesh) -> None:
    parallel = mesh.parallel
    groups = cp_groups(mesh.group("cp"), parallel.cp_inner)
    core = build_attend(groups, parallel.cp_kind, Attend())
    # The model is one of that library, so the library is imported; most users do not need it.
    registry = sys.modules["transformers"].AttentionInterface
    name = f"meshwright_{parallel.cp_kind}_{groups.full.group_name}"
    registry.register(name, _interface(core))
    model.set_attn_implementation(name)


def _interface(core: nn.Module) -> Callable[..., tuple[Tensor, None]]:
    """Our attention with the signature that transformers calls."""

    def attention(
        module: nn.Module,
        q_BHSK: Tensor,
        k_BGSK: Tensor,
        v_BGSV: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        _require_known(module, attention_mask, others)
        out_BSHV = core(
            *(x.transpose(1, 2) for x in (q_BHSK, k_BGSK, v_BGSV)),
            documents=None,
            positions_BS=None,
            window=sliding_window,
            scale=scaling if scaling is not None else q_BHSK.shape[-1] ** -0.5,
        )
        return out_BSHV, None

    return attention


def _require_known(module: nn.Module, mask: Tensor | None, others: dict[str, Any]) -> None:
    reasons = [reason for key, reason in _UNKNOWN.items() if others.get(key) is not None]
    if mask is not None:
        reasons.append("gets an attention mask")
    if others.get("dropout"):
        reasons.append("has attention dropout")
    is_causal = others.get("is_causal")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        reasons.append("is not causal")
    if reasons:
        raise MeshError(
            f"{type(module).__name__} {' and '.join(reasons)}, which attention over several ranks does not "
            "support",
            where=_WHERE,
            hint="use cp=1",
        )


def _add_positions(model: nn.Module, cp_rank: int, cp: int) -> None:
    """Pass `position_ids` to the model: by itself it would number this rank's rows from 0."""

    def with_positions(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("attention_mask") is not None:
            fact = "attention_mask is set, and attention over several ranks is causal over full sequences"
            raise MeshError(
                fact, where=_WHERE, hint="leave attention_mask out: causal attention never sees end padding"
            )
        ids_BS = args[0] if args else kwargs["input_ids"]
        positions_S = torch.arange(ids_BS.shape[1] * cp, device=ids_BS.device)
        local_BS = shard_sequence(positions_S[None], 1, cp_rank, cp).expand(ids_BS.shape[0], -1)
        return args, {"position_ids": local_BS, **kwargs}

    model.register_forward_pre_hook(with_positions, with_kwargs=True)


@torch.no_grad()
def _sum_and_count(model: nn.Module, loss: Loss, batch: Any) -> Tensor:
    """[sum, count] of the loss of a batch, without dropout."""
    was_training = model.training
    model.eval()
    loss_sum, count = require_pair(loss(model, batch))
    model.train(was_training)
    return torch.tensor([float(loss_sum), float(count)], dtype=torch.float64, device=loss_sum.device)


def _require_same(full: Tensor, sharded: Tensor) -> None:
    if not torch.allclose(full, sharded, rtol=_SAME_LOSS, atol=0.0):
        (loss, count), (sharded_loss, sharded_count) = full.tolist(), sharded.tolist()
        raise SpecError(
            f"the loss of a batch is {loss:.6g} over {count:g}, and of its shards {sharded_loss:.6g} over "
            f"{sharded_count:g}: the loss is not a sum over positions",
            where="loss",
            hint="shift targets in the dataset, not in the loss (nor by labels=), and sum over positions",
        )
