"""Attention by its definition, which the attention of `ops` and `parallel/cp` must equal."""

import torch
from torch import Tensor

from meshwright.ops.attention import AttentionScope, visible


def reference_attention(q_BSHK: Tensor, k_BTGK: Tensor, v_BTGV: Tensor, scope: AttentionScope) -> Tensor:
    """Attention by its definition, with all S x T scores in memory and autograd's backward."""
    groups = k_BTGK.shape[2]
    seen_BST = visible(scope, slice(None), slice(None), q_BSHK.device)
    q_BSGRK = q_BSHK.unflatten(2, (groups, -1))
    scores_BGRST = torch.einsum("bsgrk,btgk->bgrst", q_BSGRK, k_BTGK) * scope.scale
    scores_BGRST = scores_BGRST.masked_fill(~seen_BST[:, None, None], float("-inf"))
    weights_BGRST = torch.softmax(scores_BGRST, dim=-1)
    return torch.einsum("bgrst,btgv->bsgrv", weights_BGRST, v_BTGV).flatten(2, 3)
