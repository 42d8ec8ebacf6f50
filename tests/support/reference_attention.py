"""Attention by its definition, which the attention of `ops` and `parallel/cp` must equal."""

import torch
from torch import Tensor, nn

from meshwright.ops.attention import AttentionScope, full_sequence, visible


def reference_attention(q_BSHK: Tensor, k_BTGK: Tensor, v_BTGV: Tensor, scope: AttentionScope) -> Tensor:
    """Attention by its definition, with all S x T scores in memory and autograd's backward."""
    groups = k_BTGK.shape[2]
    seen_BST = visible(scope, slice(None), slice(None), q_BSHK.device)
    q_BSGRK = q_BSHK.unflatten(2, (groups, -1))
    scores_BGRST = torch.einsum("bsgrk,btgk->bgrst", q_BSGRK, k_BTGK) * scope.scale
    scores_BGRST = scores_BGRST.masked_fill(~seen_BST[:, None, None], float("-inf"))
    weights_BGRST = torch.softmax(scores_BGRST, dim=-1)
    return torch.einsum("bgrst,btgv->bsgrv", weights_BGRST, v_BTGV).flatten(2, 3)


class ReferenceAttend(nn.Module):
    """Attention by its definition in the place of a model's own.

    It reads documents from `documents_BS`, the number of each token's document, and ignores the argument.
    """

    def __init__(self) -> None:
        super().__init__()
        self.documents_BS: Tensor | None = None

    def forward(
        self,
        q_BSHK: Tensor,
        k_BSGK: Tensor,
        v_BSGV: Tensor,
        *,
        documents: object,
        positions_BS: Tensor,
        window: int | None,
        scale: float,
    ) -> Tensor:
        """out_BSHV."""
        rows = full_sequence(q_BSHK.shape[1], self.documents_BS)
        return reference_attention(q_BSHK, k_BSGK, v_BSGV, AttentionScope(rows, rows, scale, window))


def use_reference_attention(model: nn.Module) -> None:
    """Replace every `attend` of a model."""
    for module in list(model.modules()):
        if hasattr(module, "attend"):
            module.attend = ReferenceAttend()


def set_documents(model: nn.Module, documents_BS: Tensor | None) -> None:
    """Set the documents of the next forward passes of a model that uses reference attention."""
    for module in model.modules():
        if isinstance(module, ReferenceAttend):
            module.documents_BS = documents_BS
