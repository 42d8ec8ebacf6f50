"""What a training framework does that its memory and its step time depend on.

The defaults of `Framework` describe our own runtime. Other frameworks, against whose published runs the
predictions are checked, are described in `meshwright.published`: with other values, and with a subclass that
overrides the methods below.
"""

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources

import numpy as np

from meshwright.hardware.catalogue import Cluster, Device
from meshwright.plan.memory import activations
from meshwright.plan.time.attention import runtime_attention_seconds
from meshwright.plan.time.collectives import Group, gather_seconds
from meshwright.plan.workload.layouts import CP_KINDS, RECOMPUTE_SELECTIVE, Floats, Ints, Layouts
from meshwright.plan.workload.operators import StageLayers, runtime_stage_layers
from meshwright.plan.workload.workload import Workload
from meshwright.spec.model import MoeSpec

_RINGS = [CP_KINDS.index("ring"), CP_KINDS.index("hierarchical")]
HEAD_GRADIENT_BYTES = 4.0
"""The gradient of the head is summed over chunks of logits in fp32, beside the head in bf16."""


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter on the device, without the optimizer's moments."""

    weight: float = 4.0
    """Bytes of the weight that forward and backward read."""
    gradient: float = 4.0
    master: float = 0.0
    """Bytes of an fp32 master copy, or of the lower bits of a bf16 weight; 0 where there is neither."""
    gather: float = 2.0
    """Bytes per element of an all-gathered weight."""
    reduce: float = 4.0
    """Bytes per element of a reduced gradient."""
    update: float = 18.0
    """Bytes of weights and gradients that a fused update reads and writes, clipping included."""


@dataclass(frozen=True)
class Interval:
    """Relative half-width of the 90% interval of a step time, by the kind of run (plan/time/interval.py).

    The widths of kinds are those of nine of ten published times whose source was left out of the fit.
    """

    dense_one_node: float = 0.2
    dense_several_nodes: float = 0.2
    fp8: float = 0.2
    blackwell: float = 0.2
    moe: float = 0.4
    measured: float | None = None
    """That of dense models on one device, where the framework itself was measured."""


@dataclass(frozen=True)
class Framework:
    """One training framework; the defaults are our own runtime."""

    name: str = "meshwright"
    state: StateBytes = StateBytes()

    # Step time: communication
    dp_overlap: float = 0.9
    """Share of the gradient (and parameter) traffic that may overlap with the last backward pass."""
    fsdp_overlap: float = 0.9
    tp_overlap: float = 0.0
    pp_overlap: float = 0.0
    ep_overlap: float = 0.0
    """Share of the all-to-alls of routed tokens that may overlap with compute."""
    bucket_bytes: float = 100e6
    """Bytes of a gradient bucket: a group pays its latency once for each."""
    adapters_per_group: float = 8.0
    """Network adapters of a node that the all-gathers of one group use."""
    gathers_by_tree: bool = True
    """All-gathers and reduce-scatters with one rank per node take log n hops (NCCL from 2.23 on)."""
    scatters_in_pipelines: bool = True
    """ZeRO-2 and 3 may reduce-scatter gradients after every micro-batch in a pipeline too."""
    selective_regathers: float = 0.5
    """Share of a layer's tp gathers that selective recompute repeats: inputs of column-parallel linears."""

    # Step time: kernels. Measured on one H200: bench/results/runtime_h200_2026-11-15.json and
    # bench/results/formats_h200_2026-11-15.json.
    elementwise_passes: float = 3.8
    """Memory traffic of uncompiled element-wise kernels over that of fully fused ones."""
    compiled_passes: float = 1.5
    """Memory traffic of element-wise kernels in blocks that torch.compile fused, over fully fused ones."""
    grouped_rate: float = 0.9
    """Rate of grouped matmuls (routed experts) against a single one of the same shape."""
    padded_vocabulary: int = 64
    """The head pads its vocabulary on a rank to a multiple of this (ops/loss.py)."""
    pads_at_run_time: bool = True
    """The padding is a copy of the head's weight in every micro-batch; else the weight is made padded."""
    logits_traffic: float = 6.0
    """Bytes moved per logit by the loss: written once, read twice (the second time mostly from the cache)."""
    recomputed_last_matmul: float = 0.0
    """Share of a dense block's last matmul that full recompute runs: its output is read by no backward."""
    weight_cast_bytes: float = 10.0
    """Bytes moved per weight and micro-batch to cast it to fp8 (amax, cast, transpose) for both passes."""
    low_precision_slowdown: float = 1.13
    """Time of fp8 and fp4 matmuls over the shape model's."""
    launches_per_layer: float = 60.0
    """Kernels that the host launches for the forward pass of one dense layer."""
    launches_per_routed_layer: float = 150.0
    launches_of_latent_attention: float = 0.0
    """Further kernels of a layer with latent attention (MLA)."""
    routed_slowdown: float = 1.0
    """Time of a routed layer on the device, its communication included, over the model's."""
    kernel_slowdown: float = 1.0
    """Compute time over the shape model's; fitted (calibration.toml)."""
    exposed_communication: float = 1.0
    """Exposed communication time over the link model's; fitted (calibration.toml)."""
    interval: Interval = Interval()

    # Memory
    loss_chunk_bytes: float = 2.0**30
    """Most bytes of logits alive at once (ops/loss.py), beside the gradient of the head in fp32."""
    frozen_loss_chunk_bytes: float = 2.0**28
    """The same where the head is frozen and has no gradient."""

    @property
    def is_traced(self) -> bool:
        """Whether the trace's table has its blocks: ours alone."""
        return True

    def kept_parts(self, workload: Workload, at: Layouts, *, moe: bool) -> activations.Items:
        """What the backward pass of one layer needs, by the part that a recompute policy may drop."""
        return activations.kept_parts(workload, at, moe=moe)

    def layer_activation_bytes(self, workload: Workload, at: Layouts, *, moe: bool) -> Floats:
        """Bytes one layer keeps of one micro-batch for its backward pass, after recompute."""
        return activations.layer_activation_bytes(workload, at, moe=moe)

    def cast_weight_bytes(self, workload: Workload) -> float:
        """Bytes per weight of the working-precision copy that autocast keeps until the backward pass."""
        is_cast = workload.working_bytes < self.state.weight and workload.adapters is None
        return workload.working_bytes if is_cast else 0.0

    def logit_bytes(self, workload: Workload, at: Layouts) -> Floats:
        """Logits and what the loss makes of them, at its peak: a chunk, and the gradient of the head."""
        vocabulary = workload.model.vocab_size / at.tp
        full = workload.working_bytes * at.microbatch_tokens(workload.sequence_length) * vocabulary
        each, chunk = HEAD_GRADIENT_BYTES + workload.working_bytes, self.loss_chunk_bytes
        if workload.adapters is not None and not workload.adapters.trains_head:
            # A frozen head has no gradient, and in 16 bits no cast copy.
            each = workload.working_bytes if workload.adapters.has_fp32_tables else 0.0
            chunk = self.frozen_loss_chunk_bytes
        return np.minimum(full, chunk) + each * vocabulary * workload.model.width

    def gradients_at_the_peak(self, at: Layouts, items: activations.Items) -> Floats:
        """Gradients that exist beside the activations: all of them once a second micro-batch runs.

        Without accumulation a gradient takes the place of freed activations.
        """
        once = ((at.num_microbatches == 1) & (at.pp == 1))[:, None]
        freed = items["activations"] + items["logits"]
        return np.where(once, np.maximum(items["gradients"] - freed, 0.0), items["gradients"])

    def stage_layers(self, workload: Workload, at: Layouts) -> StageLayers:
        """Layers of the pipeline's ranks, by spec/stages.py."""
        return runtime_stage_layers(workload, at)

    def expert_shards(self, at: Layouts) -> Floats:
        """Ranks that share one copy of the state of an expert: data ranks alone, not those of tp."""
        return np.maximum(at.dp_shard * at.cp / at.ep, 1.0)

    def expert_share(self, workload: Workload, at: Layouts) -> Floats:
        """Part of the state of its experts that the fullest of these ranks holds: full experts."""
        shards, moe = self.expert_shards(at), workload.model.moe
        if moe is None:
            return 1.0 / shards
        here = np.maximum(moe.num_experts / at.ep, 1.0)
        return np.ceil(here / shards) / here

    def residual_tokens(self, tokens: Floats, tp: Ints) -> Floats:
        """Tokens whose norms and residuals one rank of tp computes: sequence parallel shards them."""
        return tokens / tp

    def tp_seconds(self, num_bytes: Floats, members: Group, cluster: Cluster) -> Floats:
        """Communication of one sublayer over tp, forward: an all-gather and a reduce-scatter."""
        return 2.0 * gather_seconds(num_bytes, members, cluster)

    def network_copies(self, nodes: Floats, moe: MoeSpec) -> Floats:
        """Share of the copies of a routed token that cross the network: here each of the `top_k` does."""
        return np.ones_like(nodes)

    def dispatch_bytes(self, workload: Workload) -> float:
        """Bytes per element of tokens that are sent to their experts: the activation precision."""
        return workload.working_bytes

    def ep_overlap_share(self, at: Layouts) -> Floats:
        """Share of the all-to-alls that may overlap with compute."""
        return np.full(len(at), self.ep_overlap)

    def launches(self, workload: Workload, cluster: Cluster, *, moe: bool) -> float:
        """Kernels that the host launches for the forward pass of one layer."""
        latent = self.launches_of_latent_attention if workload.model.attention.latent is not None else 0.0
        return latent + (self.launches_per_routed_layer if moe else self.launches_per_layer)

    def compiled_share(self, workload: Workload, at: Layouts, *, moe: bool) -> Floats:
        """Share of the layers that run compiled.

        With selective recompute blocks do not where a ring passes keys on, or, in routed blocks, the host
        reads row counts (parallel/compile.py).
        """
        layers = np.full(len(at), float(workload.compiled))
        if not self.is_traced:
            return layers
        passes_over = (at.cp > 1) & np.isin(at.cp_kind, _RINGS)
        if moe and workload.model.moe is not None:
            passes_over |= (at.ep > 1) | (workload.model.moe.capacity_factor is not None)
        uncompiled = passes_over & (at.recompute == RECOMPUTE_SELECTIVE)
        return layers * (1.0 - uncompiled / at.recompute_every)

    def weight_cast_rates(self, workload: Workload, num_microbatches: Ints) -> tuple[Floats | float, Floats]:
        """Bytes moved per parameter to cast a weight, and to cast and accumulate its gradient."""
        state, working = self.state, workload.working_bytes
        cast = working + state.weight if state.weight > working else 0.0
        to_fp32 = working + state.gradient if state.gradient > working else 0.0
        # All micro-batches but the first read the accumulated gradient and write it back.
        accumulated = 3.0 * state.gradient * (1.0 - 1.0 / num_microbatches)
        return cast, to_fp32 + accumulated

    def attention_seconds(self, workload: Workload, at: Layouts, device: Device) -> tuple[Floats, Floats]:
        """Forward and backward of softmax(q k) v of one layer."""
        return runtime_attention_seconds(workload, at, device)

    def slowest_rank_seconds(
        self, workload: Workload, at: Layouts, *, layer: Floats, head: Floats, embedding: Floats
    ) -> Floats:
        """One micro-batch on the slowest pipeline rank: the last stage has fewer layers for its head."""
        num_layers = workload.model.num_layers
        mean = (num_layers + head / layer) / at.pp
        slowest = np.full(len(at), np.inf)
        for layers in (np.floor(mean), np.ceil(mean)):
            last = np.maximum(num_layers - (at.pp - 1) * layers, 0.0)
            slowest = np.minimum(slowest, np.maximum(layers * layer, last * layer + head))
        return slowest


@cache
def our_runtime() -> Framework:
    """Our own runtime with its fitted constants."""
    text = resources.files("meshwright.plan").joinpath("calibration.toml").read_text(encoding="utf-8")
    fitted = tomllib.loads(text)
    return Framework(interval=Interval(**fitted["interval"]), **fitted["runtime"])
