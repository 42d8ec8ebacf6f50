"""Multi-head attention; MHA, GQA and MQA differ only in the number of key/value heads."""

from torch import Tensor, nn

from meshwright.models.layers.attend import Attend
from meshwright.models.layers.linear import Linear, Projections
from meshwright.models.layers.norm import RMSNorm
from meshwright.models.layers.rope import Rotation, rotate
from meshwright.spec import ModelSpec


class Attention(nn.Module):
    """Projections to heads, optional QK-norm and rotation, attention, projection back.

    Head counts are read off the weights at hand, which may be a rank's part of the heads.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        attention = spec.attention
        self.head_width = attention.head_width
        self.window = attention.window
        query_width = attention.num_heads * attention.head_width
        kv_width = attention.num_kv_heads * attention.head_width
        self.query = Linear(spec.width, query_width, bias=attention.qkv_bias)
        self.key = Linear(spec.width, kv_width, bias=attention.qkv_bias)
        self.value = Linear(spec.width, kv_width, bias=attention.qkv_bias)
        self.project: nn.Module = Projections()
        self.query_norm = RMSNorm(self.head_width, spec.norm_eps) if attention.qk_norm else None
        self.key_norm = RMSNorm(self.head_width, spec.norm_eps) if attention.qk_norm else None
        self.attend = Attend(dropout=attention.dropout)
        self.output = Linear(query_width, spec.width, bias=attention.output_bias)

    def forward(
        self, x_BSD: Tensor, *, turn: Rotation | None, positions_BS: Tensor, documents_BS: Tensor | None
    ) -> Tensor:
        """What attention adds to the residual stream."""
        q_BSHK, k_BSGK, v_BSGK = (
            heads.unflatten(-1, (-1, self.head_width))
            for heads in self.project(x_BSD, (self.query, self.key, self.value))
        )
        if self.query_norm is not None and self.key_norm is not None:
            q_BSHK, k_BSGK = self.query_norm(q_BSHK), self.key_norm(k_BSGK)
        if turn is not None:
            q_BSHK, k_BSGK = rotate(q_BSHK, turn), rotate(k_BSGK, turn)
        out_BSHK = self.attend(
            q_BSHK,
            k_BSGK,
            v_BSGK,
            documents_BS=documents_BS,
            positions_BS=positions_BS,
            window=self.window,
            scale=self.head_width**-0.5,
        )
        return self.output(out_BSHK.flatten(-2))
