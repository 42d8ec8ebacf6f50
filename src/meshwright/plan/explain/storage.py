"""Time and host memory to write a checkpoint to the storage of a cluster, where its rate is known."""

from meshwright.plan.search.question import Question
from meshwright.plan.workload.workload import OPTIMIZER_BYTES
from meshwright.units import show_bytes, show_seconds


def checkpoint_bytes(question: Question) -> float:
    """Bytes of a checkpoint: trained weights with their lower bits, and optimizer states."""
    state, work = question.framework.state, question.workload
    trained = 1.0 if work.adapters is None else work.adapters.share(work.model.width)
    return trained * work.counts.total * (state.weight + state.master + OPTIMIZER_BYTES[work.optimizer])


def copy_bytes_per_node(question: Question) -> float:
    """Bytes of host memory on a node for saves in the background: a copy of what its ranks write."""
    cluster = question.cluster
    return checkpoint_bytes(question) * min(1.0, cluster.devices_per_node / cluster.num_devices)


def checkpoint_sentences(question: Question) -> list[str]:
    """Sentences on checkpoints; none for a cluster whose storage is not known."""
    rate = question.cluster.storage_bytes_per_second
    if rate is None:
        return []
    size = checkpoint_bytes(question)
    return [
        f"A checkpoint of {show_bytes(size)} takes {show_seconds(size / rate)} to write at "
        f"{rate / 1e9:g} GB/s.",
        f"Saves in the background copy it to host memory: {show_bytes(copy_bytes_per_node(question))} on "
        "each node.",
    ]
