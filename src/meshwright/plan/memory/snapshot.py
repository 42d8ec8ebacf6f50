"""The counts of one snapshot of a pipeline rank (snapshots.py)."""

from typing import NamedTuple


class Snapshot(NamedTuple):
    """Counts at the beginning of an action; a micro-batch counts once in every stage that holds it."""

    kind: str
    """F, B, I or W as in schedules.py; a W of the first stage is a B: there torch runs the full backward.
    `end`: after the last one."""
    in_first_stage: int
    """1: the action belongs to the model's first stage."""
    in_last_stage: int
    sends: int
    """1: the stage's output goes to another rank; the two middle stages of a V are on one rank."""
    has_gradients: int
    """1: an earlier micro-batch has left gradients in the stage of this action."""
    is_final: int
    """1: the last micro-batch of a run without a pipeline, which launches gradients as they come."""
    kept: int
    """Micro-batches whose activations are kept, that of this action excluded."""
    kept_first: int
    """Those of them in the model's first stage."""
    kept_last: int
    waiting: int
    """Micro-batches between I and W, that of this action excluded."""
    waiting_last: int
    sent: int
    """Outputs of these micro-batches that went to another rank and wait for their gradients."""
    finished_last: int
    """Micro-batches whose W is done in the model's last stage, where torch keeps their graphs."""
    input_gradients: int
    """Input gradients that earlier I sent to another rank, and that torch keeps until the next step."""
    graded: int
    """Stages that have gradients."""
    graded_first: int
    """1: the model's first stage is one of them."""
    graded_last: int
    sent_back: int
    """1: the latest backward has sent an input gradient, which stays until the next one is made."""
    summed: int
    """At F and B: stages with gradients of backwards before the latest one, whose reduction is in flight."""
    summed_first: int
    summed_last: int
    latest: int
    """1: at F and B, there was an earlier backward."""
    latest_first: int
    latest_last: int


NUM_KEYS = Snapshot._fields.index("kept")
"""The fields before it say what the action is, those from it on what it finds."""


EMPTY = Snapshot("F", 1, 1, *[0] * (len(Snapshot._fields) - 3))
