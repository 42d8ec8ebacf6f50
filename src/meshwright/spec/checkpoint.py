"""Checkpoints: when they are saved, how many are kept, and the initial weights of a run."""

from pathlib import PurePosixPath

from pydantic import Field

from meshwright.spec.base import NonNegative, Positive, Spec


class UploadSpec(Spec):
    """A second place for checkpoints, in case the run directory is lost; a run resumes from there too."""

    destination: str = Field(min_length=1)
    """A folder of a shared file system, or an address such as s3://bucket/run; one for each run."""
    interval_steps: Positive | None = None
    """Steps between copies, a multiple of `checkpoint.every_steps`; null copies every checkpoint. The last
    one is always copied."""
    keep_copies: Positive | None = None
    """Newest copies that are kept there; null keeps all."""
    delete_local: bool = False
    """Delete a checkpoint from the run directory once its copy is complete."""


class LocalSpec(Spec):
    """Checkpoints on the nodes themselves, for restarts; they are deleted when the run ends."""

    save_every_steps: Positive
    """Steps between local checkpoints; `checkpoint.every_steps` is a multiple of it."""
    node_directory: str = Field(default="/dev/shm", min_length=1)
    """A folder of each node: /dev/shm is host memory, others are local disks. Variables such as
    $SLURM_TMPDIR are replaced on each node."""
    neighbour_copy: bool = False
    """Each node also holds a copy of the files of the node before it, so that a run resumes when the memory
    or the disk of a node is lost."""

    @property
    def is_in_memory(self) -> bool:
        """Whether the directory is in host memory."""
        return PurePosixPath(self.node_directory).is_relative_to("/dev/shm")


class CheckpointSpec(Spec):
    """By default only the final state is saved."""

    every_steps: Positive | None = None
    """Steps between checkpoints; null saves only at the end."""
    asynchronous: bool = True
    """Write in the background (async checkpointing): training waits only for the copy to host memory, which
    takes as many bytes as the rank writes. false: training waits for the disk."""
    keep_last: Positive = 2
    """Newest checkpoints of this run that are kept; older ones are deleted once a newer one is complete,
    unless one of the next three settings keeps them."""
    keep_every_steps: Positive | None = None
    """Checkpoints whose step is a multiple of this are never deleted."""
    keep_every_epochs: Positive | None = None
    """The first checkpoint after every so many epochs is never deleted."""
    keep_best: Positive | None = None
    """So many checkpoints with the lowest evaluation loss are kept."""
    local: LocalSpec | None = None
    """More frequent checkpoints in the memory or on a disk of each node; null: only the run directory has
    them."""
    upload: UploadSpec | None = None
    """Where checkpoints are copied to, in the background; null: only the run directory has them."""
    start_from: str | None = None
    """Initial weights: a Hugging Face folder, a checkpoint, or a run directory. Optimizer, step and data
    start from zero."""
    new_tokens: NonNegative = 0
    """Rows at the end of the vocabulary that the folder in `start_from` does not have: `model.vocab_size`
    counts them. Each starts as the mean of the folder's rows."""
