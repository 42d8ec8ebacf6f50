"""The trace of a run's step as rank k of N, on the CPU, with fake tensors (shapes and dtypes, no data).

The step is built by `build_training` and run by `train_step`, as in training. Around them are a process group
without other ranks, weights without data, the kernel choices of CUDA, and an allocation log. torch has fake
tensors in a private package (`torch._subclasses`) only; this is the one file that imports them.
"""

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.data.microbatch import Batch, Microbatch
from meshwright.errors import MeshwrightError, SpecError
from meshwright.hardware.simulated_device import HOPPER, SimulatedDevice
from meshwright.memory.offload.host import pageable_memory
from meshwright.ops.documents import one_document_each
from meshwright.ops.routed_rows import EvenRowCounts
from meshwright.parallel.simulation import Simulation
from meshwright.precision.policy import full_precision_dtype
from meshwright.rehearse.allocation_log import AllocationLog, Event, StorageRecord
from meshwright.rehearse.as_cuda import cuda_choices
from meshwright.rehearse.compiled import compilation_excluded, compiled_blocks
from meshwright.rehearse.dispatch import Observer, Traffic
from meshwright.rehearse.fusion import Kernel
from meshwright.rehearse.operations import is_operator
from meshwright.rehearse.phases import PARTS, Phase, PhaseTracker
from meshwright.rehearse.torch_sharding import propagation_excluded
from meshwright.rehearse.world import fake_world
from meshwright.spec import RunSpec
from meshwright.train.build import build_training
from meshwright.train.step import Training, train_step

NUM_STEPS = 2


@dataclasses.dataclass(frozen=True)
class Trace:
    """One rank's allocations, and the collectives and FLOPs of its last step.

    The steps before the last one allocate what persists: gradients, optimizer states, buckets.
    """

    rank: int
    events: list[Event]
    """Allocations and releases in order, from the building of the model on."""
    step_begins_at: int
    """Index of the first event of the last step."""
    records: list[StorageRecord]
    """One record per storage; an event's `number` is its index."""
    phases: list[Phase]
    """In the order in which they were entered; an event's `phase_id` is an index."""
    traffic: dict[tuple[str, str], Traffic]
    """Collectives of the last step by axis and kind."""
    flops: int
    num_operators: int
    seconds: float
    """Wall time of tracing."""
    num_graphs: int = 0
    """Number of compiled graphs; with 0 the blocks ran uncompiled."""
    host_bytes: int = 0
    """Bytes of pinned host memory that offload needs."""


def trace_rank(
    run: RunSpec,
    rank: int,
    *,
    num_steps: int = NUM_STEPS,
    imbalance: float = 1.0,
    device: SimulatedDevice | None = HOPPER,
    left_out_layers: int = 0,
    by_part: bool = False,
) -> Trace:
    """Trace one rank; nothing is computed and nothing is communicated.

    Its experts receive `imbalance` times the mean number of rows. `device` is simulated; None: the CPU.
    `left_out_layers` of every pipeline stage are not built.
    `by_part`: attention, its core and its output, and the MLP of a block are phases of their own.
    """
    started_at = time.perf_counter()
    run = traceable(run)
    with (
        fake_world(run.parallel, rank, torch.device("cpu")) as mesh,
        compiled_blocks(is_wanted=run.compile) as compiler,
    ):
        allocations = AllocationLog()
        phases, observer = PhaseTracker(allocations, by_part=by_part), Observer(allocations, mesh)
        if by_part:
            compiler.watch = partial(_enter_part_of, phases)
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        begins_at = 0
        simulation = Simulation(
            device,
            EvenRowCounts(imbalance),
            compiler.compile_blocks,
            partial(_allocate_host, observer, fake),
            left_out_layers,
        )
        with contextlib.ExitStack() as stack:
            training = build_training(run, mesh, fill=_Uninitialised(fake), simulation=simulation)
            training.loss_scale = None  # follows the gradient norm, which a fake tensor has none of
            _label_state(training, allocations)
            if device is not None:
                stack.enter_context(cuda_choices())
            stack.enter_context(_tracked(training, phases, observer, fake, allocations))
            batch, kept = zero_batch(run), data_on_device(run)
            if kept.numel():
                allocations.record(kept, "batch", "batch")
            for tensor in (x for part in batch.microbatches for x in part if isinstance(x, torch.Tensor)):
                allocations.record(tensor, "batch", "batch")
            for _ in range(num_steps):
                observer.traffic.clear()
                observer.flops, observer.num_operators = 0, 0
                begins_at = len(allocations.events)
                _step(training, batch, phases)
            del kept
    return Trace(
        rank=rank,
        events=allocations.events,
        step_begins_at=begins_at,
        records=allocations.records,
        phases=phases.entered,
        traffic=dict(observer.traffic),
        flops=observer.flops,
        num_operators=observer.num_operators,
        seconds=time.perf_counter() - started_at,
        num_graphs=compiler.num_graphs,
        host_bytes=training.weights.link.counters.pool_bytes,
    )


def _enter_part_of(phases: PhaseTracker, kernel: Kernel) -> None:
    """Begin the part of the block whose modules a kernel comes from; a residual sum belongs to none."""
    meta = kernel.operations[0].node.meta
    modules = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack") or {}
    names = {name for path, _ in modules.values() for name in str(path).split(".")}
    found = [part for name, part in PARTS.items() if name in names]
    if found and found[0] == "attention":
        inner = [part for name, part in (("attend", "core"), ("output", "output")) if name in names]
        found = inner or found
    if found:
        phases.enter_part(found[0])


def traceable(run: RunSpec) -> RunSpec:
    """The run with the same bytes and without what a trace cannot follow: TF32 changes kernels, not bytes."""
    if run.has_shards_on_host:
        raise SpecError(
            "a trace cannot tell shards that FSDP2 keeps on the host from shards on the device",
            where="memory.offload",
            hint="rehearse without `parameters` in offload; `meshwright predict` has the closed form of it",
        )
    if run.precision.compute == "tf32":
        run = run.with_(precision=run.precision.with_(compute="fp32"))
    return run.with_(deterministic=False)


@contextlib.contextmanager
def _tracked(
    training: Training,
    phases: PhaseTracker,
    observer: Observer,
    fake: FakeTensorMode,
    allocations: AllocationLog,
) -> Iterator[None]:
    with (
        phases.tracking(training),
        allocations.tracking_resizes(),
        propagation_excluded(observer.paused),
        compilation_excluded(observer.paused),
        fake,
        observer,
    ):
        yield


def _step(training: Training, batch: Batch, phases: PhaseTracker) -> None:
    phases.begin_step()
    try:
        train_step(training, batch, learning_rate=1e-4)
    except MeshwrightError:
        raise
    except Exception as error:
        raise _untraceable(error) from error


def _untraceable(error: Exception) -> SpecError:
    error = getattr(error, "inner_exception", error)  # the compiler wraps the error of an operator
    operator = next((str(part) for part in error.args if is_operator(part)), "")
    first_line = (str(error).splitlines() or [type(error).__name__])[0]
    return SpecError(
        f"the step cannot be traced: {operator or type(error).__name__}: {first_line}",
        where="rehearse",
        hint="rehearse on a GPU with --measure, or read the closed form with `meshwright predict`",
    )


class _Uninitialised:
    """A `Fill` in the place of `initialise`: gives a model fake tensors, without values."""

    def __init__(self, fake: FakeTensorMode) -> None:
        self._fake = fake

    def __call__(self, model: nn.Module, seed: int, *, device: torch.device) -> None:
        with self._fake, torch.no_grad():
            model.to_empty(device=device)


def _label_state(training: Training, allocations: AllocationLog) -> None:
    """Label what persists from step to step: weights, buffers, gradients, optimizer states, EMA."""
    for stage in training.program.stages:
        for tensor in (*stage.parameters(), *stage.buffers()):
            allocations.record(_plain(tensor), "build", "weights")
    for one in training.program.shards:
        allocations.record(_plain(one.shard), "build", "weights")
        if one.parameter.requires_grad:
            one.parameter.register_hook(partial(_label_gradient, allocations))
    training.optimizer.register_step_pre_hook(lambda *_: _label_gradients(training, allocations))
    for state in training.optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                allocations.record(_plain(value), "build", "optimizer")
    if training.ema is not None:
        for average in training.ema.averages.values():
            allocations.record(_plain(average), "build", "optimizer")


def _label_gradient(allocations: AllocationLog, gradient: torch.Tensor | None) -> None:
    if gradient is None:  # weight-gradient accumulation fusion: the matmul has added it already
        return
    allocations.record(_plain(gradient), "backward", "gradients")


def _label_gradients(training: Training, allocations: AllocationLog) -> None:
    """Label the gradients that the update reads; until then they are like any tensor of the backward."""
    for one in training.program.shards:
        if one.shard.grad is not None:
            allocations.record(_plain(one.shard.grad), "backward", "gradients")


def _plain(tensor: Any) -> torch.Tensor:
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()


def zero_batch(run: RunSpec, device: str = "cpu") -> Batch:
    """One rank's share of a batch: all zeros, of the right shapes; every sequence is one document."""
    data = run.data
    shape = (data.microbatch_sequences, data.sequence_length)

    def part() -> Microbatch:
        ids = torch.zeros((3, *shape), dtype=torch.int64, device=device).unbind()
        documents = one_document_each(*shape, torch.device(device))
        is_separate = data.documents == "separate"
        return Microbatch(
            tokens_BS=ids[0].clone(),
            targets_BS=ids[1].clone(),
            weights_BS=torch.zeros(shape, dtype=full_precision_dtype(run.precision), device=device),
            num_targets=None,
            positions_BS=ids[2].clone(),
            document_offsets_P=documents.offsets_P if is_separate else None,
            longest_document=shape[1] if is_separate else None,
            sequence_weights_B=torch.zeros(
                shape[0], dtype=full_precision_dtype(run.precision), device=device
            ),
            dropout_keys_BS=ids[2].clone() if run.adapter is not None and run.adapter.dropout else None,
        )

    parts = tuple(part() for _ in range(run.accumulation))
    return Batch(parts, num_tokens=data.batch_tokens, num_sequences=data.batch_sequences, sample_ids=())


def data_on_device(run: RunSpec, device: str = "cpu") -> torch.Tensor:
    """The memory that the run keeps for its dataset on every device; empty where it reads batches."""
    return torch.empty(run.data.on_device_bytes, dtype=torch.uint8, device=device)


def _allocate_host(observer: Observer, fake: FakeTensorMode, num_bytes: int) -> torch.Tensor:
    """A host buffer of offload: it is not device memory, and this machine's host memory sets no limit."""
    with observer.paused(), fake:
        buffer = pageable_memory(num_bytes)
    observer.allocations.exclude(buffer)
    return buffer
