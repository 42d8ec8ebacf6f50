"""The operators of one micro-batch on one rank: matmul shapes, attention FLOPs, bytes of the cheap rest.

Letters: T tokens of the micro-batch on this rank of cp, h width, t = tp. Sequence parallel divides the
tokens of norms and residuals by t; matmuls see all T tokens and a weight that is sharded over t.
"""

from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from meshwright.plan.workload.layouts import Floats, Layouts
from meshwright.plan.workload.schedules import SCHEDULES
from meshwright.plan.workload.workload import Workload
from meshwright.spec.model import LatentSpec, ModelSpec
from meshwright.spec.parallel import ParallelSpec
from meshwright.spec.stages import stage_layers as runtime_stages
from meshwright.spec.stages import stages_of_rank

# Bytes moved per element of a matmul's input or output gradient to cast it to fp8: read twice in 16 bits
# (amax, then values), written once and once transposed in 8.
CAST_BYTES = 6.0
# The same for rows of experts with scales of their own. Reading in 16 bits and writing in 8 would be 3; the
# time that fp8 experts were measured to take on one H200 (docs/decisions/2026-11-16-fp8-experts.md) is that
# of six times as much, which includes what grouped fp8 kernels are slower than their rate.
ROW_CAST_BYTES = 18.0
# The same per weight that is cast once per update.
KEPT_CAST_BYTES = 6.0
# The same per weight that is stored in fp8 and transposed for one pass.
TRANSPOSE_BYTES = 2.0
# Permuting routed tokens to their experts and back, in units of an inner activation's traffic.
DISPATCH_COPIES = 0.8
MOST_VIRTUAL_STAGES = 1 << 16


@dataclass(frozen=True)
class Matmul:
    """`groups` matmuls (m, k) x (k, n) forward; backward does (m, n) x (n, k) and (k, m) x (m, n)."""

    name: str
    m: Floats
    n: Floats
    k: Floats
    groups: Floats
    low_precision: bool = True
    """Runs at the fp8 or fp4 rate of a low-precision recipe."""
    part: str = "projection"
    """projection, mlp, experts or head: the parts that a recompute policy names."""
    sums_tokens: bool = False
    """k is the tokens: the weight gradient. Else m is."""

    @property
    def flops(self) -> Floats:
        """Forward FLOPs; the backward pass does twice as many."""
        return 2.0 * self.m * self.n * self.k * self.groups

    def backward(self) -> tuple["Matmul", "Matmul"]:
        """The input gradient and the weight gradient."""
        data = replace(self, n=self.k, k=self.n)
        return data, replace(self, m=self.k, n=self.n, k=self.m, sums_tokens=True)


def _matmul(name: str, m: Floats, n: object, k: object, **rest: object) -> Matmul:
    one = np.ones_like(m)
    groups = rest.pop("groups", one)
    return Matmul(name, m, np.asarray(n) * one, np.asarray(k) * one, np.asarray(groups) * one, **rest)  # pyright: ignore[reportArgumentType]


def attention_matmuls(workload: Workload, at: Layouts) -> list[Matmul]:
    """Query, key, value and output projections of one layer."""
    attention, width = workload.model.attention, workload.model.width
    tokens = at.microbatch_tokens(workload.sequence_length)
    output_width = attention.num_heads * attention.value_width
    output = _matmul("output", tokens, width, output_width / at.tp)
    if attention.latent is not None:
        return [*_latent_matmuls(workload, attention.latent, tokens, at), output]
    # A rank has at least one key/value head.
    kv_heads = np.maximum(attention.num_kv_heads / at.tp, 1.0)
    projected = (attention.num_heads / at.tp + 2.0 * kv_heads) * attention.head_width
    return [_matmul("qkv", tokens, projected, width), output]


def _latent_matmuls(workload: Workload, latent: LatentSpec, tokens: Floats, at: Layouts) -> list[Matmul]:
    attention, width = workload.model.attention, workload.model.width
    query_width = attention.num_heads * attention.head_width / at.tp
    kv_width = attention.num_heads * (latent.nope_width + latent.value_width) / at.tp
    query = [_matmul("query", tokens, query_width, width)]
    if latent.query_rank is not None:
        query = [
            _matmul("query_down", tokens / at.tp, latent.query_rank, width),
            _matmul("query_up", tokens, query_width, latent.query_rank),
        ]
    down = _matmul("kv_down", tokens / at.tp, latent.kv_rank + latent.rope_width, width)
    return [*query, down, _matmul("kv_up", tokens, kv_width, latent.kv_rank)]


def mlp_matmuls(workload: Workload, at: Layouts) -> list[Matmul]:
    """The dense MLP of one layer; gate and up run as one fused projection."""
    mlp, width = workload.model.mlp, workload.model.width
    tokens = at.microbatch_tokens(workload.sequence_length)
    into = (mlp.num_matrices - 1) * mlp.width / at.tp
    return [
        _matmul("mlp_up", tokens, into, width, part="mlp"),
        _matmul("mlp_down", tokens, width, mlp.width / at.tp, part="mlp"),
    ]


def expert_tokens(workload: Workload, at: Layouts) -> Floats:
    """Token copies that the routed experts of one rank process, routed evenly over all ranks."""
    moe = workload.model.moe
    assert moe is not None
    tokens = at.microbatch_tokens(workload.sequence_length) * moe.top_k
    return np.where(at.etp > 1, tokens, tokens / at.tp)


def moe_matmuls(workload: Workload, at: Layouts) -> list[Matmul]:
    """Router, routed experts as one grouped matmul for each of their passes, and the shared expert."""
    moe, width = workload.model.moe, workload.model.width
    assert moe is not None
    tokens = at.microbatch_tokens(workload.sequence_length)
    groups = np.maximum(moe.num_experts / at.ep, 1.0) * at.expert_passes
    per_expert = expert_tokens(workload, at) / groups
    inner = moe.width / at.etp
    routed = [
        _matmul("experts_up", per_expert, 2.0 * inner, width, groups=groups, part="experts"),
        _matmul("experts_down", per_expert, width, inner, groups=groups, part="experts"),
    ]
    router = [_matmul("router", tokens / at.tp, moe.num_experts, width, low_precision=False)]
    if not moe.shared_width:
        return router + routed
    shared_up = _matmul("shared_up", tokens, 2.0 * moe.shared_width / at.tp, width, part="mlp")
    shared_down = _matmul("shared_down", tokens, width, moe.shared_width / at.tp, part="mlp")
    return [*router, *routed, shared_up, shared_down]


def head_matmul(workload: Workload, at: Layouts, vocabulary: Floats) -> Matmul:
    """The logits of so many rows of the head; fp8 and fp4 recipes leave them in the activation precision."""
    tokens = at.microbatch_tokens(workload.sequence_length)
    return _matmul(
        "head",
        tokens,
        vocabulary,
        workload.model.width,
        low_precision=False,
        part="head",
    )


def attention_core_flops(workload: Workload, at: Layouts) -> Floats:
    """Forward FLOPs of the query-key and score-value matmuls of one layer; masked blocks are skipped."""
    attention = workload.model.attention
    pair_width = attention.num_heads * (attention.head_width + attention.value_width) / at.tp
    return 2.0 * at.microbatch_tokens(workload.sequence_length) * workload.keys_seen * pair_width


def score_elements(workload: Workload, at: Layouts) -> Floats:
    """Entries of the score matrices of one layer, which an unfused kernel writes and reads."""
    heads = workload.model.attention.num_heads / at.tp
    return at.microbatch_tokens(workload.sequence_length) * workload.sequence_length * heads


def elementwise_bytes(
    workload: Workload, at: Layouts, *, moe: bool, passes: Floats | float, residual_tokens: Floats
) -> tuple[Floats, Floats]:
    """Bytes that norms, residuals, rotary and activations of one layer move, forward and backward.

    Fully fused kernels (`passes` = 1) read and write 12h + 3(q + kv) + 6f per token in 16 bits forward, and
    20h + 5(q + kv) + 12f backward. `residual_tokens` are those whose norms and residuals this rank computes.
    """
    model = workload.model
    attention = model.attention
    scale = workload.working_bytes / 2.0 * passes
    tokens = at.microbatch_tokens(workload.sequence_length)
    qkv = attention.num_heads * attention.head_width + 2 * attention.num_kv_heads * attention.head_width
    inner = _inner_elements(workload, at, moe=moe)
    dropout = 10.0 if model.dropout > 0 else 0.0
    residual = residual_tokens * model.width
    forward = (12.0 + dropout) * residual + 3.0 * tokens * qkv / at.tp + 6.0 * inner
    backward = (20.0 + dropout) * residual + 5.0 * tokens * qkv / at.tp + 12.0 * inner
    return scale * forward, scale * backward


def _inner_elements(workload: Workload, at: Layouts, *, moe: bool) -> Floats:
    """Elements of the MLP's inner activation on this rank; dispatch copies count as two of width h."""
    model = workload.model
    tokens = at.microbatch_tokens(workload.sequence_length)
    if not moe or model.moe is None:
        gated = 1.0 if model.mlp.num_matrices == 3 else 2.0 / 3.0
        return gated * tokens * model.mlp.width / at.tp
    routed = expert_tokens(workload, at)
    return (
        routed * model.moe.width / at.etp
        + tokens * model.moe.shared_width / at.tp
        + DISPATCH_COPIES * routed * model.width
    )


def runs_in_low_precision(matmul: Matmul, workload: Workload) -> bool:
    """Whether this matmul runs in fp8 or fp4."""
    stays_bf16 = not workload.low_precision_experts or (matmul.sums_tokens and workload.bf16_expert_gradients)
    excluded = matmul.part == "experts" and stays_bf16
    return workload.is_low_precision and matmul.low_precision and not excluded


def quantise_bytes(
    workload: Workload, at: Layouts, matmuls: list[Matmul], *, weight_cast_bytes: float
) -> tuple[Floats, Floats]:
    """Bytes moved to cast the operands of fp8 and fp4 matmuls, forward and backward.

    The forward pass casts inputs, the backward pass output gradients. Weights are cast for both in every
    micro-batch (`weight_cast_bytes` each), or once for all micro-batches of a step; a frozen base that is
    stored in fp8 is only transposed in backward.
    """
    zero = np.zeros_like(matmuls[0].m)
    cast = [matmul for matmul in matmuls if runs_in_low_precision(matmul, workload)]
    inputs = sum((_cast_bytes(matmul, workload) * matmul.m * matmul.k for matmul in cast), zero)
    outputs = sum((_cast_bytes(matmul, workload) * matmul.m * matmul.n for matmul in cast), zero)
    weights = sum((matmul.groups * matmul.k * matmul.n for matmul in cast), zero)
    per_step = KEPT_CAST_BYTES / at.num_microbatches
    each = 0.5 * weights * (per_step if workload.keeps_low_precision_weights else weight_cast_bytes)
    if workload.adapters is not None and workload.adapters.base_bits < 16:
        each = 0.5 * weights * TRANSPOSE_BYTES
    share = workload.low_precision_layers
    return share * (inputs + each), share * (outputs + each)


def _cast_bytes(matmul: Matmul, workload: Workload) -> Floats:
    """Bytes moved to cast one element of all groups."""
    is_by_row = matmul.part == "experts" and workload.bf16_expert_gradients
    return matmul.groups * (ROW_CAST_BYTES if is_by_row else CAST_BYTES)


@dataclass(frozen=True)
class StageLayers:
    """Layers of the first pipeline rank, of the one with most layers, and of the last."""

    first: Floats
    most: Floats
    last: Floats
    last_stage: Floats
    """Layers of the model's last stage: of one of the stages of the last rank, or of the first in a V."""


def stage_layers(workload: Workload, at: Layouts, *, balanced: bool = False) -> StageLayers:
    """An even split; the remainder goes to the stages after the first, so that both ends have fewer layers.

    Balanced: the head counts as the layers whose parameters it equals, and the last stage has fewer.
    """
    layers = workload.model.num_layers
    base, extra = np.divmod(layers, at.num_stages)
    base = base * at.virtual_stages
    even = StageLayers(
        first=(base + extra // at.pp).astype(np.float64),
        most=(base + -(-extra // at.pp)).astype(np.float64),
        last=(base + np.where(at.pp > 1, (extra + 1) // at.pp, extra)).astype(np.float64),
        last_stage=layers / at.num_stages,
    )
    if not balanced:
        return even
    counts = workload.counts
    per_layer = max(counts.dense_layer, counts.moe_layer, 1)
    most = np.round((layers + (counts.head or counts.embedding) / per_layer) / at.pp)
    last = np.maximum(layers - most * (at.pp - 1), 0.0)
    alone = at.pp == 1
    return StageLayers(
        first=np.where(alone, even.first, most),
        most=np.where(alone, even.most, most),
        last=np.where(alone, even.last, last),
        last_stage=np.where(alone, even.last, last / at.virtual_stages),
    )


def runtime_stage_layers(workload: Workload, at: Layouts) -> StageLayers:
    """The split of our runtime: the slowest stage is as fast as possible, with the head on the last."""
    kinds = len(SCHEDULES)
    keys = (at.pp * MOST_VIRTUAL_STAGES + at.virtual_stages) * kinds + at.schedule
    unique, position = np.unique(keys, return_inverse=True)
    parts = [(*divmod(int(key) // kinds, MOST_VIRTUAL_STAGES), int(key) % kinds) for key in unique]
    counts = np.array([_rank_layers(workload.model, *part) for part in parts])  # pyright: ignore[reportArgumentType]  (frozen: it has a hash)
    first, most, last, last_stage = counts.reshape(-1, 4)[position].T
    # A layout with more stages than layers is refused elsewhere, and priced here as an even split.
    is_possible, even = at.num_stages <= workload.model.num_layers, stage_layers(workload, at)
    return StageLayers(
        first=np.where(is_possible, first, even.first),
        most=np.where(is_possible, most, even.most),
        last=np.where(is_possible, last, even.last),
        last_stage=np.where(is_possible, last_stage, even.last_stage),
    )


@cache
def _rank_layers(model: ModelSpec, pp: int, virtual_stages: int, schedule: int) -> tuple[float, ...]:
    """Layers of the first pipeline rank, of the one with most between, of the last, and of the last stage."""
    num_stages = pp * virtual_stages
    if num_stages > model.num_layers:
        return (0.0, 0.0, 0.0, 0.0)
    sizes = [len(stage) for stage in runtime_stages(model, num_stages)]
    parallel = ParallelSpec(pp=pp, schedule=SCHEDULES[schedule], virtual_stages=virtual_stages)  # pyright: ignore[reportArgumentType]
    ranks = [float(sum(sizes[stage] for stage in stages_of_rank(parallel, rank))) for rank in range(pp)]
    return ranks[0], max(ranks[1:-1], default=ranks[0]), ranks[-1], float(sizes[-1])
