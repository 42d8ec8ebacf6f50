"""Whether a larger micro-batch than that of a run fits, and what it would be worth."""

from meshwright.hardware.catalogue import Cluster
from meshwright.hardware.machine import Machine
from meshwright.plan.predict import Prediction, predict_run
from meshwright.plan.search.local import MAX_MICROBATCH_TOKENS, USABLE_SHARE, rank_bytes
from meshwright.spec.advice import Advice
from meshwright.spec.run import RunSpec
from meshwright.units import show_bytes, show_seconds

# A step that is faster by less than this share is not worth a note.
_WORTH = 0.03
_WHERE = "data.microbatch_sequences"


def advise_microbatch(run: RunSpec, cluster: Cluster) -> list[Advice]:
    """The memory and step of the run's micro-batch on a cluster, and the fastest larger one that fits."""
    now = predict_run(run, cluster)
    larger = [(size, predict_run(with_microbatch(run, size), cluster)) for size in _larger(run)]
    fitting = [(size, found) for size, found in larger if found.fits]
    size, best = min(fitting, key=lambda pair: pair[1].step_seconds, default=(0, now))
    if not now.fits or best.step_seconds > (1.0 - _WORTH) * now.step_seconds:
        return []
    fact = f"micro-batch {run.data.microbatch_sequences} takes {_priced(now)} on {cluster.device.title}"
    return [Advice(f"{fact}; {size} fits with {_priced(best)}", _WHERE, f"{_WHERE}={size}")]


def advise_local_microbatch(run: RunSpec, machine: Machine) -> list[Advice]:
    """The largest micro-batch that fits the memory of this machine, for a run on its CPU."""
    length = run.data.sequence_length
    usable = USABLE_SHARE * machine.free_memory_bytes / run.parallel.num_ranks
    sizes = [size for size in _larger(run) if size * length <= MAX_MICROBATCH_TOKENS]
    fitting = [size for size in sizes if rank_bytes(run.model, size * length) <= usable]
    if not fitting:
        return []
    size = max(fitting)
    needed = show_bytes(rank_bytes(run.model, size * length))
    fact = f"micro-batch {run.data.microbatch_sequences}; {size} sequences fit this machine"
    return [Advice(f"{fact} ({needed} of {show_bytes(usable)} for each rank)", _WHERE, f"{_WHERE}={size}")]


def with_microbatch(run: RunSpec, size: int) -> RunSpec:
    """The run with another micro-batch."""
    return run.with_(data=run.data.with_(microbatch_sequences=size))


def _larger(run: RunSpec) -> list[int]:
    """Larger micro-batches that divide every batch of the run; none in a pipeline, which needs many."""
    if run.parallel.pp > 1:
        return []
    shares = [sequences // run.parallel.dp for _, sequences, _ in run.each_accumulation()]
    sizes = range(run.data.microbatch_sequences + 1, min(shares) + 1)
    return [size for size in sizes if all(share % size == 0 for share in shares)]


def _priced(found: Prediction) -> str:
    return f"{show_bytes(found.peak_stage.device_bytes)} and {show_seconds(found.step_seconds)} per step"
