"""Scaled dot-product attention without parameters; context parallel replaces it."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.hardware.simulated_device import SimulatedDevice, kernel_device
from meshwright.ops.documents import Documents, document_ids, one_document_each, self_segments
from meshwright.ops.varlen_attention import attend_segments, has_varlen
from meshwright.ops.window_attention import attend_window, has_window_kernel


class Attend(nn.Module):
    """Causal attention over full sequences, separate for each document (document masking, varlen).

    joined documents, no window    torch's SDPA, causal
    separate documents             ops/varlen_attention, with or without a window
    window, joined documents       ops/window_attention if compiled, else ops/varlen_attention
    the same on a CPU              torch's SDPA with a mask
    attention dropout, fp32 CUDA   torch's SDPA with a mask
    """

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
        documents: Documents | None,
        positions_BS: Tensor | None,
        window: int | None,
        scale: float,
    ) -> Tensor:
        """out_BSHK. Positions are ignored: the order in memory is the order of the sequence."""
        del positions_BS
        num_sequences, num_positions = q_BSHK.shape[:2]
        window = None if window is not None and window >= num_positions else window
        dropout = self.dropout if self.training else 0.0
        heads = (q_BSHK, k_BSGK, v_BSGK)
        if not dropout and (documents is not None or window is not None):
            out_BSHK = self._without_mask(*heads, documents, window, scale)
            if out_BSHK is not None:
                return out_BSHK
        mask = None
        if documents is not None or window is not None:
            ids_BS = None if documents is None else document_ids(documents, num_sequences, num_positions)
            mask = causal_mask(num_positions, ids_BS, window, q_BSHK.device)
        out_BHSK = functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in heads),
            attn_mask=mask,
            is_causal=mask is None,
            dropout_p=dropout,
            scale=scale,
            enable_gqa=q_BSHK.shape[2] != k_BSGK.shape[2],
        )
        return out_BHSK.transpose(1, 2)

    def _without_mask(
        self,
        q_BSHK: Tensor,
        k_BSGK: Tensor,
        v_BSGK: Tensor,
        documents: Documents | None,
        window: int | None,
        scale: float,
    ) -> Tensor | None:
        """Documents and windows on kernels of their own; None where there is none for these tensors."""
        if documents is None and window is not None:
            if kernel_device(q_BSHK.device.type, self.simulated) == "cpu":
                return None
            if has_window_kernel(q_BSHK, v_BSGK, window, self.simulated):
                return attend_window(
                    q_BSHK, k_BSGK, v_BSGK, window=window, scale=scale, simulated=self.simulated
                )
            documents = one_document_each(q_BSHK.shape[0], q_BSHK.shape[1], q_BSHK.device)
        if documents is None or not has_varlen(q_BSHK, v_BSGK, self.simulated):
            return None
        return attend_segments(q_BSHK, k_BSGK, v_BSGK, self_segments(documents, window), scale=scale)


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
