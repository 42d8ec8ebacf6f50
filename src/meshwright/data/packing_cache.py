"""Packing plans of large datasets, kept on this machine so that only the first start plans them."""

from dataclasses import fields
from pathlib import Path

import numpy as np

from meshwright.data.packing import PackingPlan, plan_packing
from meshwright.data.sources import TokenSource
from meshwright.files import new_folder_beside
from meshwright.hardware.prediction_log import machine_folder

PLAN_VERSION = 1
"""Part of the name of a plan and of the facts of a stream; a new way of planning counts it up."""
MIN_CACHED_DOCUMENTS = 1 << 20
"""Planning fewer documents takes about a second."""


def open_packing(source: TokenSource, sequence_length: int, *, folder: Path | None = None) -> PackingPlan:
    """The packing plan of a source: of a large one from the cache, where the first start has written it."""
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
