"""Context parallel for a Hugging Face decoder whose attention goes through the library's attention interface.

transformers calls attention by a name in its registry; ours is put there and named in the model's config. It
gets q, k, v of this rank's rows and is one of the kinds of `parallel/cp`. Each rank is given its rows of
every [B, S, ...] tensor of a batch, and the positions of these rows; the loss of a rank is that of its rows.

Nothing tells from the outside whether a loss can be cut like this (one that shifts targets inside cannot),
so it is tried on a batch before training: the parts must add up to the loss of the whole.
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
"""From what the loader gave to this rank's part of it."""
# The same numbers added up in another order, in 32 bits.
_SAME_LOSS = 1e-4
_UNKNOWN = {"softcap": "caps its logits", "s_aux": "has sinks", "position_bias": "adds biases by position"}


def keep_whole(batch: Any) -> Any:
    """The part of a batch where nothing cuts it."""
    return batch


def require_interface(model: nn.Module, cp: int) -> None:
    """Refuse a module whose attention cannot be replaced from the outside."""
    kind, config = type(model).__name__, getattr(model, "config", None)
    said = getattr(config, "_attn_implementation", None)
    if getattr(config, "is_encoder_decoder", False):
        fact = f"{kind} has an encoder and a decoder, and cp knows decoders only"
    elif said is None or not getattr(model, "_supports_attention_backend", False):
        fact = f"cp={cp}, but the attention of {kind} is its own: nothing says where it is"
    elif said == "eager":
        fact = f"{kind} computes attention by itself (eager), so it cannot be computed over several ranks"
        hint = "build it with attn_implementation='sdpa' if its attention allows that, or use cp=1"
        raise SpecError(fact, where=_WHERE, hint=hint)
    elif getattr(config, "attention_dropout", 0.0):
        rate = config.attention_dropout  # pyright: ignore[reportOptionalMemberAccess]
        fact = f"{kind} drops {rate:g} of its attention, which attention over several ranks cannot"
        raise SpecError(fact, where=_WHERE, hint="set attention_dropout to 0 in the model's config, or cp=1")
    else:
        return
    raise SpecError(fact, where=_WHERE, hint="use cp=1; recompute and offload make room for long sequences")


def apply_attention(model: nn.Module, loss: Loss, batch: Any, mesh: Mesh) -> Localise:
    """Cut the attention of a module that is still whole; `batch` is a micro-batch. All ranks call it.

    Returns what cuts a batch.
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
    part = localise(batch)
    whole = _sums(model, loss, batch)
    _replace_attention(model, mesh)
    _give_positions(model, group.rank(), cp)
    parts = _sums(model, loss, part)
    dist.all_reduce(parts, group=group)
    _require_same(whole, parts)
    return localise


def _require_one_length(content: Any) -> None:
    shapes = [tuple(one.shape) for one in tensors_of(content)]
    if len({shape[1] for shape in shapes if len(shape) > 1}) != 1:
        raise SpecError(
            f"cp cuts the sequence, dim 1 of every tensor, and a batch has shapes {shapes}",
            where=_WHERE,
            hint="give [samples, positions] tensors of one length, or use cp=1",
        )


def _replace_attention(model: Any, mesh: Mesh) -> None:
    parallel = mesh.parallel
    groups = cp_groups(mesh.group("cp"), parallel.cp_inner)
    core = build_attend(groups, parallel.cp_kind, Attend())
    # A model of that library stands here, so the library has been imported; most users have no need of it.
    registry = sys.modules["transformers"].AttentionInterface
    name = f"meshwright_{parallel.cp_kind}_{groups.full.group_name}"
    registry.register(name, _interface(core))
    model.set_attn_implementation(name)


def _interface(core: nn.Module) -> Callable[..., tuple[Tensor, None]]:
    """An attention of ours as the library calls it."""

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
            documents_BS=None,
            positions_BS=None,
            window=sliding_window,
            scale=scaling if scaling is not None else q_BHSK.shape[-1] ** -0.5,
        )
        return out_BSHV, None

    return attention


def _require_known(module: nn.Module, mask: Tensor | None, others: dict[str, Any]) -> None:
    reasons = [reason for key, reason in _UNKNOWN.items() if others.get(key) is not None]
    if mask is not None:
        reasons.append("is given a mask")
    if others.get("dropout"):
        reasons.append("drops weights")
    is_causal = others.get("is_causal")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        reasons.append("looks ahead")
    if reasons:
        raise MeshError(
            f"{type(module).__name__} {' and '.join(reasons)}, which attention over several ranks cannot",
            where=_WHERE,
            hint="use cp=1",
        )


def _give_positions(model: nn.Module, cp_rank: int, cp: int) -> None:
    """Rows of this rank are not the first ones of the sequence; the model would number them so."""

    def with_positions(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("attention_mask") is not None:
            fact = "attention_mask is given, and attention over several ranks is causal over whole sequences"
            raise MeshError(
                fact, where=_WHERE, hint="leave attention_mask out: padding after the end is not seen"
            )
        ids_BS = args[0] if args else kwargs["input_ids"]
        positions_S = torch.arange(ids_BS.shape[1] * cp, device=ids_BS.device)
        local_BS = shard_sequence(positions_S[None], 1, cp_rank, cp).expand(ids_BS.shape[0], -1)
        return args, {"position_ids": local_BS, **kwargs}

    model.register_forward_pre_hook(with_positions, with_kwargs=True)


@torch.no_grad()
def _sums(model: nn.Module, loss: Loss, batch: Any) -> Tensor:
    """[sum, count] of a batch, without dropout."""
    was_training = model.training
    model.eval()
    loss_sum, count = require_pair(loss(model, batch))
    model.train(was_training)
    return torch.tensor([float(loss_sum), float(count)], dtype=torch.float64, device=loss_sum.device)


def _require_same(whole: Tensor, parts: Tensor) -> None:
    if not torch.allclose(whole, parts, rtol=_SAME_LOSS, atol=0.0):
        (loss, count), (cut_loss, cut_count) = whole.tolist(), parts.tolist()
        raise SpecError(
            f"the loss of a batch is {loss:.6g} over {count:g}, and of its parts {cut_loss:.6g} over "
            f"{cut_count:g}: it is no sum over positions",
            where="loss",
            hint="shift targets in the dataset, not in the loss (nor by labels=), and sum over positions",
        )
