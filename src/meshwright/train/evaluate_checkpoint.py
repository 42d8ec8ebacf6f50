"""The loss of saved weights on a dataset, on any mesh (`meshwright evaluate`)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.checkpoint.adapters import found_base
from meshwright.checkpoint.initial import load_initial_weights, require_built_in
from meshwright.checkpoint.load import read_manifest
from meshwright.checkpoint.locate import is_checkpoint, locate_weights
from meshwright.data.batches import evaluation_ids
from meshwright.data.pair_samples import NO_PAIR, PairSamples
from meshwright.data.samples import TokenSamples
from meshwright.data.sources import read_manifest as read_dataset_manifest
from meshwright.data.stream import open_stream
from meshwright.data.tokenize import tokenizer_for
from meshwright.errors import CheckpointError, DataError, MeshwrightError
from meshwright.mesh import Mesh, build_mesh, join_world
from meshwright.models.decoder import Decoder
from meshwright.spec import (
    CheckpointSpec,
    DataSpec,
    LaunchSpec,
    MemorySpec,
    ObserveSpec,
    OptimSpec,
    ParallelSpec,
    ResilienceSpec,
    RunSpec,
    ScheduleSpec,
)
from meshwright.spec.huggingface import model_at
from meshwright.spec.text import dump_run, parse_run
from meshwright.train.build import build_data, build_training
from meshwright.train.capacity import require_capacity
from meshwright.train.evaluate import evaluate
from meshwright.train.reference import Reference, require_pairs
from meshwright.train.session import on_first_rank
from meshwright.train.step import Training
from meshwright.train.step_metrics import pair_metrics

# The sequence length for a Hugging Face folder, which records no training; shorter models use their own.
_DEFAULT_SEQUENCE_LENGTH = 1024


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The loss of saved weights on a dataset."""

    loss: float
    """Sum over target tokens / their number, in nats."""
    tokens: int
    """Target tokens."""
    sequences: int
    checkpoint: Path
    step: int | None
    """None for a Hugging Face folder."""
    pairs: "PairFigures | None" = None
    """Of a run on preference pairs, whose loss is the mean of a pair."""

    @property
    def perplexity(self) -> float | None:
        """exp(loss); infinite where that is too large for a float, None where the loss is not of tokens."""
        if self.pairs is not None:
            return None
        return math.exp(self.loss) if self.loss < 700 else math.inf


class PairFigures(NamedTuple):
    """What an evaluation on preference pairs has beside the loss."""

    count: int
    reward_margin: float
    """Mean difference of the rewards of chosen and rejected answers."""
    reward_accuracy: float
    """Share of the pairs whose chosen answer has the higher reward."""


def evaluation_run(
    directory: Path,
    overrides: Sequence[str],
    *,
    data: str | None,
    step: int | None,
    num_ranks: int | None,
) -> RunSpec:
    """The run that evaluates: model and sequence length of the saved run, its mesh or `num_ranks` dp ranks.

    It has no optimizer state. fp8 is left out: the scales of training are not those of evaluation.
    """
    folder = locate_weights(directory, where=str(directory), step=step)
    saved = _saved_run(folder, data)
    parallel = saved.parallel if num_ranks is None else ParallelSpec(dp_replicate=num_ranks)
    run = saved.with_(
        name="evaluate",
        parallel=parallel,
        precision=saved.precision.with_(fp8=None),
        optim=OptimSpec(kind="sgd", beta1=0.0),
        schedule=ScheduleSpec(num_steps=1, kind="constant"),
        memory=MemorySpec(),
        observe=ObserveSpec(),
        resilience=ResilienceSpec(),
        launch=saved.launch if parallel.num_ranks > 1 else LaunchSpec(),
        **_weights_of(saved, folder),
        data=_evaluated_data(saved.data, data, parallel, keeps_batch=num_ranks is None),
    )
    return parse_run(dump_run(run), overrides, place=str(folder)).require_valid()


def _weights_of(saved: RunSpec, folder: Path) -> dict[str, Any]:
    """The settings that load a checkpoint's weights; adapters are loaded onto their base."""
    if saved.adapter is None:
        return {"checkpoint": CheckpointSpec(start_from=str(folder))}
    start = found_base(saved, read_manifest(folder)) or saved.checkpoint.start_from
    base = CheckpointSpec(start_from=start, new_tokens=saved.checkpoint.new_tokens)
    return {"checkpoint": base, "adapter": saved.adapter.with_(start_from=str(folder))}


def _saved_run(folder: Path, data: str | None) -> RunSpec:
    if not is_checkpoint(folder):
        model = model_at(folder)
        length = min(model.max_positions, _DEFAULT_SEQUENCE_LENGTH)
        spec = DataSpec(path=data, sequence_length=length, batch_sequences=1)
        return RunSpec(model=model, schedule=ScheduleSpec(num_steps=1), data=spec)
    manifest = read_manifest(folder)
    require_built_in(manifest, folder)
    try:
        return RunSpec.model_validate(manifest.get("run"))
    except ValueError:
        raise CheckpointError(
            "this checkpoint does not record the run that wrote it",
            where=str(folder),
            hint="name a run directory, or the Hugging Face folder that it was converted from",
        ) from None


def _evaluated_data(
    saved: DataSpec, path: str | None, parallel: ParallelSpec, *, keeps_batch: bool
) -> DataSpec:
    """The named dataset in full, or the held-out sequences of the run."""
    batch = saved.batch_sequences if keeps_batch else saved.microbatch_sequences * parallel.dp
    spec = saved.with_(batch_sequences=batch, batch_ramp=(), max_epochs=None)
    if path is not None:
        if saved.path != path:
            _require_same_tokenizer(saved, path)
        return spec.with_(
            path=path, synthetic=None, blend=(), curriculum=(), holdout_sequences=0, holdout=None
        )
    if not saved.has_holdout:
        hint = "name a dataset: --data PATH (`meshwright data pack` makes one)"
        raise DataError("the run has no held-out sequences", where="data.holdout_sequences", hint=hint)
    return spec


def _require_same_tokenizer(saved: DataSpec, path: str) -> None:
    """Refuse a dataset that another tokenizer packed.

    Nothing is compared where the run's data is gone, or with a Megatron pair, which names no tokenizer.
    """
    if Path(f"{path}.idx").is_file():
        return
    try:
        ours = tokenizer_for(saved)
    except (MeshwrightError, OSError):
        return
    theirs = read_dataset_manifest(Path(path)).tokenizer
    if theirs.hash == ours.hash:
        return
    raise DataError(
        f"the dataset is packed with {theirs.name}, the run was trained on tokens of {ours.name}",
        where=path,
        hint="pack it with the tokenizer of the run: `meshwright data pack --tokenizer`",
    )


def evaluate_weights(run: RunSpec, *, averaged: bool) -> Evaluation:
    """Build the run on this rank, load its weights and evaluate; all ranks call it."""
    every_sample = not run.data.has_holdout
    world = join_world(run.device, launch=run.launch)
    on_first_rank(lambda: require_capacity(run, world.device))
    stream = open_stream(run.data, seed=run.seed, vocab_size=run.model.vocab_size)
    require_pairs(run, stream.samples)
    mesh = build_mesh(run.parallel, world)
    training = build_training(run, mesh)
    adapters = run.adapter.start_from if run.adapter is not None else None
    folder = Path(adapters or run.checkpoint.start_from or "")
    reference = _reference(run, training, mesh, folder)
    load_initial_weights(run, training, averaged=averaged)
    for stage in training.program.stages:
        if isinstance(stage, Decoder) and stage.head is not None:
            stage.head.records_evaluation = True
    loss = evaluate(run, training.program, mesh, every_sample=every_sample, reference=reference)
    evaluated = evaluation_ids(stream, every_sample=every_sample)
    return Evaluation(
        pairs=_pair_figures(training, stream.samples, evaluated),
        loss=loss,
        tokens=stream.samples.targets(evaluated).count,
        sequences=len(evaluated),
        checkpoint=folder,
        step=read_manifest(folder)["step"] if is_checkpoint(folder) else None,
    )


def _reference(run: RunSpec, training: Training, mesh: Mesh, folder: Path) -> NDArray[np.float64] | None:
    """Reference log-probs of the dataset by the weights from which the saved run started.

    They are loaded first, and those of the checkpoint after them. None where the loss has no reference.
    """
    if run.preference is None or not run.preference.has_reference:
        return None
    if not is_checkpoint(folder):
        raise DataError(
            f"a Hugging Face folder does not record from which weights preference.loss={run.preference.loss} "
            "began",
            where=str(folder),
            hint="name the run directory, or use preference.loss=simpo or orpo, which have no reference",
        )
    saved = _saved_run(folder, None)
    start = run.with_(checkpoint=saved.checkpoint, adapter=saved.adapter)
    load_initial_weights(start, training)
    reference = Reference(start, training.program, mesh, build_data(start, mesh))
    reference.compute()
    return reference.table


def _pair_figures(
    training: Training, samples: TokenSamples, evaluated: NDArray[np.int64]
) -> PairFigures | None:
    if not isinstance(samples, PairSamples):
        return None
    found = pair_metrics(training)
    count = int((samples.pair_ids(evaluated) != NO_PAIR).sum())
    return PairFigures(count, found["reward_margin"], found["reward_accuracy"])
