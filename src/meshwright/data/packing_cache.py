"""Packing plans of large datasets, kept on this machine so that only the first start plans them."""

from dataclasses import fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from meshwright.data.packing import PackingPlan, joined_plans, plan_packing
from meshwright.data.sources import TokenSource
from meshwright.files import new_folder_beside
from meshwright.hardware.prediction_log import machine_folder

PLAN_VERSION = 1
"""Part of the name of a plan and of the facts of a stream; a new way of planning counts it up."""
MIN_CACHED_DOCUMENTS = 1 << 20
"""Planning fewer documents takes about a second."""


def open_packing(
    source: TokenSource,
    sequence_length: int,
    *,
    held_out: NDArray[np.bool_] | None = None,
    folder: Path | None = None,
) -> tuple[PackingPlan, int]:
    """The packing plan of a source, and its training rows; a large plan is read from the cache.

    `held_out` documents are packed by themselves, in the rows after the training rows.
    """
    if held_out is None:
        plan = _cached(source, sequence_length, folder)
        return plan, len(plan)
    training, evaluation = (
        plan_packing(source.document_ends, sequence_length, chosen=chosen) for chosen in (~held_out, held_out)
    )
    return joined_plans([training, evaluation]), len(training)


def _cached(source: TokenSource, sequence_length: int, folder: Path | None) -> PackingPlan:
    if len(source.document_ends) < MIN_CACHED_DOCUMENTS:
        return plan_packing(source.document_ends, sequence_length)
    name = f"{source.fingerprint}-{sequence_length}-v{PLAN_VERSION}"
    place = (folder or machine_folder() / "packing") / name
    if not place.is_dir():
        plan = plan_packing(source.document_ends, sequence_length)
        if not _write(plan, place):
            return plan
    names = [field.name for field in fields(PackingPlan)]
    return PackingPlan(**{name: np.asarray(np.load(place / f"{name}.npy", mmap_mode="r")) for name in names})


def _write(plan: PackingPlan, place: Path) -> bool:
    """Whether the plan was written; ranks of one machine may write at the same time."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        hidden = new_folder_beside(place)
        for field in fields(PackingPlan):
            np.save(hidden / f"{field.name}.npy", getattr(plan, field.name))
        hidden.rename(place)
    except OSError:  # a full disk or a read-only home ends no run; nor does another rank that was first
        return place.is_dir()
    return True
