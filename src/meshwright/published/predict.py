"""Predictions for every row of a table of published runs: the columns that `predict --table` appends."""

import csv
import io
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from meshwright.errors import MeshwrightError, SpecError, read_trouble
from meshwright.plan.predict import Prediction, predict_layout
from meshwright.published.table import TableRun, read_row

GIB = float(2**30)
PREDICTED_COLUMNS = (
    "pred_step_time_s",
    "pred_step_time_low_s",
    "pred_step_time_high_s",
    "pred_tokens_s_gpu",
    "pred_tflops_per_gpu",
    "pred_mem_gb",
    "pred_alloc_gb",
    "fits",
    "assumed",
    "error",
)


def predict_table_run(row: TableRun) -> Prediction:
    """The prediction for one row, with the FLOP convention that its own figures use."""
    found = predict_layout(row.workload, row.at, row.cluster, row.framework)
    return replace(found, model_flops_per_token=row.flops_per_token, num_devices=row.num_devices)


def _columns(row: Mapping[str, str | None], where: str) -> dict[str, str]:
    """The predicted cells of one row; a row that cannot be priced has only the reason in `error`."""
    cells = dict.fromkeys(PREDICTED_COLUMNS, "")
    try:
        run = read_row(row, where=where)
        found = predict_table_run(run)
    except MeshwrightError as error:
        return {**cells, "error": f"{error.where}: {error.fact}" if error.where else error.fact}
    return {
        **cells,
        "pred_step_time_s": f"{found.step_seconds:.5g}",
        "pred_step_time_low_s": f"{found.low_seconds:.5g}",
        "pred_step_time_high_s": f"{found.high_seconds:.5g}",
        "pred_tokens_s_gpu": f"{found.tokens_per_second_per_device:.6g}",
        "pred_tflops_per_gpu": f"{found.tflops_per_device:.5g}",
        "pred_mem_gb": f"{found.peak_stage.reserved_bytes / GIB:.4g}",
        "pred_alloc_gb": f"{found.peak_stage.allocated_bytes / GIB:.4g}",
        "fits": str(found.fits).lower(),
        "assumed": "; ".join(run.assumed),
    }


def predict_rows(rows: Iterable[Mapping[str, str | None]]) -> list[dict[str, str]]:
    """The predicted cells of every row; line numbers count the header as 1."""
    return [_columns(row, f"row {line}") for line, row in enumerate(rows, start=2)]


def read_table(path: Path) -> tuple[list[str], list[dict[str, str | None]]]:
    """Header and rows of a CSV file; a malformed row is kept with its error."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        reader = csv.reader(io.StringIO(text), strict=True)
        lines = [line for line in reader if line]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise SpecError(
            f"cannot read {path}: {read_trouble(error)}", where="--table", hint="a CSV file with a header"
        ) from error
    if not lines:
        raise SpecError(f"{path} is empty", where="--table", hint="the first line names the columns")
    header = [name.strip() for name in lines[0]]
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice:
        raise SpecError(f"column {twice[0]!r} occurs twice in the header", where=f"{path}:1")
    missing = [name for name in ("gpu", "gpus", "tp", "pp", "seq", "layers", "hidden") if name not in header]
    if missing:
        raise SpecError(
            f"the header has no column {missing[0]!r}",
            where=f"{path}:1",
            hint="the columns of published_runs.csv",
        )
    return header, [_row(header, line) for line in lines[1:]]


def _row(header: list[str], line: list[str]) -> dict[str, str | None]:
    if len(line) != len(header):
        wrong = f"{len(line)} cells under {len(header)} columns"
        return {**dict.fromkeys(header, ""), "": wrong}
    return dict(zip(header, line, strict=True))


def predict_table(path: Path) -> tuple[str, list[dict[str, str]]]:
    """The table with the predicted columns appended, as CSV text, and those columns alone."""
    header, rows = read_table(path)
    predicted = predict_rows(rows)
    for row, cells in zip(rows, predicted, strict=True):
        if "" in row:
            cells["error"] = f"{cells['error'].split(':')[0]}: {row['']}"
    kept = [name for name in header if name not in PREDICTED_COLUMNS]
    output = io.StringIO()
    writer = csv.DictWriter(output, [*kept, *PREDICTED_COLUMNS], extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row, cells in zip(rows, predicted, strict=True):
        writer.writerow({**row, **cells})
    return output.getvalue(), predicted
