"""Other training frameworks, described so that predictions can be checked against their published runs.

`Peer` adds to `Framework` what only other frameworks do. Their two fitted constants, `kernel_slowdown` and
`exposed_communication`, are in calibration.toml with the number of rows they were fitted on.
"""

import difflib
import tomllib
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

import numpy as np

from meshwright.errors import SpecError
from meshwright.hardware.catalogue import Cluster, Device
from meshwright.plan.framework import Framework, StateBytes, our_runtime
from meshwright.plan.memory.activations import Items
from meshwright.plan.time.attention import CUDNN, FLASH, kernel_seconds
from meshwright.plan.time.collectives import Group, all_reduce_seconds
from meshwright.plan.workload.layouts import Floats, Ints, Layouts
from meshwright.plan.workload.operators import StageLayers, attention_core_flops, stage_layers
from meshwright.plan.workload.workload import Workload
from meshwright.published.peer_memory import KeptByLayer
from meshwright.published.unfused_attention import unfused_attention_seconds
from meshwright.spec.model import MoeSpec


@dataclass(frozen=True)
class Peer(Framework):
    """Another training framework; the defaults are what most of them have in common."""

    gathers_by_tree: bool = False
    scatters_in_pipelines: bool = False
    selective_regathers: float = 0.0
    elementwise_passes: float = 1.0
    compiled_passes: float = 2.5
    grouped_rate: float = 0.48
    padded_vocabulary: int = 128
    pads_at_run_time: bool = False
    logits_traffic: float = 24.0
    recomputed_last_matmul: float = 1.0
    weight_cast_bytes: float = 0.0
    low_precision_slowdown: float = 1.0
    launches_per_layer: float = 45.0

    sequence_parallel: bool = True
    saves_gathered_input: bool = False
    """tp: gathered inputs of column-parallel linears are saved for the backward pass."""
    eager_activation: bool = False
    """The MLP's activation saves its input, its output and the gated output."""
    rotation_bytes: float = 0.0
    """Bytes per element of queries and keys that are saved beside the rotated ones."""
    logits_bytes: float = 12.0
    """Bytes per logit alive at the peak of the loss."""
    balances_stages: bool = False
    """Layers are assigned to pipeline stages such that the head counts as the layers it costs."""

    cudnn_attention: bool = False
    """Attention runs in cuDNN on Hopper and later, as in Transformer Engine."""
    merges_dispatch: bool = False
    """A token goes to another node once, however many of its experts are there."""
    dispatches_fp8: bool = False
    """Tokens go to their experts in fp8 where linears run in it; they come back in bf16."""
    overlaps_ep_in_stages: bool = False
    """All-to-alls overlap with the compute of other virtual stages only."""
    superchip_launches: float = 1.0
    """Share of the launches left on a superchip's host: its recipes capture CUDA graphs."""

    @property
    def is_traced(self) -> bool:
        """False: the trace is of our runtime."""
        return False

    @property
    def _kept(self) -> KeptByLayer:
        return KeptByLayer(
            sequence_parallel=self.sequence_parallel,
            gathered_input=self.saves_gathered_input,
            eager_activation=self.eager_activation,
            rotation_bytes=self.rotation_bytes,
        )

    def kept_parts(self, workload: Workload, at: Layouts, *, moe: bool) -> Items:
        """What the backward pass of one layer needs, by the part that a recompute policy may drop."""
        return self._kept.parts(workload, at, moe=moe)

    def layer_activation_bytes(self, workload: Workload, at: Layouts, *, moe: bool) -> Floats:
        """Bytes one layer keeps of one micro-batch for its backward pass, after recompute."""
        return self._kept.layer_bytes(workload, at, moe=moe)

    def cast_weight_bytes(self, workload: Workload) -> float:
        """None: the weights are kept in the working precision."""
        return 0.0

    def logit_bytes(self, workload: Workload, at: Layouts) -> Floats:
        """All logits of a micro-batch, and what the loss makes of them."""
        tokens = at.microbatch_tokens(workload.sequence_length)
        return self.logits_bytes * tokens * workload.model.vocab_size / at.tp

    def gradients_at_the_peak(self, at: Layouts, items: Items) -> Floats:
        """All of them: buffers that exist throughout."""
        return items["gradients"]

    def stage_layers(self, workload: Workload, at: Layouts) -> StageLayers:
        """An even split; the head counts where the framework balances stages."""
        return stage_layers(workload, at, balanced=self.balances_stages)

    def expert_shards(self, at: Layouts) -> Floats:
        """Ranks that share one copy of the state of an expert, those of tp included."""
        inside_tp = np.where(at.etp > 1, 1, at.tp)
        return np.maximum(at.dp_shard * at.cp * inside_tp / at.ep, 1.0)

    def expert_share(self, workload: Workload, at: Layouts) -> Floats:
        """Part of the state of its experts that one of these ranks holds: sharded by element."""
        return 1.0 / self.expert_shards(at)

    def residual_tokens(self, tokens: Floats, tp: Ints) -> Floats:
        """Tokens whose norms and residuals one rank of tp computes: all of them without sequence parallel."""
        return super().residual_tokens(tokens, tp) if self.sequence_parallel else tokens

    def tp_seconds(self, num_bytes: Floats, members: Group, cluster: Cluster) -> Floats:
        """Communication of one sublayer over tp, forward: an all-reduce without sequence parallel."""
        if self.sequence_parallel:
            return super().tp_seconds(num_bytes, members, cluster)
        return all_reduce_seconds(num_bytes, members, cluster)

    def network_copies(self, nodes: Floats, moe: MoeSpec) -> Floats:
        """Share of the copies of a routed token that cross the network, merged by node where it does so.

        Experts that are chosen from few groups (node-limited routing) reach few nodes.
        """
        if not self.merges_dispatch:
            return super().network_copies(nodes, moe)
        limit = np.maximum(nodes * moe.top_groups / moe.num_groups, 1.0)
        reached = limit * (1.0 - (1.0 - 1.0 / limit) ** moe.top_k)
        return np.minimum(reached / moe.top_k, 1.0)

    def dispatch_bytes(self, workload: Workload) -> float:
        """Bytes per element of tokens that are sent to their experts."""
        return 1.0 if self.dispatches_fp8 and workload.is_low_precision else workload.working_bytes

    def ep_overlap_share(self, at: Layouts) -> Floats:
        """Share of the all-to-alls that may overlap.

        Megatron overlaps them with the compute of another virtual stage, and without tp: collectives of tp
        need one queue of launches, and this needs many.
        """
        is_possible = ((at.virtual_stages > 1) & (at.tp == 1)) | (not self.overlaps_ep_in_stages)
        return np.where(is_possible, self.ep_overlap, 0.0)

    def launches(self, workload: Workload, cluster: Cluster, *, moe: bool) -> float:
        """Kernels that the host launches for the forward pass of one layer."""
        share = self.superchip_launches if cluster.host.name == "c2c" else 1.0
        return share * super().launches(workload, cluster, moe=moe)

    def weight_cast_rates(self, workload: Workload, num_microbatches: Ints) -> tuple[Floats | float, Floats]:
        """Zero: the `elementwise_passes` of a peer include its casts of weights and gradients."""
        return 0.0, np.zeros(len(num_microbatches))

    def attention_seconds(self, workload: Workload, at: Layouts, device: Device) -> tuple[Floats, Floats]:
        """Forward and backward of softmax(q k) v of one layer; first releases wrote the scores to memory."""
        if workload.attention_kernel == "unfused":
            return unfused_attention_seconds(workload, at, device)
        is_cudnn = self.cudnn_attention and "fp8" in device.peak_flops_per_second
        rates, flops = CUDNN if is_cudnn else FLASH, attention_core_flops(workload, at)
        return kernel_seconds(flops, workload, device, rates, length=float(workload.sequence_length))

    def slowest_rank_seconds(
        self, workload: Workload, at: Layouts, *, layer: Floats, head: Floats, embedding: Floats
    ) -> Floats:
        """One micro-batch on the slowest pipeline rank; most frameworks split the layers evenly."""
        if self.balances_stages:
            return super().slowest_rank_seconds(workload, at, layer=layer, head=head, embedding=embedding)
        split = stage_layers(workload, at)
        ends = np.maximum(split.last * layer + head, split.first * layer + embedding)
        return np.maximum(ends, split.most * layer)


_PEERS = (
    Peer(
        "megatron",
        StateBytes(weight=2, gradient=4, master=4, reduce=2),
        tp_overlap=0.3,
        pp_overlap=0.7,
        merges_dispatch=True,
        elementwise_passes=1.1,
        launches_per_layer=60.0,
        launches_per_routed_layer=420.0,
        launches_of_latent_attention=250.0,
        superchip_launches=0.25,
        cudnn_attention=True,
        grouped_rate=0.42,
        ep_overlap=0.9,
        overlaps_ep_in_stages=True,
    ),
    # DeepSeek's own framework, by the V3 report: DualPipe overlaps the all-to-alls, tokens are sent in fp8.
    Peer(
        "hai-llm",
        StateBytes(weight=2, gradient=4, master=4, reduce=2),
        pp_overlap=0.9,
        ep_overlap=0.95,
        merges_dispatch=True,
        dispatches_fp8=True,
        elementwise_passes=1.1,
        launches_per_routed_layer=250.0,
        cudnn_attention=True,
        grouped_rate=0.42,
        # Blocks of 128 are promoted to fp32 outside the tensor cores.
        low_precision_slowdown=1.13,
    ),
    Peer(
        "megatron-deepspeed",
        StateBytes(weight=2, gradient=2, master=4, reduce=2),
        sequence_parallel=False,
        dp_overlap=0.0,
        elementwise_passes=1.2,
        launches_per_layer=95.0,
    ),
    Peer(
        "nanotron",
        # Gradients are computed in bf16 and added to an fp32 buffer that exists beside them.
        StateBytes(weight=2, gradient=6, master=4),
        saves_gathered_input=True,
        eager_activation=True,
        rotation_bytes=2.0,
        logits_bytes=8.0,
        elementwise_passes=1.6,
        dp_overlap=0.5,
        bucket_bytes=25e6,
        balances_stages=True,
    ),
    Peer(
        "fsdp2-automodel",
        StateBytes(weight=2, gradient=2, master=4, reduce=2),
        elementwise_passes=1.3,
        merges_dispatch=True,
    ),
    # Everything in 16 bits, optimizer states too (with the optimizer adamw_bf16): 8 bytes per parameter.
    Peer("pure-bf16", StateBytes(weight=2, gradient=2, reduce=2), elementwise_passes=1.6),
    Peer("olmo-core", StateBytes(), elementwise_passes=1.1),
    Peer("picotron", StateBytes(weight=2, gradient=4, master=4), elementwise_passes=1.6, dp_overlap=0.5),
    Peer(
        "colossalai",
        StateBytes(weight=2, gradient=2, master=4, reduce=2),
        elementwise_passes=1.3,
        logits_bytes=8.0,
    ),
    Peer("accelerate-fsdp", StateBytes(weight=2, gradient=2, master=4, reduce=2), elementwise_passes=1.6),
)


@dataclass(frozen=True)
class Recipe:
    """What the published recipes of a framework do where a table row does not state it."""

    compiled: bool = False
    interleaved: bool = False
    """Virtual pipeline stages."""
    recompute: str = "none"
    """Recompute of dense models."""
    low_precision_experts: bool = True
    """Routed experts run in fp8 or fp4 like the other linears."""
    schedule: str | None = None
    """The pipeline schedule, where it is neither 1f1b nor interleaved."""


RECIPES = {
    "meshwright": Recipe(low_precision_experts=False),
    "megatron": Recipe(interleaved=True),
    "hai-llm": Recipe(schedule="dualpipev"),
    "fsdp2-automodel": Recipe(recompute="full"),
    "olmo-core": Recipe(compiled=True),
}


@cache
def frameworks() -> dict[str, Framework]:
    """Our runtime and every peer by the name in the `framework` column, with their fitted constants."""
    text = resources.files("meshwright.published").joinpath("calibration.toml").read_text(encoding="utf-8")
    fitted: dict[str, Any] = tomllib.loads(text)
    ours = our_runtime()
    interval = replace(ours.interval, measured=None)
    peers = {peer.name: replace(peer, interval=interval, **fitted[peer.name]) for peer in _PEERS}
    return {ours.name: ours, **peers}


def find_framework(name: str) -> Framework:
    """The framework of this name; the error for an unknown one suggests the nearest."""
    known = frameworks()
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    hint = (f"did you mean {near[0]!r}? " if near else "") + f"known: {', '.join(known)}"
    raise SpecError(f"unknown framework {name!r}", where="framework", hint=hint)
