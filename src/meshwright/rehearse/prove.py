"""The proof: a run shrunk to a few local ranks must train as one device does, in float64.

The one device runs the same model without parallelism, recompute or micro-batches: the global batch in one
forward pass. Tests compare that program with plain torch; here it is the reference.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from meshwright.data.tokenize import ByteTokenizer
from meshwright.errors import RunError
from meshwright.mesh import build_mesh
from meshwright.rehearse.differences import RTOL, disagreements, training_errors
from meshwright.rehearse.ragged_documents import write_ragged
from meshwright.rehearse.rank_pool import RankFailure, RankPool, this_world
from meshwright.rehearse.shrink import Shrunken, proof_optimizers
from meshwright.rehearse.steps import Trained, train_steps
from meshwright.spec import MESH_ORDER, MemorySpec, ParallelSpec, RunSpec
from meshwright.spec.check import require_valid
from meshwright.spec.text import dump_run

NUM_STEPS = 3
NUM_BATCHES = 2
"""Batches of training data: the third step begins a second epoch."""
Ranks = Literal["cpu", "cuda"]
Job = Callable[[list[RunSpec], int], list[Trained]]
# muon's polynomial amplifies small singular values by up to 3.4445 ** 5, and rounding errors with them.
MUON_GROWTH = 500.0
RANK_TEXT = {"cpu": "gloo rank{s}", "cuda": "NCCL rank{s} on one card"}


@dataclass(frozen=True)
class Verdict:
    """The outcome of the proof on one small world."""

    shrunken: Shrunken
    ranks: Ranks
    optimizers: tuple[str, ...]
    num_gradients: int
    """Number of parameters whose gradients were compared."""
    errors: Mapping[str, float]
    """Relative error by quantity, the worst over the optimizers."""
    disagreements: tuple[str, ...]
    """Quantities that differ between ranks although they must not."""
    seconds: float

    @property
    def worst(self) -> tuple[str, float]:
        """The quantity with the largest error against one device, and that error."""
        return max(self.errors.items(), key=lambda item: item[1])

    @property
    def tolerance(self) -> float:
        """The largest relative error that rounding explains."""
        return RTOL * (MUON_GROWTH if "muon" in self.optimizers else 1.0)

    @property
    def holds(self) -> bool:
        """Whether everything equals one device but for rounding, and all ranks agree."""
        return self.worst[1] <= self.tolerance and not self.disagreements

    @property
    def line(self) -> str:
        """The verdict in one line of text."""
        parallel = self.shrunken.run.parallel
        ranks = RANK_TEXT[self.ranks].format(s="s" * (parallel.num_ranks > 1))
        world = f"{layout_text(parallel)} on {parallel.num_ranks} {ranks}"
        if self.holds:
            return (
                f"{world}: loss, {self.num_gradients} gradients and weights after {NUM_STEPS} steps of "
                f"{' and '.join(self.optimizers)} equal one device to {self.worst[1]:.0e}"
            )
        return f"{world}: {self.failure}"

    @property
    def failure(self) -> str:
        """The largest error, or the quantities in which ranks disagree."""
        wrong = [name for name, error in self.errors.items() if not error <= self.tolerance]
        if not wrong:
            return f"ranks differ in {', '.join(self.disagreements[:3])}"
        name, error = self.worst
        return (
            f"{len(wrong)} of {len(self.errors)} quantities differ from one device; "
            f"the worst is {name}, by {error:.1e} of its size"
        )


def layout_text(parallel: ParallelSpec) -> str:
    """A layout as text: `pp2 x cp2 x tp2, 1f1b, zero 3, ep2`."""
    axes = " x ".join(
        f"{axis}{getattr(parallel, axis)}" for axis in MESH_ORDER if getattr(parallel, axis) > 1
    )
    extras = {
        parallel.schedule: parallel.pp > 1,
        f"cp by {parallel.cp_kind}": parallel.cp > 1,
        f"zero {parallel.zero}": parallel.zero > 0,
        f"ep{parallel.ep}": parallel.ep > 1,
        f"etp{parallel.etp}": parallel.etp > 1,
        f"ep overlap by {parallel.ep_overlap}": parallel.ep_overlap != "none",
    }
    return ", ".join([axes or "one rank", *(text for text, is_used in extras.items() if is_used)])


def prove(
    smalls: Sequence[Shrunken], *, ranks: Sequence[Ranks] = ("cpu",), job: Job | None = None
) -> Iterator[Verdict]:
    """A verdict for each small run and kind of ranks, as soon as it is known; `job` is what a rank runs."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="meshwright-proof-")))
        pools: dict[Ranks, RankPool] = {}
        for kind in dict.fromkeys(("cpu", *ranks)):
            pools[kind] = stack.enter_context(RankPool(device=kind))
        for index, small in enumerate(smalls):
            runs = _runs(small, folder / f"tokens-{index}")
            expected = _on_ranks(pools["cpu"], train_here, [one_device(run) for run in runs])
            for kind in ranks:
                yield _verdict(small, kind, pools[kind], runs, expected, job or train_here)


def train_here(runs: list[RunSpec], num_steps: int) -> list[Trained]:
    """Train the first steps of each run, all on the same mesh; every rank of the pool calls it."""
    mesh = build_mesh(runs[0].parallel, this_world())
    return [train_steps(run, mesh, num_steps) for run in runs]


def one_device(run: RunSpec) -> RunSpec:
    """The same training on one device: no parallelism, no recompute, one micro-batch."""
    data = run.data.with_(microbatch_sequences=run.data.batch_sequences)
    return run.with_(parallel=ParallelSpec(), memory=MemorySpec(), data=data)


def _runs(small: Shrunken, tokens: Path) -> list[RunSpec]:
    """One run per optimizer, on documents of ragged lengths."""
    data = small.run.data
    num_sequences = NUM_BATCHES * data.batch_sequences + data.holdout_sequences
    write_ragged(tokens, ByteTokenizer(), num_sequences=num_sequences, sequence_length=data.sequence_length)
    run = small.run.with_(data=data.with_(path=str(tokens), synthetic=None))
    return [require_valid(run.with_(optim=optim)) for optim in proof_optimizers(run.optim)]


def _verdict(
    small: Shrunken, kind: Ranks, pool: RankPool, runs: list[RunSpec], expected: list[list[Trained]], job: Job
) -> Verdict:
    start = time.perf_counter()
    found = _on_ranks(pool, job, runs)
    errors: dict[str, float] = {}
    mismatches: list[str] = []
    for results, (reference,) in zip(found, expected, strict=True):
        mismatches += disagreements(results)
        for name, error in training_errors(results, reference).items():
            errors[name] = max(error, errors.get(name, 0.0))
    return Verdict(
        shrunken=small,
        ranks=kind,
        optimizers=tuple(run.optim.kind for run in runs),
        num_gradients=len(expected[0][0].gradients[0]),
        errors=errors,
        disagreements=tuple(mismatches),
        seconds=time.perf_counter() - start,
    )


def _on_ranks(pool: RankPool, job: Job, runs: list[RunSpec]) -> list[list[Trained]]:
    """The results of all ranks, by run."""
    parallel = runs[0].parallel
    try:
        by_rank = pool.run(job, parallel.num_ranks, runs, NUM_STEPS)
    except RankFailure as failure:
        raise _failed(failure, parallel) from None
    return [[results[index] for results in by_rank] for index in range(len(runs))]


def _failed(failure: RankFailure, parallel: ParallelSpec) -> RunError:
    with tempfile.NamedTemporaryFile("w", prefix="meshwright-proof-", suffix=".txt", delete=False) as file:
        file.write(str(failure))
    last_line = str(failure).strip().splitlines()[-1]
    return RunError(
        f"a rank of the proof failed: {last_line}",
        where=layout_text(parallel),
        hint=f"the tracebacks of all ranks are in {file.name}",
    )


def require_proved(verdict: Verdict) -> None:
    """RunError when a proof failed; the small run is written to a file, so that it can be repeated."""
    if verdict.holds:
        return
    with tempfile.NamedTemporaryFile("w", prefix="meshwright-proof-", suffix=".yaml", delete=False) as file:
        file.write(dump_run(verdict.shrunken.run))
    raise RunError(
        f"the proof failed: {verdict.line}",
        where=file.name,
        hint="this layout does not train what one device trains: use another one, and report the file above; "
        "`meshwright rehearse` reproduces the failure with it",
    )
