"""How a training stack behaves: what it keeps per parameter, what it overlaps, how well its kernels run.

Everything here is a fact of the software except two fitted constants per stack, `kernel_slowdown` and
`exposed_communication`, which stand in calibration.toml with the rows they were fitted on. `meshwright` is
our own runtime; the others exist so that predictions can be held against published runs.
"""

import difflib
import tomllib
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

from meshwright.errors import SpecError


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter on the device, beside the optimizer's own."""

    weight: float
    """The copy that computes, or the only one."""
    gradient: float
    master: float
    """fp32 master beside a narrower weight; 0 when the weight is the master."""
    gather: float = 2.0
    """Bytes per element of a gathered weight."""
    reduce: float = 4.0
    """Bytes per element of a reduced gradient."""
    update: float = 18.0
    """Bytes of weights and gradients that a fused update reads and writes, clipping included."""


@dataclass(frozen=True)
class Interval:
    """Relative half-width of the 90% interval of a step time: shares of the step times these widths.

    Chosen so that nine of ten published times fall inside when their source is left out of the fit.
    """

    kernels: float = 0.08
    communication: float = 0.4
    waiting: float = 0.2
    routed: float = 0.25


@dataclass(frozen=True)
class Framework:
    """One training stack."""

    name: str
    state: StateBytes
    sequence_parallel: bool = True
    saves_gathered_input: bool = False
    """tp: gathered inputs of column-parallel linears stay for the backward pass."""
    casts_weights: bool = False
    """Without FSDP, autocast keeps a working-precision copy of each weight until its backward pass."""
    dp_overlap: float = 0.9
    """Part of the gradient (and parameter) traffic that may hide behind the last backward pass."""
    fsdp_overlap: float = 0.9
    tp_overlap: float = 0.0
    pp_overlap: float = 0.0
    ep_overlap: float = 0.0
    eager_activation: bool = False
    """The MLP's activation keeps its input, its output and the product (8f), not one of them less."""
    rotation_bytes: float = 0.0
    """Bytes per element of queries and keys that stay beside the rotated ones."""
    residual_bytes: float = 2.0
    """Bytes per element that norms keep of the residual stream in mixed precision, uncompiled."""
    scatters_in_pipelines: bool = False
    """ZeRO-2 and 3 can reduce-scatter gradients after every micro-batch in a pipeline too."""
    gradients_after_activations: bool = False
    """Without accumulation a gradient is made where activations were freed, so only the larger counts."""
    keeps_matmul_outputs: bool = False
    """Selective recompute keeps every product's output, also whole partial sums before a reduce-scatter."""
    stops_recompute_early: bool = False
    """Full recompute ends before a dense block's last product, whose output no backward pass reads."""
    logits_bytes: float = 12.0
    """Bytes per logit alive at the peak of the loss."""
    loss_chunk_bytes: float | None = None
    """At most so many bytes of logits exist at once, beside the gradient of the head in fp32."""
    logits_traffic: float = 24.0
    """Bytes moved per logit by the loss, forward and backward."""
    elementwise_passes: float = 1.0
    """Memory passes over a fully fused implementation."""
    compiled_passes: float = 2.5
    """The same of blocks that torch.compile fused."""
    launches_per_layer: float = 45.0
    """Kernels the host launches for one layer's forward pass; compute faster than the host waits for it."""
    launches_per_routed_layer: float = 150.0
    superchip_launches: float = 1.0
    """Part of the launches left where the host is a superchip's: its recipes capture graphs."""
    merges_dispatch: bool = False
    """A token goes to another node once, however many of its experts live there."""
    bucket_bytes: float = 100e6
    """Gradients are reduced in messages of this size, so that a large group pays its latency for each."""
    adapters_per_group: float = 8.0
    """Network adapters of a node that one group's gathers use; the first ZeRO-3 filled only one."""
    gathers_by_tree: bool = False
    """Gathers and reduce-scatters with one rank per node have log n hops: NCCL from 2.23 on."""
    cuts_by_cost: bool = False
    """The pipeline is cut as spec/stages.py does."""
    balances_stages: bool = False
    """The pipeline is cut so that the head counts as the layers it costs."""
    interleaves: bool = False
    cuts_between_experts: bool = False
    """State of routed experts is divided by whole experts, and over data ranks alone: not inside tp."""
    keeps_masks: bool = False
    """Attention that stays inside documents or a window keeps a mask in every layer."""
    recasts_inputs: bool = False
    """Narrow linears keep their inputs in 8 bits, and a compiled block makes the MLP's product again."""
    weight_cast_bytes: float = 0.0
    """Bytes moved per weight and micro-batch to make its narrow copies, forward and backward together."""
    narrow_slowdown: float = 1.0
    """Time of narrow products over the shape model's."""
    kernel_slowdown: float = 1.0
    """Fitted: compute time over the shape model's."""
    exposed_communication: float = 1.0
    """Fitted: exposed communication time over the link model's."""
    interval: Interval = Interval()


_MEGATRON_BF16 = StateBytes(weight=2, gradient=4, master=4, gather=2, reduce=2)
_NANOTRON = StateBytes(weight=2, gradient=4, master=4, gather=2, reduce=4)
_PLAIN: tuple[Framework, ...] = (
    Framework(
        "meshwright",
        StateBytes(weight=4, gradient=4, master=0, gather=2, reduce=4),
        saves_gathered_input=True,
        casts_weights=True,
        eager_activation=True,
        keeps_matmul_outputs=True,
        stops_recompute_early=True,
        # Uncompiled norms keep their input in fp32; rotations keep only their tables.
        residual_bytes=4.0,
        keeps_masks=True,
        cuts_between_experts=True,
        scatters_in_pipelines=True,
        gradients_after_activations=True,
        # ops/loss.py: chunks of logits, read twice and written once (the second read mostly in the cache).
        loss_chunk_bytes=2.0**30,
        logits_traffic=6.0,
        gathers_by_tree=True,
        balances_stages=True,
        cuts_by_cost=True,
        # Measured on one H200: bench/results/runtime_h200_2026-11-15.json.
        elementwise_passes=3.5,
        compiled_passes=1.5,
        launches_per_layer=60.0,
        launches_per_routed_layer=150.0,
        # bench/results/formats_h200_2026-11-15.json. Weights: largest value, cast; then cast and turned.
        recasts_inputs=True,
        weight_cast_bytes=10.0,
        narrow_slowdown=1.13,
    ),
    Framework(
        "megatron",
        _MEGATRON_BF16,
        tp_overlap=0.3,
        pp_overlap=0.7,
        merges_dispatch=True,
        interleaves=True,
        elementwise_passes=1.1,
        launches_per_layer=60.0,
        launches_per_routed_layer=420.0,
        superchip_launches=0.25,
    ),
    Framework(
        "megatron-deepspeed",
        StateBytes(weight=2, gradient=2, master=4, gather=2, reduce=2),
        sequence_parallel=False,
        dp_overlap=0.0,
        elementwise_passes=1.2,
        launches_per_layer=95.0,
    ),
    Framework(
        "nanotron",
        # Gradients are produced in bf16 beside the fp32 buffer they are added to.
        StateBytes(weight=2, gradient=6, master=4, gather=2, reduce=4),
        saves_gathered_input=True,
        eager_activation=True,
        rotation_bytes=2.0,
        logits_bytes=8.0,
        elementwise_passes=1.6,
        dp_overlap=0.5,
        bucket_bytes=25e6,
        balances_stages=True,
    ),
    Framework(
        "fsdp2-automodel",
        StateBytes(weight=2, gradient=2, master=4, reduce=2),
        elementwise_passes=1.3,
        merges_dispatch=True,
        ep_overlap=0.0,
    ),
    # Everything in 16 bits, optimizer states too (with the optimizer adamw_bf16): 8 bytes per parameter.
    Framework("pure-bf16", StateBytes(weight=2, gradient=2, master=0, reduce=2), elementwise_passes=1.6),
    Framework("olmo-core", StateBytes(weight=4, gradient=4, master=0), elementwise_passes=1.1),
    Framework("picotron", StateBytes(weight=2, gradient=4, master=4), elementwise_passes=1.6, dp_overlap=0.5),
    Framework(
        "colossalai",
        StateBytes(weight=2, gradient=2, master=4, reduce=2),
        elementwise_passes=1.3,
        logits_bytes=8.0,
    ),
    Framework(
        "accelerate-fsdp", StateBytes(weight=2, gradient=2, master=4, reduce=2), elementwise_passes=1.6
    ),
)


@cache
def _fitted() -> dict[str, Any]:
    text = resources.files("meshwright.plan").joinpath("calibration.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


@cache
def frameworks() -> dict[str, Framework]:
    """Every known stack by the name that the `framework` column uses, with its fitted constants."""
    fitted = _fitted()
    interval = Interval(**fitted.get("interval", {}))
    constants: dict[str, dict[str, float]] = fitted.get("frameworks", {})
    return {
        plain.name: replace(plain, interval=interval, **constants.get(plain.name, {})) for plain in _PLAIN
    }


def framework(name: str) -> Framework:
    """The stack of this name; an unknown one suggests the nearest."""
    known = frameworks()
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    hint = (f"did you mean {near[0]!r}? " if near else "") + f"known: {', '.join(known)}"
    raise SpecError(f"unknown framework {name!r}", where="framework", hint=hint)


def meshwright() -> Framework:
    """Our own runtime."""
    return frameworks()["meshwright"]
