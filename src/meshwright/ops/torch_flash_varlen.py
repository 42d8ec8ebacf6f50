"""Torch's flash attention over segments of flattened rows (varlen), on CUDA.

The public `torch.nn.attention.varlen.varlen_attn` differs between torch 2.11 and 2.13, and its operator takes
the longest segment as a number that a compiled graph is specialised to. Both versions call these private aten
operators, which return the log-sum-exp as well.

Layout: q_THK, k_UGK, v_UGK with one width for all, lse_HT.
"""

from typing import Any

import torch
from torch import Tensor

from meshwright.ops.documents import Segments

_aten = torch.ops.aten


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, *, scale: float
) -> tuple[Tensor, Tensor]:
    """(out, lse); a query without keys has out 0 and lse +inf."""
    lengths, is_causal, window = _arguments(segments)
    out, lse, *_ = _aten._flash_attention_forward(
        q, k, v, *lengths, 0.0, is_causal, False, scale=scale, **window
    )
    return out, lse


def flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    segments: Segments,
    *,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv); keys without queries get zeros."""
    lengths, is_causal, window = _arguments(segments)
    # Seed and offset of dropout, which is always 0 here.
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
    return _aten._flash_attention_backward(
        grad, q, k, v, out, lse, *lengths, 0.0, is_causal, seed, seed[:0], scale=scale, **window
    )


def _arguments(segments: Segments) -> tuple[tuple[Any, ...], bool, dict[str, int]]:
    """Offsets and longest lengths, whether the mask is plainly causal, and the window (-1: no limit)."""
    longest = int(segments.longest_1)  # in host memory: no sync
    left = -1 if segments.window is None else segments.window - 1
    window = {"window_size_left": left, "window_size_right": 0 if segments.causal else -1}
    lengths = (segments.query_offsets_P, segments.key_offsets_P, longest, longest)
    return lengths, segments.causal and segments.window is None, window
