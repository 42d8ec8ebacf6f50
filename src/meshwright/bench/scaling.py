"""Strong and weak scaling of a run: the same step on more and more data-parallel ranks, and its prediction.

Strong scaling keeps the global batch, weak scaling the batch of each rank. Tensor, context and pipeline
degrees stay as the run has them; data-parallel ranks are one axis.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from meshwright.errors import SpecError, SpecErrors
from meshwright.files import MIB, read_json_file
from meshwright.hardware.catalogue import Cluster
from meshwright.plan.predict import predict_run
from meshwright.spec import RunSpec
from meshwright.spec.check import check

Row = dict[str, Any]
Kind = Literal["strong", "weak"]
KINDS: tuple[Kind, ...] = ("strong", "weak")
FILE = "scaling.json"


def scaled_run(run: RunSpec, num_ranks: int, kind: Kind) -> RunSpec:
    """The run on this many ranks; SpecErrors where its batch or its mesh cannot be divided so."""
    parallel = run.parallel
    each = parallel.tp * parallel.cp * parallel.pp
    if num_ranks % each:
        raise SpecError(
            f"{num_ranks} ranks are not a multiple of tp x cp x pp = {each}",
            where="--ranks",
            hint=f"use multiples of {each}",
        )
    dp = num_ranks // each
    zero = parallel.zero if dp > 1 or parallel.cp > 1 else 0
    axes = {"dp_replicate": 1, "dp_shard": dp} if zero else {"dp_replicate": dp, "dp_shard": 1}
    sequences = run.data.batch_sequences
    if kind == "weak":
        sequences = sequences * dp // parallel.dp
    scaled = run.with_(
        parallel=parallel.with_(zero=zero, **axes),
        data=run.data.with_(batch_sequences=max(1, sequences), batch_ramp=()),
    )
    violations = check(scaled)
    if violations:
        raise SpecErrors(violations)
    return scaled


def rank_counts(run: RunSpec) -> list[int]:
    """One data-parallel rank, two, four, ... up to the ranks of the run."""
    each = run.parallel.num_ranks // run.parallel.dp
    degrees = [1 << power for power in range(20) if 1 << power < run.parallel.dp]
    return [each * dp for dp in (*degrees, run.parallel.dp)]


def scaling_rows(
    run: RunSpec, num_ranks: int, cluster: Cluster | None, measured: Callable[[RunSpec], float]
) -> Iterator[Row]:
    """A row for each kind; `measured` returns the seconds of one step of a run, on every rank the same."""
    for kind in KINDS:
        row: Row = {"kind": kind, "ranks": num_ranks}
        try:
            scaled = scaled_run(run, num_ranks, kind)
        except (SpecError, SpecErrors) as error:
            yield {**row, "error": str(error).splitlines()[0][:120]}
            continue
        row["batch_tokens"] = scaled.data.batch_tokens
        if cluster is not None:
            row["predicted_seconds"] = predict_run(scaled, cluster.with_devices(num_ranks)).step_seconds
        yield row | {"seconds": measured(scaled)}


def merged(rows: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """Rows of earlier launches and new ones, with rates and efficiency relative to the fewest ranks."""
    by_place = {(row["kind"], row["ranks"]): row for row in (*rows, *new)}
    ordered = [by_place[place] for place in sorted(by_place)]
    return [_with_efficiency(row, ordered) for row in ordered]


def _with_efficiency(row: Row, rows: Sequence[Row]) -> Row:
    if "seconds" not in row:
        return row
    first = next(one for one in rows if one["kind"] == row["kind"] and "seconds" in one)
    found = {**row, "tokens_per_second": row["batch_tokens"] / row["seconds"]}
    found["efficiency"] = _efficiency(row, first, "seconds")
    if "predicted_seconds" in row and "predicted_seconds" in first:
        found["predicted_efficiency"] = _efficiency(row, first, "predicted_seconds")
    return found


def _efficiency(row: Row, first: Row, key: str) -> float:
    """Tokens per second and rank, relative to the fewest ranks."""
    return (row["batch_tokens"] / row[key] / row["ranks"]) / (
        first["batch_tokens"] / first[key] / first["ranks"]
    )


def read_rows(folder: Path) -> list[Row]:
    """The rows of earlier launches in a folder; none where there are none."""
    path = folder / FILE
    if not path.exists():
        return []
    try:
        found: Any = read_json_file(path, max_bytes=MIB)
        return list(found["sections"]["scaling"])
    except (KeyError, TypeError, ValueError):
        raise SpecError("this is no result of `bench scaling`", where=str(path), hint="remove it") from None
