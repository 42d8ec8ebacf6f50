"""The data of `fit`: a map-style dataset, a torch DataLoader over one, or a loader of `open_loader`.

A torch DataLoader keeps every setting: workers, prefetch, pinning, collate function, timeout and order. Its
batch size is the micro-batch, as in `prepare`. A loader of `open_loader` has a stream of its own.
"""

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader, RandomSampler

from meshwright.data.loader import Loader
from meshwright.data.order import SampleOrder
from meshwright.errors import DataError, SpecError
from meshwright.mesh import Mesh
from meshwright.modules.dataset import (
    DatasetBatches,
    LoaderOptions,
    SampleAssignment,
    SampleSet,
    load_microbatches,
    require_samples,
)
from meshwright.modules.device_samples import DeviceSamples
from meshwright.modules.loop_loader import is_map_style
from meshwright.modules.reading_group import ReadingGroup, open_reading_group
from meshwright.modules.record_batches import RecordBatches, require_unsharded
from meshwright.modules.sample_reads import few_records, few_samples
from meshwright.spec.modules import FitSpec, SamplesSpec
from meshwright.spec.settings import read_settings
from meshwright.units import show_bytes

TrainingInput = SampleSet | DataLoader[Any] | Loader
_MEASURED_SAMPLES = 16
# A sample that takes longer to read and decode keeps a worker busy; a shorter one costs more to hand over.
_MIN_WORKER_SECONDS = 0.5e-3
_MAX_WORKERS = 8


def read_fit_settings(dataset: TrainingInput, run: str | Path | None, settings: Mapping[str, Any]) -> FitSpec:
    """The spec of `fit`, with what a loader sets: batch, micro-batch, order and workers."""
    if isinstance(dataset, Loader) and run is None and "batch_samples" not in settings:
        data = settings.get("data", {})
        if isinstance(data, Mapping) and "batch_samples" not in data:
            settings = {**settings, "batch_samples": dataset.batch_units}
    spec = read_settings(FitSpec, run, settings)
    if isinstance(dataset, Loader):
        return spec.with_(data=_as_stream(spec.data, dataset))
    return spec.with_(data=_as_loader(spec.data, dataset)) if isinstance(dataset, DataLoader) else spec


def _as_stream(data: SamplesSpec, loader: Loader) -> SamplesSpec:
    """The settings of a run that reads a loader of ours; those that the loader has itself must be unset."""
    require_unsharded(loader)
    _require_equal("batch_samples", data.batch_samples, loader.batch_units)
    for name in ("shuffle", "max_epochs", "num_workers", "on_device"):
        if getattr(data, name) != SamplesSpec.model_fields[name].default:
            fact = f"{name}={getattr(data, name)} has no effect: the order and workers are the loader's"
            raise SpecError(fact, where=f"data.{name}", hint=f"open_loader(..., {name}=...)")
    if loader.plan.groups is None:
        return data
    if data.microbatch_samples is not None:
        _require_equal("microbatch_samples", data.microbatch_samples, 1)
    return data.with_(microbatch_samples=1)


def _as_loader(data: SamplesSpec, loader: DataLoader[Any]) -> SamplesSpec:
    """The settings of a run that reads a torch DataLoader."""
    if not is_map_style(loader):
        fact, hint = "the DataLoader reads an iterable dataset", "pass a map-style dataset, or use prepare"
        raise DataError(fact, where="dataset", hint=hint)
    if data.microbatch_samples is not None:
        _require_equal("microbatch_samples", data.microbatch_samples, loader.batch_size)
    if data.num_workers:
        _require_equal("num_workers", data.num_workers, loader.num_workers)
    is_shuffled = isinstance(loader.sampler, RandomSampler)
    if not data.shuffle:
        _require_equal("shuffle", data.shuffle, is_shuffled)
    return data.with_(
        microbatch_samples=loader.batch_size, num_workers=loader.num_workers, shuffle=is_shuffled
    )


def _require_equal(name: str, setting: object, of_loader: object) -> None:
    if setting != of_loader:
        fact = f"{name} is {setting} in the settings and {of_loader} in the loader"
        raise SpecError(fact, where=f"data.{name}", hint="leave it out of the settings, or make them equal")


class FitData:
    """The datasets of a run and how their samples become batches."""

    def __init__(self, training: TrainingInput, evaluation: SampleSet | None, collate: Any) -> None:
        self.evaluation = evaluation
        self.loader = training.for_rank(0, 1) if isinstance(training, Loader) else None
        self._options = LoaderOptions.of(training) if isinstance(training, DataLoader) else None
        self._drop_last = isinstance(training, DataLoader) and training.drop_last
        self._collate = collate
        self._group: ReadingGroup | None = None
        self.training: Any = training.dataset if isinstance(training, DataLoader) else training
        if collate is not None and (self._options is not None or self.loader is not None):
            fact, hint = "the loader has a collate function already", "set it in the loader"
            raise SpecError(fact, where="collate", hint=hint)

    def require(self, spec: FitSpec) -> None:
        """Refuse datasets that the spec cannot use."""
        if self.loader is None:
            require_samples(self.training)
        if self.evaluation is not None:
            require_samples(self.evaluation, where="evaluation")
        if spec.parallel.pp > 1 and (count := self._num_samples(spec)):
            _require_full_batches(count, spec)
        if (self.evaluation is None) != (spec.observe.evaluate is None):
            given = "evaluation" if spec.observe.evaluate is None else "observe.evaluate"
            missing = "observe.evaluate" if spec.observe.evaluate is None else "evaluation"
            raise SpecError(
                f"{given} without {missing}: nothing would be evaluated",
                where=missing,
                hint="set both: evaluation=dataset, evaluate={'every_steps': 100}",
            )

    def first(self, spec: FitSpec) -> Any:
        """A micro-batch on the CPU, on which pp and cp are verified; None where both are 1."""
        if spec.parallel.num_stages == 1 and spec.parallel.cp == 1:
            return None
        if self.loader is not None:
            content = self.loader.fetcher(self.loader.plan.units(0, spec.microbatch_samples)).content
            return content if self.loader.plan.groups is None else content[0]
        sample_ids = list(range(min(spec.microbatch_samples, len(self.training))))
        options = LoaderOptions(self._options.collate if self._options else self._collate)
        return next(iter(load_microbatches(self.training, [sample_ids], options)))

    def batches(self, spec: FitSpec, mesh: Mesh) -> DatasetBatches | RecordBatches:
        """The training batches of this rank."""
        data, assignment = spec.data, self.assignment(spec, mesh)
        if self.loader is not None:
            return RecordBatches(
                self.loader,
                assignment,
                sample_tokens=data.sample_tokens,
                device=mesh.device,
                sharing=self._readers(spec, mesh),
            )
        return DatasetBatches(
            self.training,
            SampleOrder(len(self.training), spec.seed, data.shuffle),
            assignment,
            batch_samples=data.batch_samples,
            num_samples=self._num_samples(spec),
            sample_tokens=data.sample_tokens,
            device=mesh.device,
            options=self._shared_options(spec, mesh),
        )

    def _shared_options(self, spec: FitSpec, mesh: Mesh) -> LoaderOptions:
        options, resident = self.options(spec, mesh), self._resident(spec, mesh)
        return replace(options, resident=resident, sharing=self._readers(spec, mesh))

    def _resident(self, spec: FitSpec, mesh: Mesh) -> DeviceSamples | None:
        """All samples on the device, where the spec asks for it; rank 0 prints what they take."""
        if not spec.data.on_device:
            return None
        samples = DeviceSamples(self.training, self.options(spec, mesh), mesh.device)
        if mesh.rank == 0:
            taken = show_bytes(samples.num_bytes)
            print(f"data: {len(self.training):,} samples on {mesh.device.type}, {taken}", file=sys.stderr)
        return samples

    def assignment(self, spec: FitSpec, mesh: Mesh) -> SampleAssignment:
        """Which samples of a batch this rank gets."""
        return SampleAssignment(spec.microbatch_samples, mesh.dp_rank, spec.parallel.dp)

    def options(self, spec: FitSpec, mesh: Mesh) -> LoaderOptions:
        """How samples are loaded: as the user's DataLoader says, or by `num_workers`."""
        if self._options is not None:
            return self._options
        asked = spec.data.num_workers
        num_workers = self._measured_workers if asked == "auto" else asked
        return LoaderOptions(self._collate, num_workers, mesh.device.type == "cuda")

    def evaluation_options(self, spec: FitSpec, mesh: Mesh) -> LoaderOptions:
        """How evaluation samples are loaded: as those of training, with a dataset of their own."""
        if self.loader is None:
            return replace(self.options(spec, mesh), sharing=self._readers(spec, mesh))
        return LoaderOptions(None, 0, mesh.device.type == "cuda", sharing=self._readers(spec, mesh))

    def _readers(self, spec: FitSpec, mesh: Mesh) -> ReadingGroup | None:
        """Who reads the samples of ranks that compute on the same ones; chosen once."""
        if self._group is None and not spec.data.on_device:
            self._group = open_reading_group(mesh, spec.data.readers, self._few)
        return self._group

    def _few(self, part: int) -> Any:
        """A few samples, as a batch on the CPU."""
        if self.loader is not None:
            return few_records(self.loader, part)
        collate = self._options.collate if self._options else self._collate
        return few_samples(self.training, part, collate)

    def _num_samples(self, spec: FitSpec) -> int | None:
        """Samples until the data ends; None where it repeats without end."""
        if self.loader is not None:
            return self.loader.plan.num_units
        if spec.data.max_epochs is None:
            return None
        count = spec.data.max_epochs * len(self.training)
        return count - count % spec.data.batch_samples if self._drop_last else count

    @cached_property
    def _measured_workers(self) -> int:
        """Worker processes chosen from reading a few samples; rank 0 prints the reason."""
        ids = [number * len(self.training) // _MEASURED_SAMPLES for number in range(_MEASURED_SAMPLES)]
        _ = self.training[ids[0]]  # opens files
        started_at = time.perf_counter()
        for number in ids:
            _ = self.training[number]
        seconds = (time.perf_counter() - started_at) / len(ids)
        cores = len(os.sched_getaffinity(0))
        is_short = seconds < _MIN_WORKER_SECONDS or cores == 1
        count = 0 if is_short else min(cores - 1, _MAX_WORKERS)
        if not dist.is_initialized() or dist.get_rank() == 0:
            where = f"{count} worker processes" if count else "the training process reads"
            reason = f"data: {seconds * 1e3:.2f} ms per sample on {cores} cores: {where}"
            print(reason, file=sys.stderr)
        return count


def _require_full_batches(num_samples: int, spec: FitSpec) -> None:
    if num_samples % spec.data.batch_samples:
        raise DataError(
            f"max_epochs leaves {num_samples % spec.data.batch_samples} samples for a "
            "last batch, and a pipeline needs full batches",
            where="data.max_epochs",
            hint="leave max_epochs out, choose batch_samples that divides, or use pp=1",
        )
