"""The very step of a run as rank k of N, on the CPU, with tensors that have no numbers.

Everything is built by `build_training` and run by `train_step`; what is particular here is around them: a
world without other ranks, weights without bytes, functions that choose as on CUDA, and a ledger.
"""

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from meshwright.data.batches import Batch, Microbatch
from meshwright.errors import MeshwrightError, SpecError
from meshwright.hardware.stand_in import standing_for
from meshwright.memory.offload.activations import storage_key
from meshwright.memory.offload.host import HostBuffer, HostPool
from meshwright.ops.routed_rows import routed_evenly
from meshwright.precision.policy import wide_dtype
from meshwright.rehearse.as_cuda import as_on_cuda
from meshwright.rehearse.compiled import compiling
from meshwright.rehearse.dispatch import Observer, Traffic
from meshwright.rehearse.ledger import Event, Held, Ledger
from meshwright.rehearse.fusion import Kernel
from meshwright.rehearse.phases import HALVES, Moment, Moments
from meshwright.rehearse.world import fake_world
from meshwright.spec import RunSpec
from meshwright.train import build
from meshwright.train.build import build_training
from meshwright.train.step import Training, train_step

NUM_STEPS = 2


@dataclasses.dataclass(frozen=True)
class Trace:
    """What one rank did in its last step; the steps before it filled what stays."""

    rank: int
    events: list[Event]
    """From the beginning of the process."""
    step_begins_at: int
    """Index of the first event of the last step."""
    records: list[Held]
    moments: list[Moment]
    traffic: dict[tuple[str, str], Traffic]
    """By axis and kind of collective, of the last step."""
    flops: int
    num_operators: int
    seconds: float
    num_graphs: int = 0
    """That were compiled; 0: the trace is one of an uncompiled run."""
    host_bytes: int = 0
    """Pinned buffers of host memory that offload needs."""


def trace_rank(
    run: RunSpec, rank: int, *, num_steps: int = NUM_STEPS, imbalance: float = 1.0, by_half: bool = False
) -> Trace:
    """Trace one rank; nothing is computed and nothing is sent. Routed rows come as `imbalance` says.

    `by_half`: the attention and the MLP of a block are phases of their own.
    """
    started_at = time.perf_counter()
    run = traceable(run)
    with (
        fake_world(run.parallel, rank, torch.device("cpu")) as mesh,
        standing_for("cuda"),
        routed_evenly(imbalance),
        compiling(is_wanted=run.compile) as compiler,
    ):
        ledger = Ledger()
        moments, observer = Moments(ledger, by_half=by_half), Observer(ledger, mesh)
        if by_half:
            compiler.watch = lambda kernel: _enter_half_of(kernel, moments)
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        begins_at = 0
        with _host_apart(observer, fake), contextlib.ExitStack() as stack:
            training = build_training(run, mesh, fill=_Empty(fake))
            _adopt_state(training, ledger)
            stack.enter_context(_watching(training, moments, observer, fake, ledger))
            batch = blank_batch(run)
            for tensor in (x for part in batch.microbatches for x in part if x is not None):
                ledger.see(tensor, "batch", "batch")
            for _ in range(num_steps):
                observer.traffic.clear()
                observer.flops, observer.num_operators = 0, 0
                begins_at = len(ledger.events)
                _step(training, batch, moments)
    return Trace(
        rank=rank,
        events=ledger.events,
        step_begins_at=begins_at,
        records=ledger.records,
        moments=moments.seen,
        traffic=dict(observer.traffic),
        flops=observer.flops,
        num_operators=observer.num_operators,
        seconds=time.perf_counter() - started_at,
        num_graphs=compiler.num_graphs,
        host_bytes=training.weights.link.account.pool_bytes,
    )


def _enter_half_of(kernel: Kernel, moments: Moments) -> None:
    """The half of the block whose modules a kernel comes from; a plain sum between them belongs to neither."""
    meta = kernel.operations[0].node.meta
    modules = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack") or {}
    paths = [str(path) for path, _ in modules.values()]
    found = [half for name, half in HALVES.items() if any(f"].{name}" in f"{path}." for path in paths)]
    if found:
        moments.enter_half(found[0])


def traceable(run: RunSpec) -> RunSpec:
    """The same bytes without what a trace cannot follow: TF32 is a switch of kernels, not of bytes."""
    if run.has_shards_on_host:
        raise SpecError(
            "a trace cannot tell shards that FSDP2 keeps on the host from those on the device",
            where="memory.offload",
            hint="rehearse without parameters; `meshwright predict` prices what moves",
        )
    if run.precision.compute == "tf32":
        run = run.with_(precision=run.precision.with_(compute="fp32"))
    return run.with_(deterministic=False)


@contextlib.contextmanager
def _watching(
    training: Training, moments: Moments, observer: Observer, fake: FakeTensorMode, ledger: Ledger
) -> Iterator[None]:
    with (
        moments.following(training),
        ledger.watching_sizes(),
        _unseen_propagation(observer),
        as_on_cuda(),
        fake,
        observer,
    ):
        yield


def _step(training: Training, batch: Batch, moments: Moments) -> None:
    moments.begin_step()
    try:
        train_step(training, batch, learning_rate=1e-4)
    except MeshwrightError:
        raise
    except Exception as error:
        raise _untraceable(error) from error


def _untraceable(error: Exception) -> SpecError:
    error = getattr(error, "inner_exception", error)  # the compiler tells of another's failure
    operator = next((str(part) for part in error.args if isinstance(part, torch._ops.OpOverload)), "")
    first_line = (str(error).splitlines() or [type(error).__name__])[0]
    return SpecError(
        f"the step cannot be traced: {operator or type(error).__name__}: {first_line}",
        where="rehearse",
        hint="rehearse on a GPU with --measure, or read the closed form with `meshwright predict`",
    )


class _Empty:
    """Takes the place of `initialise`: memory without numbers."""

    def __init__(self, fake: FakeTensorMode) -> None:
        self._fake = fake

    def __call__(self, model: nn.Module, seed: int, *, device: torch.device) -> None:
        with self._fake, torch.no_grad():
            model.to_empty(device=device)


def _adopt_state(training: Training, ledger: Ledger) -> None:
    """What stays from step to step: weights, buffers, optimizer states, averages."""
    for stage in training.program.stages:
        for tensor in (*stage.parameters(), *stage.buffers()):
            ledger.see(_plain(tensor), "build", "weights")
    for one in training.program.owned:
        ledger.see(_plain(one.shard), "build", "weights")
        if one.parameter.requires_grad:
            one.parameter.register_hook(partial(_adopt_gradient, ledger))
    training.optimizer.register_step_pre_hook(lambda *_: _adopt_gradients(training, ledger))
    for state in training.optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                ledger.see(_plain(value), "build", "optimizer")
    if training.ema is not None:
        for average in training.ema.averages.values():
            ledger.see(_plain(average), "build", "optimizer")


def _adopt_gradient(ledger: Ledger, gradient: torch.Tensor | None) -> None:
    if gradient is None:  # a product has added it to the sum by itself
        return
    ledger.see(_plain(gradient), "backward", "gradients")


def _adopt_gradients(training: Training, ledger: Ledger) -> None:
    """What the update reads: before it, the gradient was a tensor like others."""
    for one in training.program.owned:
        if one.shard.grad is not None:
            ledger.see(_plain(one.shard.grad), "backward", "gradients")


def _plain(tensor: Any) -> torch.Tensor:
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()


def blank_batch(run: RunSpec, device: str = "cpu") -> Batch:
    """One rank's part of a batch, of the right shapes, all zero."""
    data = run.data
    shape = (data.microbatch_sequences, data.sequence_length)

    def part() -> Microbatch:
        ids = torch.zeros((5, *shape), dtype=torch.int64, device=device).unbind()
        return Microbatch(
            tokens_BS=ids[0].clone(),
            targets_BS=ids[1].clone(),
            weights_BS=torch.zeros(shape, dtype=wide_dtype(run.precision), device=device),
            positions_BS=ids[2].clone(),
            documents_BS=None if data.documents == "joined" else ids[3].clone(),
            sequence_weights_B=torch.zeros(shape[0], dtype=wide_dtype(run.precision), device=device),
        )

    parts = tuple(part() for _ in range(run.accumulation))
    return Batch(parts, num_tokens=data.batch_tokens, num_sequences=data.batch_sequences, sample_ids=())


@contextlib.contextmanager
def _host_apart(observer: Observer, fake: FakeTensorMode) -> Iterator[None]:
    """Buffers of offload are no bytes of the device; and the host that matters is not this one."""
    take: Any = HostPool.take

    def apart(pool: HostPool, num_bytes: int) -> HostBuffer:
        was_paused, observer.is_paused = observer.is_paused, True
        try:
            with fake:
                buffer = take(pool, num_bytes)
        finally:
            observer.is_paused = was_paused
        observer.ledger.elsewhere.add(storage_key(buffer.bytes))
        return buffer

    with patch.object(HostPool, "take", apart), patch.object(build, "host_budget", lambda _: None):
        yield


@contextlib.contextmanager
def _unseen_propagation(observer: Observer) -> Iterator[None]:
    """DTensor tries an operator at its global shape to learn the result's: no bytes of this rank."""
    name = "_propagate_tensor_meta_non_cached"
    propagate: Any = getattr(ShardingPropagator, name)

    def unseen(*args: Any, **kwargs: Any) -> Any:
        was_paused, observer.is_paused = observer.is_paused, True
        try:
            return propagate(*args, **kwargs)
        finally:
            observer.is_paused = was_paused

    with patch.object(ShardingPropagator, name, unseen):
        yield
