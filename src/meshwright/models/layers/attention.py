"""Multi-head attention; MHA, GQA and MQA differ only in the number of key/value heads."""

from torch import Tensor, nn

from meshwright.models.layers.attend import Attend
from meshwright.models.layers.linear import Linear, QkvProjections
from meshwright.models.layers.norm import RMSNorm
from meshwright.models.layers.rope import RopeTables, apply_rope
from meshwright.ops.documents import Documents
from meshwright.spec import ModelSpec


class Attention(nn.Module):
    """QKV projections, optional QK-norm and RoPE, attention, output projection.

    Head counts follow from the local weights, which under tp hold a part of the heads.
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
        self.qkv: nn.Module = QkvProjections()
        self.query_norm = RMSNorm(self.head_width, spec.norm_eps) if attention.qk_norm else None
        self.key_norm = RMSNorm(self.head_width, spec.norm_eps) if attention.qk_norm else None
        self.attend = Attend(dropout=attention.dropout)
        self.output = Linear(query_width, spec.width, bias=attention.output_bias)

    def forward(
        self,
        x_BSD: Tensor,
        *,
        rope: RopeTables | None,
        positions_BS: Tensor,
        documents: Documents | None,
        dropout_keys_BS: Tensor | None = None,
    ) -> Tensor:
        """The output of attention, before the residual add."""
        q_BSHK, k_BSGK, v_BSGK = (
            heads.unflatten(-1, (-1, self.head_width))
            for heads in self.qkv(x_BSD, (self.query, self.key, self.value), dropout_keys_BS)
        )
        if self.query_norm is not None and self.key_norm is not None:
            q_BSHK, k_BSGK = self.query_norm(q_BSHK), self.key_norm(k_BSGK)
        if rope is not None:
            q_BSHK, k_BSGK = apply_rope(q_BSHK, rope), apply_rope(k_BSGK, rope)
        out_BSHK = self.attend(
            q_BSHK,
            k_BSGK,
            v_BSGK,
            documents=documents,
            positions_BS=positions_BS,
            window=self.window,
            scale=self.head_width**-0.5,
        )
        return self.output(out_BSHK.flatten(-2), dropout_keys_BS)
