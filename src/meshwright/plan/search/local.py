"""How to run a small job on this machine: ranks, precision and micro-batch, each with its reason.

`plan` answers this for a cluster. Here the ranks share the cores and the memory of one machine. The step time
of r ranks is the FLOPs of a step over the cores, plus the all-reduce of the gradients through shared memory:

    seconds(r) = flops / (core rate x r x threads^0.6) + 8 bytes x parameters x (r - 1) / bandwidth
"""

from dataclasses import dataclass
from typing import Literal

from meshwright.errors import PlanError
from meshwright.hardware.machine import Machine
from meshwright.plan.workload.flops import flops_per_token
from meshwright.spec import ModelSpec, RunSpec
from meshwright.spec.parameters import num_parameters
from meshwright.units import show_bytes, show_count, show_seconds

# Measured with the demo on two cores of a server CPU: fp32 matmuls of small models.
CORE_FLOPS_PER_SECOND = 50e9
# Threads that share one small matmul wait for each other: 4 of them do the work of 2.3.
THREAD_EXPONENT = 0.6
# All ranks of a machine all-reduce gradients through the same memory.
ALL_REDUCE_BYTES_PER_SECOND = 4e9
# Python and torch without any tensor; the CUDA context is larger, but not in host memory.
PROCESS_BYTES = 400 * 2**20
# Weights, gradients and two moments in fp32.
STATE_BYTES_PER_PARAMETER = 16
# More tokens than this in one micro-batch make nothing faster.
MAX_MICROBATCH_TOKENS = 8192
# The rest is for the system, and for what the estimate does not include.
USABLE_SHARE = 0.8

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class LocalDecision:
    """The settings for this machine; `reasons` has one sentence for each."""

    device: Device
    num_ranks: int
    compute: Literal["fp32", "bf16", "fp16"]
    microbatch_sequences: int
    reasons: dict[str, str]

    def overrides(self) -> list[str]:
        """The decision as settings of a run."""
        scale = "{}" if self.compute == "fp16" else "null"
        return [
            f"device={self.device}",
            f"parallel.dp_replicate={self.num_ranks}",
            f"precision.compute={self.compute}",
            f"precision.loss_scale={scale}",
            f"data.microbatch_sequences={self.microbatch_sequences}",
        ]


def decide_local(run: RunSpec, machine: Machine) -> LocalDecision:
    """Ranks, precision and micro-batch of a run on one machine; PlanError where it does not fit."""
    device: Device = "cuda" if machine.accelerators else "cpu"
    compute, why_compute = _precision(machine)
    candidates = [ranks for ranks in range(1, _max_ranks(machine) + 1) if not _why_not(run, machine, ranks)]
    if not candidates:
        raise _no_fit(run, machine)
    num_ranks = min(candidates, key=lambda ranks: (step_seconds(run, machine, ranks), ranks))
    microbatch = _microbatch(run, machine, num_ranks)
    reasons = {
        "ranks": _why_ranks(run, machine, num_ranks, candidates),
        "precision": why_compute,
        "microbatch": _why_microbatch(run, machine, num_ranks, microbatch),
    }
    return LocalDecision(device, num_ranks, compute, microbatch, reasons)


def rank_bytes(model: ModelSpec, microbatch_tokens: int) -> float:
    """Bytes of one rank with the full model: the process, the state, and the activations of a micro-batch."""
    state = STATE_BYTES_PER_PARAMETER * num_parameters(model)
    return PROCESS_BYTES + state + microbatch_tokens * activation_bytes_per_token(model)


def activation_bytes_per_token(model: ModelSpec) -> float:
    """Bytes saved for backward per token: fp32 inputs of each operation, and three copies of the logits."""
    attention = model.attention
    heads = (attention.num_heads + 2 * attention.num_kv_heads) * attention.head_width
    moe = model.moe
    inner = moe.top_k * moe.width + moe.shared_width if moe else model.mlp.width
    return 4.0 * (model.num_layers * (8 * model.width + 2 * heads + 3 * inner) + 3 * model.vocab_size)


def step_seconds(run: RunSpec, machine: Machine, num_ranks: int) -> float:
    """Expected seconds of a step on the CPU; on accelerators only their order is meaningful."""
    flops = flops_per_token(run.model, run.data.sequence_length) * run.data.batch_tokens
    threads = max(1, machine.cores // num_ranks)
    compute = flops / (CORE_FLOPS_PER_SECOND * num_ranks * threads**THREAD_EXPONENT)
    if machine.accelerators:
        return compute / num_ranks
    return compute + 8 * num_parameters(run.model) * (num_ranks - 1) / ALL_REDUCE_BYTES_PER_SECOND


def _max_ranks(machine: Machine) -> int:
    return len(machine.accelerators) or machine.cores


def _why_not(run: RunSpec, machine: Machine, num_ranks: int) -> str:
    """Why this many ranks are not possible; empty where they are."""
    if run.data.batch_sequences % num_ranks:
        return f"{num_ranks} ranks do not divide {run.data.batch_sequences} sequences"
    needed, usable = rank_bytes(run.model, run.data.sequence_length), _usable_bytes(machine, num_ranks)
    if needed > usable:
        return f"{num_ranks} x {show_bytes(needed)} is more than {show_bytes(usable * num_ranks)}"
    return ""


def _usable_bytes(machine: Machine, num_ranks: int) -> float:
    """Memory that one rank may use."""
    if machine.accelerators:
        return USABLE_SHARE * min(device.memory_bytes for device in machine.accelerators)
    return USABLE_SHARE * machine.free_memory_bytes / num_ranks


def _microbatch(run: RunSpec, machine: Machine, num_ranks: int) -> int:
    """The largest micro-batch that fits and still makes the step faster."""
    share, length = run.data.batch_sequences // num_ranks, run.data.sequence_length
    usable = _usable_bytes(machine, num_ranks)
    fitting = [
        count
        for count in range(1, share + 1)
        if share % count == 0
        and rank_bytes(run.model, count * length) <= usable
        and count * length <= max(length, MAX_MICROBATCH_TOKENS)
    ]
    return max(fitting)


def _precision(machine: Machine) -> tuple[Literal["fp32", "bf16", "fp16"], str]:
    if not machine.accelerators:
        if machine.has_bf16_units:
            return "bf16", "this CPU multiplies bf16 matrices in hardware (AMX)"
        return "fp32", "this CPU has no bf16 matrix units, so lower precision would be slower"
    oldest = min(device.capability for device in machine.accelerators)
    device = f"{machine.accelerators[0].name} (compute capability {oldest[0]}.{oldest[1]})"
    if oldest >= (8, 0):
        return "bf16", f"{device} has bf16 tensor cores, and bf16 needs no loss scale"
    if oldest >= (7, 0):
        return "fp16", f"{device} has fp16 tensor cores and no bf16"
    return "fp32", f"{device} has no tensor cores"


def _why_ranks(run: RunSpec, machine: Machine, num_ranks: int, candidates: list[int]) -> str:
    if machine.accelerators:
        return f"one for each of {num_ranks} accelerators that divide the batch of {run.data.batch_sequences}"
    times = [f"{ranks}: {show_seconds(step_seconds(run, machine, ranks))}" for ranks in candidates]
    shown = ", ".join(times[:6])
    limit = _why_not(run, machine, num_ranks + 1) if num_ranks < machine.cores else ""
    return (
        f"fastest of the counts that fit {machine.cores} core{'s' * (machine.cores > 1)} "
        f"(expected step: {shown})" + (f"; {limit}" if limit else "")
    )


def _why_microbatch(run: RunSpec, machine: Machine, num_ranks: int, microbatch: int) -> str:
    share, length = run.data.batch_sequences // num_ranks, run.data.sequence_length
    needed = show_bytes(rank_bytes(run.model, microbatch * length))
    usable = show_bytes(_usable_bytes(machine, num_ranks))
    if microbatch == share:
        return f"all {share} sequences of a rank in one micro-batch: {needed} of {usable} for each rank"
    limit = "limited by memory" if microbatch * length < MAX_MICROBATCH_TOKENS // 2 else "more is not faster"
    count = share // microbatch
    return f"{share} sequences of a rank in {count} micro-batches ({limit}): {needed} of {usable}"


def _no_fit(run: RunSpec, machine: Machine) -> PlanError:
    needed = rank_bytes(run.model, run.data.sequence_length)
    return PlanError(
        f"{show_count(num_parameters(run.model))} parameters need {show_bytes(needed)} on one rank; "
        f"{show_bytes(_usable_bytes(machine, 1))} are usable",
        where="this machine",
        hint="free memory, or use a smaller model (model.num_layers, model.width) or data.sequence_length",
    )
