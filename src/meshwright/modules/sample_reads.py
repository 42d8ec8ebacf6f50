"""A few samples of a dataset or loader, read to choose which ranks read."""

from collections.abc import Callable, Iterable
from typing import Any

from torch.utils.data import DataLoader

from meshwright.data.loader import Loader
from meshwright.mesh import Mesh
from meshwright.modules.dataset import LoaderOptions, SampleSet, load_microbatches
from meshwright.modules.loop_loader import is_map_style
from meshwright.modules.reading_group import MEASURED_SAMPLES, ReadingGroup, open_reading_group
from meshwright.spec.modules import LoopSpec


def few_records(loader: Loader, part: int) -> Any:
    """The content of the `part`-th few records of a loader, or of the first ones where it has no more."""
    end = loader.plan.num_units
    start = part * MEASURED_SAMPLES
    units = loader.plan.units(start if end is None or start < end else 0, MEASURED_SAMPLES)
    return loader.fetcher(units).content


def few_samples(dataset: SampleSet, part: int, collate: Callable[[list[Any]], Any] | None) -> Any:
    """The collated `part`-th few samples of a map-style dataset, from the first one again after the last."""
    ids = [(part * MEASURED_SAMPLES + number) % len(dataset) for number in range(MEASURED_SAMPLES)]
    return next(iter(load_microbatches(dataset, [ids], LoaderOptions(collate))))


def loop_readers(loader: Iterable[Any], spec: LoopSpec, mesh: Mesh) -> ReadingGroup:
    """Who reads the batches of a user's own loop; all ranks call it. Communicates."""
    if isinstance(loader, Loader):
        return open_reading_group(mesh, spec.readers, lambda part: few_records(loader, part))
    if isinstance(loader, DataLoader) and is_map_style(loader):
        dataset: Any = loader.dataset
        return open_reading_group(
            mesh, spec.readers, lambda part: few_samples(dataset, part, loader.collate_fn)
        )
    # Measuring would use up batches of an iterable.
    return ReadingGroup(mesh, has_one_reader=spec.readers == "one")
