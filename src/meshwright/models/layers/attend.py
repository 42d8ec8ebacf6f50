"""Scaled dot-product attention without parameters; context parallel replaces it."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.hardware.simulated_device import SimulatedDevice


class Attend(nn.Module):
    """Causal attention over full sequences, separate for each document (document masking, varlen)."""

    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        # Set in a rehearsal; context parallel passes it on to the attention that replaces this one.
        self.simulated: SimulatedDevice | None = None

    def forward(
        self,
        q_BSHK: Tensor,
        k_BSGK: Tensor,
        v_BSGK: Tensor,
        *,
        documents_BS: Tensor | None,
        positions_BS: Tensor,
        window: int | None,
        scale: float,
    ) -> Tensor:
        """out_BSHK. Positions are ignored: the order in memory is the order of the sequence."""
        del positions_BS
        num_positions = q_BSHK.shape[1]
        masked = documents_BS is not None or (window is not None and window < num_positions)
        mask = causal_mask(num_positions, documents_BS, window, q_BSHK.device) if masked else None
        out_BHSK = functional.scaled_dot_product_attention(
            q_BSHK.transpose(1, 2),
            k_BSGK.transpose(1, 2),
            v_BSGK.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            dropout_p=self.dropout if self.training else 0.0,
            scale=scale,
            enable_gqa=q_BSHK.shape[2] != k_BSGK.shape[2],
        )
        return out_BHSK.transpose(1, 2)


def causal_mask(
    num_positions: int, documents_BS: Tensor | None, window: int | None, device: torch.device
) -> Tensor:
    """True where query i sees key j: j <= i, i - j < window, same document. (1 or B, 1, S, S)."""
    index_S = torch.arange(num_positions, device=device)
    distance_SS = index_S[:, None] - index_S[None, :]
    seen = (distance_SS >= 0)[None, None]
    if window is not None:
        seen = seen & (distance_SS < window)
    if documents_BS is not None:
        seen = seen & (documents_BS[:, None, :, None] == documents_BS[:, None, None, :])
    return seen
