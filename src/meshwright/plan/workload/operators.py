"""The operators of one micro-batch on one rank: matmul shapes, attention FLOPs, bytes of the cheap rest.

Letters: T tokens of the micro-batch on this rank of cp, h width, t = tp. Sequence parallel divides the
tokens of norms and residuals by t; matmuls see all T tokens and divide a weight dim by t.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np

from meshwright.plan.workload.frameworks import Framework
from meshwright.plan.workload.layouts import Floats, Layouts
from meshwright.plan.workload.schedules import SCHEDULES
from meshwright.plan.workload.workload import Workload
from meshwright.spec.model import LatentSpec, ModelSpec
from meshwright.spec.parallel import ParallelSpec
from meshwright.spec.stages import stage_layers as cut_layers
from meshwright.spec.stages import stages_of_rank

# Bytes moved per element by softmax and dropout of attention that materialises its scores.
CAST_BYTES = 6.0
MOST_VIRTUAL_STAGES = 1 << 16
# Of a weight that is cast once per update: read for its largest value, read again, written twice.
KEPT_CAST_BYTES = 6.0
# Permuting routed tokens there and back, in units of an inner activation's traffic.
DISPATCH_COPIES = 0.8
SCORE_PASSES_FORWARD, SCORE_PASSES_BACKWARD = 9.0, 13.0


@dataclass(frozen=True)
class Matmul:
    """`groups` products (m, k) x (k, n) forward; backward does (m, n) x (n, k) and (k, m) x (m, n)."""

    name: str
    m: Floats
    n: Floats
    k: Floats
    groups: Floats
    narrow: bool = True
    """Runs at the fp8 or fp4 rate of a narrow recipe."""
    part: str = "projection"
    """projection, mlp, experts or head: what recompute policies speak of."""

    @property
    def flops(self) -> Floats:
        """Forward FLOPs; the backward pass does twice as many."""
        return 2.0 * self.m * self.n * self.k * self.groups

    def backward(self) -> tuple["Matmul", "Matmul"]:
        """The input gradient and the weight gradient."""
        data = Matmul(self.name, self.m, self.k, self.n, self.groups, self.narrow, self.part)
        weight = Matmul(self.name, self.k, self.n, self.m, self.groups, self.narrow, self.part)
        return data, weight


def _matmul(name: str, m: Floats, n: object, k: object, **rest: object) -> Matmul:
    one = np.ones_like(m)
    groups = rest.pop("groups", one)
    return Matmul(name, m, np.asarray(n) * one, np.asarray(k) * one, np.asarray(groups) * one, **rest)  # pyright: ignore[reportArgumentType]


def attention_matmuls(work: Workload, at: Layouts) -> list[Matmul]:
    """Query, key, value and output projections of one layer."""
    attention, width = work.model.attention, work.model.width
    tokens = at.microbatch_tokens(work.sequence_length)
    output_width = attention.num_heads * attention.value_width
    output = _matmul("output", tokens, width, output_width / at.tp)
    if attention.latent is not None:
        return [*_latent_matmuls(work, attention.latent, tokens, at), output]
    # A rank keeps at least one key/value head.
    kv_heads = np.maximum(attention.num_kv_heads / at.tp, 1.0)
    projected = (attention.num_heads / at.tp + 2.0 * kv_heads) * attention.head_width
    return [_matmul("qkv", tokens, projected, width), output]


def _latent_matmuls(work: Workload, latent: LatentSpec, tokens: Floats, at: Layouts) -> list[Matmul]:
    attention, width = work.model.attention, work.model.width
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


def mlp_matmuls(work: Workload, at: Layouts) -> list[Matmul]:
    """The dense MLP of one layer; gate and up run as one product."""
    mlp, width = work.model.mlp, work.model.width
    tokens = at.microbatch_tokens(work.sequence_length)
    into = (mlp.num_matrices - 1) * mlp.width / at.tp
    return [
        _matmul("mlp_up", tokens, into, width, part="mlp"),
        _matmul("mlp_down", tokens, width, mlp.width / at.tp, part="mlp"),
    ]


def expert_tokens(work: Workload, at: Layouts) -> Floats:
    """Token copies that the routed experts of one rank process: all ranks share evenly, times imbalance."""
    moe = work.model.moe
    assert moe is not None
    tokens = at.microbatch_tokens(work.sequence_length) * moe.top_k * work.imbalance
    return np.where(at.etp > 1, tokens, tokens / at.tp)


def moe_matmuls(work: Workload, at: Layouts) -> list[Matmul]:
    """Router, routed experts as one grouped product, and the shared expert."""
    moe, width = work.model.moe, work.model.width
    assert moe is not None
    tokens = at.microbatch_tokens(work.sequence_length)
    groups = np.maximum(moe.num_experts / at.ep, 1.0)
    per_expert = expert_tokens(work, at) / groups
    inner = moe.width / at.etp
    routed = [
        _matmul("experts_up", per_expert, 2.0 * inner, width, groups=groups, part="experts"),
        _matmul("experts_down", per_expert, width, inner, groups=groups, part="experts"),
    ]
    router = [_matmul("router", tokens / at.tp, moe.num_experts, width, narrow=False)]
    if not moe.shared_width:
        return router + routed
    shared_up = _matmul("shared_up", tokens, 2.0 * moe.shared_width / at.tp, width, part="mlp")
    shared_down = _matmul("shared_down", tokens, width, moe.shared_width / at.tp, part="mlp")
    return [*router, *routed, shared_up, shared_down]


def head_matmul(work: Workload, at: Layouts) -> Matmul:
    """Logits; kept out of narrow recipes."""
    tokens = at.microbatch_tokens(work.sequence_length)
    return _matmul("head", tokens, work.model.vocab_size / at.tp, work.model.width, narrow=False, part="head")


def attention_core_flops(work: Workload, at: Layouts) -> Floats:
    """Forward FLOPs of query-key and weight-value products of one layer; unfused kernels skip nothing."""
    attention = work.model.attention
    keys = work.keys_seen if work.attention_kernel == "flash" else float(work.sequence_length)
    pair_width = attention.num_heads * (attention.head_width + attention.value_width) / at.tp
    return 2.0 * at.microbatch_tokens(work.sequence_length) * keys * pair_width


def score_elements(work: Workload, at: Layouts) -> Floats:
    """Entries of the score matrices of one layer that an unfused kernel writes and reads."""
    heads = work.model.attention.num_heads / at.tp
    return at.microbatch_tokens(work.sequence_length) * work.sequence_length * heads


def elementwise_bytes(work: Workload, at: Layouts, stack: Framework, *, moe: bool) -> tuple[Floats, Floats]:
    """Bytes that norms, residuals, rotary and activations of one layer move, forward and backward.

    Counted for fused kernels: forward reads and writes 12h + 3(q + kv) + 6f per token in 16 bits,
    backward 20h + 5(q + kv) + 12f.
    """
    model = work.model
    attention = model.attention
    passes = stack.compiled_passes if work.compiled else stack.elementwise_passes
    scale = work.working_bytes / 2.0 * passes
    tokens = at.microbatch_tokens(work.sequence_length)
    residual_tokens = tokens / at.tp if stack.sequence_parallel else tokens
    qkv = attention.num_heads * attention.head_width + 2 * attention.num_kv_heads * attention.head_width
    inner = _inner_elements(work, at, moe=moe)
    dropout = 10.0 if model.dropout > 0 else 0.0
    residual = residual_tokens * model.width
    forward = (12.0 + dropout) * residual + 3.0 * tokens * qkv / at.tp + 6.0 * inner
    backward = (20.0 + dropout) * residual + 5.0 * tokens * qkv / at.tp + 12.0 * inner
    return scale * forward, scale * backward


def _inner_elements(work: Workload, at: Layouts, *, moe: bool) -> Floats:
    """Elements of the MLP's inner activation on this rank; dispatch copies count as two of width h."""
    model = work.model
    tokens = at.microbatch_tokens(work.sequence_length)
    if not moe or model.moe is None:
        gated = 1.0 if model.mlp.num_matrices == 3 else 2.0 / 3.0
        return gated * tokens * model.mlp.width / at.tp
    routed = expert_tokens(work, at)
    return (
        routed * model.moe.width / at.etp
        + tokens * model.moe.shared_width / at.tp
        + DISPATCH_COPIES * routed * model.width
    )


def is_narrow(matmul: Matmul, work: Workload) -> bool:
    """Whether a narrow recipe takes this product."""
    return work.is_narrow and matmul.narrow and (work.narrow_experts or matmul.part != "experts")


def quantise_bytes(
    work: Workload, at: Layouts, stack: Framework, matmuls: list[Matmul]
) -> tuple[Floats, Floats]:
    """Bytes a narrow recipe moves to cast the inputs of its matmuls, forward and backward.

    A cast reads 16 bits twice (maximum, then values) and writes a narrow copy and its transpose. The
    backward pass casts the output gradient; weights are cast for both, or once for all micro-batches.
    """
    zero = np.zeros_like(matmuls[0].m)
    narrow = [matmul for matmul in matmuls if is_narrow(matmul, work)]
    inputs = sum((matmul.groups * matmul.m * matmul.k for matmul in narrow), zero)
    outputs = sum((matmul.groups * matmul.m * matmul.n for matmul in narrow), zero)
    weights = sum((matmul.groups * matmul.k * matmul.n for matmul in narrow), zero)
    kept = KEPT_CAST_BYTES / at.num_microbatches
    each = 0.5 * weights * (kept if work.keeps_narrow_weights else stack.weight_cast_bytes)
    share = work.narrow_layers
    return share * (CAST_BYTES * inputs + each), share * (CAST_BYTES * outputs + each)


@dataclass(frozen=True)
class StageLayers:
    """Layers held by the first, the fullest and the last pipeline rank, and by one chunk."""

    first: Floats
    most: Floats
    last: Floats


def stage_layers(work: Workload, at: Layouts, *, balanced: bool = False) -> StageLayers:
    """An even split; what remains goes to the stages after the first, so that the ends stay light.

    Balanced: the head counts as the layers whose parameters it equals, and the last stage has fewer.
    """
    layers = work.model.num_layers
    base, extra = np.divmod(layers, at.num_stages)
    held = base * at.virtual_stages
    even = StageLayers(
        first=(held + extra // at.pp).astype(np.float64),
        most=(held + -(-extra // at.pp)).astype(np.float64),
        last=(held + np.where(at.pp > 1, (extra + 1) // at.pp, extra)).astype(np.float64),
    )
    if not balanced:
        return even
    counts = work.counts
    per_layer = max(counts.dense_layer, counts.moe_layer, 1)
    most = np.round((layers + (counts.head or counts.embedding) / per_layer) / at.pp)
    last = np.maximum(layers - most * (at.pp - 1), 0.0)
    alone = at.pp == 1
    return StageLayers(
        first=np.where(alone, even.first, most),
        most=np.where(alone, even.most, most),
        last=np.where(alone, even.last, last),
    )


def runtime_stage_layers(work: Workload, at: Layouts) -> StageLayers:
    """As our runtime cuts: the slowest stage is as fast as can be, with the head on the last."""
    kinds = len(SCHEDULES)
    keys = (at.pp * MOST_VIRTUAL_STAGES + at.virtual_stages) * kinds + at.schedule
    unique, position = np.unique(keys, return_inverse=True)
    parts = [(*divmod(int(key) // kinds, MOST_VIRTUAL_STAGES), int(key) % kinds) for key in unique]
    held = np.array([_held_layers(work.model, *part) for part in parts]).reshape(-1, 3)[position]  # pyright: ignore[reportArgumentType]  (frozen: it has a hash)
    # What has more stages than layers is refused elsewhere, and priced here as if it were cut evenly.
    can, even = at.num_stages <= work.model.num_layers, stage_layers(work, at)
    first, most, last = held.T
    return StageLayers(
        first=np.where(can, first, even.first),
        most=np.where(can, most, even.most),
        last=np.where(can, last, even.last),
    )


@cache
def _held_layers(model: ModelSpec, pp: int, virtual_stages: int, schedule: int) -> tuple[float, float, float]:
    """Layers of the first rank of a pipeline, of the fullest between, and of the last."""
    num_stages = pp * virtual_stages
    if num_stages > model.num_layers:
        return (0.0, 0.0, 0.0)
    sizes = [len(stage) for stage in cut_layers(model, num_stages)]
    parallel = ParallelSpec(pp=pp, schedule=SCHEDULES[schedule], virtual_stages=virtual_stages)  # pyright: ignore[reportArgumentType]
    ranks = [float(sum(sizes[stage] for stage in stages_of_rank(parallel, rank))) for rank in range(pp)]
    return ranks[0], max(ranks[1:-1], default=ranks[0]), ranks[-1]
