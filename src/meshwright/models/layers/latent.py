"""Multi-head latent attention (MLA, DeepSeek): keys and values are projected up from one latent per token."""

import torch
from torch import Tensor, nn

from meshwright.models.layers.attend import Attend
from meshwright.models.layers.linear import Linear
from meshwright.models.layers.norm import RMSNorm
from meshwright.models.layers.rope import RopeTables, apply_rope, softmax_temperature
from meshwright.ops.documents import Documents
from meshwright.spec import ModelSpec

# DeepSeek's inner norms keep this value whatever the eps of the residual norms is.
LATENT_NORM_EPS = 1e-6


class LatentAttention(nn.Module):
    """Latent attention: queries and keys are (nope | rope) parts, and all heads share the rotary key."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        attention, latent = spec.attention, spec.attention.latent
        assert latent is not None
        self.latent = latent
        self.window = attention.window
        self.query_width = latent.nope_width + latent.rope_width
        self.scale = self.query_width**-0.5 * softmax_temperature(spec.rope)
        all_queries = attention.num_heads * self.query_width
        if latent.query_rank is None:
            self.query = Linear(spec.width, all_queries)
        else:
            self.query_down = Linear(spec.width, latent.query_rank)
            self.query_norm = RMSNorm(latent.query_rank, LATENT_NORM_EPS)
            self.query_up = Linear(latent.query_rank, all_queries)
        self.kv_down = Linear(spec.width, latent.kv_rank + latent.rope_width)
        self.kv_norm = RMSNorm(latent.kv_rank, LATENT_NORM_EPS)
        self.kv_up = Linear(latent.kv_rank, attention.num_heads * (latent.nope_width + latent.value_width))
        self.attend = Attend(dropout=attention.dropout)
        self.output = Linear(attention.num_heads * latent.value_width, spec.width, bias=attention.output_bias)

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
        assert rope is not None
        k_BSHK, v_BSHK = self._keys_and_values(x_BSD, rope, dropout_keys_BS)
        out_BSHK = self.attend(
            self._queries(x_BSD, rope, dropout_keys_BS),
            k_BSHK,
            v_BSHK,
            documents=documents,
            positions_BS=positions_BS,
            window=self.window,
            scale=self.scale,
        )
        return self.output(out_BSHK.flatten(-2), dropout_keys_BS)

    def _queries(self, x_BSD: Tensor, rope: RopeTables, dropout_keys_BS: Tensor | None) -> Tensor:
        if self.latent.query_rank is None:
            flat = self.query(x_BSD, dropout_keys_BS)
        else:
            # No name for the latent: recompute does not save it, and a name would keep it to the end.
            flat = self.query_up(self.query_norm(self.query_down(x_BSD, dropout_keys_BS)), dropout_keys_BS)
        q_BSHK = flat.unflatten(-1, (-1, self.query_width))
        nope_BSHK, rope_BSHK = q_BSHK.split((self.latent.nope_width, self.latent.rope_width), dim=-1)
        return torch.cat((nope_BSHK, apply_rope(rope_BSHK, rope)), dim=-1)

    def _keys_and_values(
        self, x_BSD: Tensor, rope: RopeTables, dropout_keys_BS: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        latent = self.latent
        down_BSK = self.kv_down(x_BSD, dropout_keys_BS)
        latent_BSK, rope_BSK = down_BSK.split((latent.kv_rank, latent.rope_width), dim=-1)
        kv_BSHK = self.kv_up(self.kv_norm(latent_BSK), dropout_keys_BS).unflatten(
            -1, (-1, latent.nope_width + latent.value_width)
        )
        nope_BSHK, v_BSHK = kv_BSHK.split((latent.nope_width, latent.value_width), dim=-1)
        rope_BSHK = apply_rope(rope_BSK[:, :, None], rope).expand(-1, -1, nope_BSHK.shape[2], -1)
        return torch.cat((nope_BSHK, rope_BSHK), dim=-1), v_BSHK
