"""Runs a tiny run on the pool of ranks and compares it with the oracle, tensor by tensor."""

import dataclasses
import gc
import hashlib
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from tests.communication import Named, Recorder, named_calls
from tests.oracle import Reference, reference
from tests.ranks import RankPool, rank_device
from tests.tiny_runs import OPTIMIZERS
from tests.traffic import (
    expected_parameter_bytes,
    expected_traffic,
    gradient_bytes,
    most_optimizer_bytes,
)
from torch import Tensor

from meshwright.mesh import Mesh, World, build_mesh
from meshwright.optim.build import state_dims, state_tensors
from meshwright.optim.schedule import learning_rate
from meshwright.parallel.owned import OwnedParameter
from meshwright.parallel.pp import stages
from meshwright.spec import RunSpec
from meshwright.spec.check import require_valid
from meshwright.train.build import build_data, build_training, seed_step
from meshwright.train.evaluate import evaluate, sum_over_world
from meshwright.train.step import Training, train_step

# float64 carries 16 digits; sums in another order cost two or three of them, three steps one more.
RTOL = 1e-9
# A tensor that is zero but for rounding (the key bias of attention without rotation) has no scale of its
# own; below this part of the largest tensor of its kind the error is measured against that part.
SMALLEST_SCALE = 1e-4
# States of the weights' shape and dtype, which are gathered together with them.
LIKE_WEIGHTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")


@dataclasses.dataclass
class Held:
    """Bytes of state on one rank, by storage: views of one storage count once, and whole."""

    parameters: int
    gradients: int
    optimizer: int


@dataclasses.dataclass
class Result:
    """What one rank saw, its tensors gathered to whole ones by name."""

    rank: int
    stage: int
    losses: list[float]
    grad_norms: list[float]
    gradients: list[dict[str, Tensor]]
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    buffers: dict[str, Tensor]
    ema: dict[str, Tensor]
    eval_loss: float
    digests: dict[str, str]
    """Of the gathered weights: equal on all ranks of a stage."""
    num_steps: int
    communication: Named
    """Of the last step."""
    held: Held
    """Just before the last update."""
    sample_ids: list[tuple[int, ...]]


def this_world() -> World:
    """The world of the job that the pool runs at the moment."""
    rank = dist.get_rank()
    return World(rank=rank, local_rank=rank, num_ranks=dist.get_world_size(), device=rank_device())


def run_case(
    ranks: RankPool, run: RunSpec, *, num_steps: int = 3, frozen: tuple[str, ...] = ()
) -> list[Result]:
    """Train on as many ranks as the run asks for; one Result per rank."""
    return run_cases(ranks, [run], num_steps=num_steps, frozen=frozen)[0]


def run_cases(
    ranks: RankPool, runs: list[RunSpec], *, num_steps: int = 3, frozen: tuple[str, ...] = ()
) -> list[list[Result]]:
    """Several runs with one mesh: one list of Results (by rank) per run."""
    for run in runs:
        require_valid(run)
    by_rank = ranks.run(_train_here, runs[0].parallel.num_ranks, runs, num_steps, frozen)
    return [[results[index] for results in by_rank] for index in range(len(runs))]


def _train_here(runs: list[RunSpec], num_steps: int, frozen: tuple[str, ...]) -> list[Result]:
    mesh = build_mesh(runs[0].parallel, this_world())
    with ExitStack() as stack:
        if frozen:
            stack.enter_context(_freezing(frozen))
        return [train_steps(run, mesh, num_steps) for run in runs]


def _freezing(frozen: tuple[str, ...]) -> Any:
    """Parameters whose name holds one of these parts want no gradient, from the moment they are built."""
    build = stages.build_decoder

    def build_frozen(*args: Any, **kwargs: Any) -> Any:
        model = build(*args, **kwargs)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(part in name for part in frozen))
        return model

    return patch.object(stages, "build_decoder", build_frozen)


def train_steps(run: RunSpec, mesh: Mesh, num_steps: int) -> Result:
    """Build, train and gather; all ranks of the mesh call it."""
    training, batches = build_training(run, mesh), build_data(run, mesh)
    shards = {one.name: one for one in training.program.owned if one.parameter.requires_grad}
    parts: dict[str, dict[str, Tensor]] = {name: {} for name in shards}
    held: list[Held] = []

    def before_update(*_: object) -> None:
        for name, one in shards.items():
            assert one.shard.grad is not None, f"{name} has no gradient"
            parts[name][f"gradient {len(held)}"] = one.shard.grad.clone()
        held.append(measure(training))

    training.optimizer.register_step_pre_hook(before_update)
    losses, norms, sample_ids, calls = [], [], [], Counter()
    for step in range(num_steps):
        batch = next(batches)
        seed_step(run.seed, step)
        rate = learning_rate(run.optim, run.schedule, step, batch_tokens=run.data.batch_tokens)
        with Recorder() as recorder:
            outcome = train_step(training, batch, learning_rate=rate)
        calls = named_calls(recorder.calls, mesh)
        losses.append(float(sum_over_world(outcome.loss, mesh)))
        norms.append(float(outcome.grad_norm))
        sample_ids.append(batch.sample_ids)
    batches.close()
    whole = gather(run, training, parts)
    return Result(
        rank=mesh.rank,
        stage=mesh.coordinate("pp"),
        losses=losses,
        grad_norms=norms,
        gradients=[_of_kind(whole, f"gradient {step}") for step in range(num_steps)],
        weights=_of_kind(whole, "weight"),
        optimizer={
            f"{name}.{key}": value
            for name, held_ in whole.items()
            for key, value in held_.items()
            if key not in ("weight", "ema") and not key.startswith("gradient")
        },
        buffers=_buffers(training),
        ema=_of_kind(whole, "ema"),
        eval_loss=evaluate(run, training.program, mesh),
        digests={name: _digest(kinds["weight"]) for name, kinds in whole.items()},
        num_steps=num_steps,
        communication=calls,
        held=held[-1],
        sample_ids=sample_ids,
    )


def _of_kind(whole: dict[str, dict[str, Tensor]], kind: str) -> dict[str, Tensor]:
    return {name: kinds[kind] for name, kinds in whole.items() if kind in kinds}


def gather(
    run: RunSpec, training: Training, parts: dict[str, dict[str, Tensor]]
) -> dict[str, dict[str, Tensor]]:
    """Weight, states, averages and the given parts of every parameter, made whole; communicates."""
    states = state_tensors(training.optimizer, training.named_shards, run.optim)
    averages = training.ema.averages if training.ema else {}
    found = {}
    for one in training.program.owned:
        kinds = {"weight": one.shard.detach(), **parts.get(one.name, {})}
        held = states.get(one.name, {})
        kinds |= {key: state for key, state in held.items() if key in LIKE_WEIGHTS}
        if one.name in averages:
            kinds["ema"] = averages[one.name]
        found[one.name] = dict(zip(kinds, make_whole(one, list(kinds.values())), strict=True))
        for key in sorted(held.keys() - kinds.keys()):
            part = one.as_global(held[key], state_dims(key, len(one.shape)))
            found[one.name][key] = part.full_tensor()
    return found


def make_whole(one: OwnedParameter, parts: list[Tensor]) -> list[Tensor]:
    """Tensors of the shard's shape as whole ones: side by side in a last dim, so one gather does for all."""
    stacked = dataclasses.replace(one, shape=torch.Size([*one.shape, len(parts)]))
    return list(stacked.as_global(torch.stack(parts, dim=-1)).full_tensor().unbind(-1))


def _buffers(training: Training) -> dict[str, Tensor]:
    return {
        name: value.clone()
        for stage in training.program.stages
        for name, value in stage.named_buffers()
        if "balance_bias" in name
    }


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().cpu().numpy().tobytes()).hexdigest()[:16]


def measure(training: Training) -> Held:
    """What the state of this rank takes, by storage."""
    owned = training.program.owned
    computing = [parameter for stage in training.program.stages for parameter in stage.parameters()]
    gradients = [one.shard.grad for one in owned] + [one.parameter.grad for one in owned]
    states = [value for state in training.optimizer.state.values() for value in state.values()]
    return Held(
        parameters=_storage_bytes(computing + [one.shard for one in owned]),
        gradients=_storage_bytes(gradients),
        optimizer=_storage_bytes([value for value in states if isinstance(value, Tensor) and value.ndim]),
    )


def _storage_bytes(tensors: list[Any]) -> int:
    storages = {}
    for tensor in tensors:
        if tensor is not None:
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            storage = local.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def all_tensor_bytes() -> int:
    """Every storage that Python can reach in this process: nothing large hides from this."""
    gc.collect()
    tensors = [value for value in gc.get_objects() if type(value) in (Tensor, torch.nn.Parameter)]
    return _storage_bytes([tensor for tensor in tensors if tensor.layout == torch.strided])


def merged(results: list[Result], choose: Callable[[Result], dict[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of all pipeline stages under one roof."""
    found: dict[str, Tensor] = {}
    for result in results:
        found |= choose(result)
    return found


def worst_errors(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """max |a - b| / max |b| of each tensor, named."""
    assert set(actual) == set(expected), set(actual) ^ set(expected)
    largest = max((float(tensor.abs().max()) for tensor in expected.values()), default=1.0)
    errors = {}
    for name, tensor in expected.items():
        assert actual[name].shape == tensor.shape, name
        assert actual[name].dtype == tensor.dtype, name
        scale = max(float(tensor.abs().max()), SMALLEST_SCALE * largest)
        error = float((actual[name].double() - tensor.double()).abs().max()) / scale if scale else 0.0
        errors[name] = error if error == error else float("inf")
    return errors


def training_errors(results: list[Result], expected: Reference) -> dict[str, float]:
    """The worst relative error of everything the oracle knows, by what it is."""
    first, errors = results[0], {}
    for step in range(first.num_steps):
        scalars = {
            "loss": (first.losses, expected.losses),
            "grad_norm": (first.grad_norms, expected.grad_norms),
        }
        for name, (ours, theirs) in scalars.items():
            errors[f"step {step} {name}"] = abs(ours[step] - theirs[step]) / abs(theirs[step])
        gradients = merged(results, lambda result, step=step: result.gradients[step])
        named = worst_errors(gradients, expected.gradients[step])
        errors |= {f"step {step} gradient {name}": error for name, error in named.items()}
    for kind in ("weights", "optimizer", "buffers"):
        named = worst_errors(
            merged(results, lambda result, kind=kind: getattr(result, kind)), getattr(expected, kind)
        )
        errors |= {f"{kind} {name}": error for name, error in named.items()}
    if first.ema:
        named = worst_errors(merged(results, lambda result: result.ema), expected.ema)
        errors |= {f"ema {name}": error for name, error in named.items()}
    errors["eval loss"] = abs(first.eval_loss - expected.eval_loss) / expected.eval_loss
    return errors


def assert_same_training(results: list[Result], expected: Reference, *, rtol: float = RTOL) -> float:
    """Losses, norms, gradients, weights and states equal the oracle's; returns the worst relative error."""
    assert_ranks_agree(results)
    errors = training_errors(results, expected)
    wrong = {name: error for name, error in errors.items() if not error <= rtol}
    shown = sorted(wrong.items(), key=lambda item: -item[1])[:12]
    listed = "\n".join(f"  {error:.1e}  {name}" for name, error in shown)
    assert not wrong, f"{len(wrong)} of {len(errors)} quantities differ from one device:\n{listed}"
    return max(errors.values())


def assert_ranks_agree(results: list[Result]) -> None:
    """Every rank reports the same numbers, and copies of a weight are equal bit by bit."""
    for result in results[1:]:
        assert result.losses == results[0].losses
        assert result.grad_norms == results[0].grad_norms
        assert result.sample_ids == results[0].sample_ids
    by_stage: dict[tuple[int, str], set[str]] = {}
    for result in results:
        for name, digest in result.digests.items():
            by_stage.setdefault((result.stage, name), set()).add(digest)
    apart = [name for (_, name), digests in by_stage.items() if len(digests) > 1]
    assert not apart, f"ranks hold different copies of {apart}"


def assert_traffic(results: list[Result], run: RunSpec) -> None:
    """Every rank sent exactly what the formulas say: nothing is gathered that need not be."""
    for result in results:
        expected = expected_traffic(run, result.rank)
        missing, surplus = expected - result.communication, result.communication - expected
        assert not missing and not surplus, f"rank {result.rank}: missing {missing}, not expected {surplus}"


def assert_state_bytes(results: list[Result], run: RunSpec) -> None:
    """Every rank held no more than its share of parameters, gradients and optimizer states."""
    num_states = 2 if run.optim.kind == "adamw" else 1
    for result in results:
        held, (least, most) = result.held, gradient_bytes(run, result.stage)
        told = f"rank {result.rank} holds {held}"
        assert held.parameters == expected_parameter_bytes(run, result.stage), told
        assert least <= held.gradients <= most, told
        assert held.optimizer <= most_optimizer_bytes(run, result.stage, num_states), told


def prove(ranks: RankPool, run: RunSpec, *, frozen: tuple[str, ...] = ()) -> list[Result]:
    """Three steps of a run equal the oracle's."""
    results = run_case(ranks, run, frozen=frozen)
    assert_same_training(results, reference(run, frozen=frozen))
    return results


def prove_with_every_optimizer(ranks: RankPool, run: RunSpec) -> tuple[list[Result], float]:
    """SGD shows a wrong scale of the gradient, which Adam hides; Adam shows a wrong state.

    Returns the results of the last optimizer and the worst relative error of all.
    """
    runs = [run.with_(optim=optim) for optim in OPTIMIZERS.values()]
    every = run_cases(ranks, runs)
    pairs = zip(runs, every, strict=True)
    return every[-1], max(assert_same_training(results, reference(one)) for one, results in pairs)
