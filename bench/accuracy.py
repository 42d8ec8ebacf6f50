"""Writes docs/reference/accuracy.md and its pictures: `python bench/accuracy.py`.

Predicted against published for every row of tests/data/published_runs.csv and every table of the course
decks. Errors with a row's source left out of the fit come from tests/data/left_out.csv, which
bench/calibrate.py writes.
"""

import csv
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from bench.left_out import (
    MEMORY_FACTS,
    MemoryRow,
    memory_left_out,
    one_node_rankings,
    several_nodes_rankings,
)
from bench.mission import (
    FINE_TUNING_ASSUMED,
    LEONARDO_ASSUMED,
    Compared,
    deepseek_table,
    duration_table,
    fine_tuning_fits,
    fine_tuning_table,
    gpt3_table,
    leonardo_table,
    leonardo_what_if,
    megatron_table,
)
from bench.our_runtime import our_runtime_table
from bench.scatter import scatter_svg
from bench.vtrain import VtrainRow, spearman, vtrain_groups, vtrain_several_nodes

from meshwright.errors import SpecError
from meshwright.plan.framework import Framework
from meshwright.plan.predict import Prediction
from meshwright.plan.time.interval import KINDS, kind_of
from meshwright.published.frameworks import find_framework, frameworks
from meshwright.published.predict import GIB, predict_table_run
from meshwright.published.table import measured_seconds, read_row

LEONARDO_70B = (
    "\nThe 70B row is far off. Its micro-batch, recompute and interleaving are not stated. What if: "
    "with full recompute, a micro-batch of 16 without interleaving leaves 32 micro-batches for 16 stages, "
    "and its bubble explains the published rate. Neither a smaller micro-batch nor less recompute does.\n"
)
RANKING = (
    "\nWhich constants move the ranking: on one node only the time of launches against that of kernels "
    "does (a median of 0.94 to 0.96 with 0.6 or 1.6 times of either); every other constant, changed as "
    "much, moves it by 0.01 at most. On several nodes only tp's messages against kernels do, and the two "
    "models ask for opposite changes: 1.6 times the messages give 0.97 and 0.58, 0.6 times 0.95 and 0.77. "
    "In the 39.1B rows most layouts with tp=2 and some with tp=4 are measured 1.2 to 1.6 times slower than "
    "their neighbours with tp=1 and tp=8, and no constant gives that.\n"
)
FITTED = (
    (
        "kernel slowdown and exposed communication of a framework",
        "its published step times",
        "the row's source: the columns `source left out`",
    ),
    ("launches per layer of Megatron-DeepSpeed", "vTrain on one node", "the row's model: below"),
    ("what a framework keeps for backward", "rows with a figure of memory", "the row's source: below"),
    (
        "half-widths of intervals",
        "left-out step times of the kind",
        "the row's source: `inside the 90% interval`",
    ),
    ("passes of element-wise kernels and of the loss of our runtime", "one H200, below", "nothing"),
    (
        "rates of grouped matmuls, dispatch and overlap of routed layers; shares of a device's best matmul",
        "published step times, by hand",
        "nothing: their left-out errors flatter",
    ),
)
DEEPSEEK = (
    "Its own framework by its report: routed experts in fp8, DualPipe, tokens sent in fp8 to at most four "
    "nodes. Kernels are as of all published runs, grouped matmuls as of Megatron, fp8 as measured on our "
    "runtime. No constant was fitted on this row, but the rate of its grouped matmuls and of fp8 was revised "
    "once after a first result of 1,879. The layer for a second token (MTP, about 3%) is not priced. "
    "Our own runtime has no overlap of all-to-alls and sends each copy of a token; "
    "`plan deepseek-v3 --on h800:2048` prices that.\n"
)
ROOT = Path(__file__).parents[1]
TABLE = ROOT / "tests" / "data" / "published_runs.csv"
LEFT_OUT = ROOT / "tests" / "data" / "left_out.csv"
PAGE = ROOT / "docs" / "reference" / "accuracy.md"
WRONG = Path(__file__).with_name("where_it_is_wrong.md")
PICTURES = ROOT / "docs" / "reference" / "pictures"


@dataclass(frozen=True)
class Priced:
    """One row with its published and its predicted values."""

    line: int
    cells: dict[str, str]
    found: Prediction
    measured: float | None
    left_out: float | None
    kind: str
    half_width: float | None
    """Half-width of the interval from other sources."""
    is_routed: bool
    device: str

    @property
    def ratio(self) -> float:
        """Predicted over published step time."""
        assert self.measured is not None
        return self.found.step_seconds / self.measured

    @property
    def is_target(self) -> bool:
        """Dense, A100 or H100, layout and batch stated."""
        return bool(self.cells["mbs"]) and not self.is_routed and self.device[:4] in ("a100", "h100")


def load() -> tuple[list[Priced], list[tuple[int, str]]]:
    """The rows that can be predicted, and the line and reason of all others."""
    left_out = _left_out()
    priced: list[Priced] = []
    refused: list[tuple[int, str]] = []
    with TABLE.open(newline="", encoding="utf-8") as file:
        for line, cells in enumerate(csv.DictReader(file), start=2):
            try:
                run = read_row(cells, where=f"row {line}")
            except SpecError as error:
                refused.append((line, error.fact))
                continue
            routed = run.workload.model.moe is not None
            found, measured = predict_table_run(run), measured_seconds(cells, run)
            kind, (ratio, half) = kind_of(run.workload, run.cluster), left_out.get(line, (None, None))
            device = run.cluster.device.name
            priced.append(Priced(line, cells, found, measured, ratio, kind, half, routed, device))
    return priced, refused


@dataclass(frozen=True)
class LeftOut:
    """A published time whose source was left out, and the half-width that other sources give its kind."""

    line: int
    kind: str
    ratio: float
    half_width: float

    @property
    def is_inside(self) -> bool:
        """Whether the published time is inside the interval."""
        return max(self.ratio, 1.0 / self.ratio) - 1.0 <= self.half_width


def left_out_times() -> list[LeftOut]:
    """What bench/calibrate.py wrote: published rows, and (as line 0) a sample of vTrain on one node."""
    if not LEFT_OUT.exists():
        return []
    with LEFT_OUT.open(newline="", encoding="utf-8") as file:
        return [
            LeftOut(
                int(row["line"]),
                row["kind"],
                float(row["predicted_over_measured"]),
                float(row["half_width"]),
            )
            for row in csv.DictReader(file)
        ]


def _left_out() -> dict[int, tuple[float, float]]:
    return {time.line: (time.ratio, time.half_width) for time in left_out_times() if time.line}


def _percent(value: float) -> str:
    return f"{100 * value:.1f}%"


def _table(header: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    names = list(header)
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    return "\n".join(lines + ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows])


def _errors(rows: list[Priced]) -> list[str]:
    timed = [row for row in rows if row.measured is not None]
    fitted = np.array([abs(row.ratio - 1.0) for row in timed])
    left = np.array([abs(row.left_out - 1.0) for row in timed if row.left_out is not None])
    cells = [str(len(fitted)), _percent(float(np.median(fitted))), _percent(float(np.quantile(fitted, 0.9)))]
    if not len(left):
        return [*cells, "", ""]
    return [*cells, _percent(float(np.median(left))), _percent(float(np.quantile(left, 0.9)))]


def _by(rows: list[Priced], key: str) -> dict[str, list[Priced]]:
    groups: dict[str, list[Priced]] = defaultdict(list)
    for row in rows:
        if row.measured is not None:
            groups[row.cells[key]].append(row)
    return groups


def _size_name(row: Priced) -> str:
    size = float(row.cells["params_b"])
    return next(
        name
        for limit, name in ((10, "under 10B"), (50, "10B to 50B"), (200, "50B to 200B"), (1e9, "over 200B"))
        if size < limit
    )


def coverage() -> dict[str, tuple[int, float, float, float, float]]:
    """By kind: rows, share inside the interval, its half-width, median and 90th percentile of errors."""
    times, found = left_out_times(), {}
    for kind in KINDS:
        members = [time for time in times if time.kind == kind]
        errors = [abs(time.ratio - 1.0) for time in members]
        inside, half = np.mean([t.is_inside for t in members]), np.median([t.half_width for t in members])
        ends = float(np.median(errors)), float(np.quantile(errors, 0.9))
        found[kind] = (len(members), float(inside), float(half), *ends)
    return found


def memory_errors(rows: list[Priced]) -> list[tuple[Priced, float, float]]:
    """Rows with a published memory figure: reserved and allocated, predicted over published."""
    found: list[tuple[Priced, float, float]] = []
    for row in rows:
        if row.cells["mem_gb"]:
            published = float(row.cells["mem_gb"])
            peak = row.found.peak_stage
            found.append((row, peak.reserved_bytes / GIB / published, peak.allocated_bytes / GIB / published))
    return found


def _pictures(rows: list[Priced]) -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    for name, chosen in (
        ("dense", [row for row in rows if not row.is_routed]),
        ("routed", [row for row in rows if row.is_routed]),
    ):
        series = {
            key: [(row.measured, row.found.step_seconds) for row in members if row.measured]
            for key, members in _by(chosen, "framework").items()
        }
        (PICTURES / f"accuracy_{name}.svg").write_text(
            scatter_svg(f"{name} models, step time", series), encoding="utf-8"
        )
    groups = vtrain_groups()
    pairs = {
        f"{gpus} A100": [
            (float(m), float(p))
            for g in groups
            if g.num_devices == gpus
            for m, p in zip(g.measured, g.predicted, strict=True)
        ]
        for gpus in (2, 4, 8)
    }
    (PICTURES / "accuracy_vtrain.svg").write_text(scatter_svg("vTrain, one node", pairs), encoding="utf-8")


def _compared(rows: list[Compared], digits: int = 3) -> str:
    return _table(
        ("", "published", "predicted", "ratio"),
        [
            (row.label, f"{row.published:.{digits}g}", f"{row.predicted:.{digits}g}", f"{row.ratio:.2f}")
            for row in rows
        ],
    )


def _time_section(rows: list[Priced]) -> list[str]:
    header = ("rows", "n", "median", "90th percentile", "median, source left out", "90th, source left out")
    groups = {
        "dense, A100 and H100, layout and batch stated": [row for row in rows if row.is_target],
        "dense, other devices": [
            row for row in rows if not row.is_routed and row.device[:4] not in ("a100", "h100")
        ],
        "routed (MoE)": [row for row in rows if row.is_routed],
    }
    kinds = [
        (KINDS[kind], n, _percent(median), _percent(last), _percent(inside), _percent(half))
        for kind, (n, inside, half, median, last) in coverage().items()
    ]
    constants = [
        (
            name,
            f"{stack.kernel_slowdown:g}",
            f"{stack.exposed_communication:g}",
            sum(r.cells["framework"] == name for r in rows),
        )
        for name, stack in frameworks().items()
    ]
    return [
        "## Step time\n",
        _table(header, [(name, *_errors(members)) for name, members in groups.items()]),
        "\n### By kind of run, sources left out\n",
        "The interval of a time comes from the times of its kind that other sources published; its constants "
        "come from other sources too. One node: five published rows and each 24th of vTrain's.\n",
        _table(("kind", "n", "median", "90th percentile", "inside the 90% interval", "half-width"), kinds),
        "",
        "![Dense models](pictures/accuracy_dense.svg) ![Routed models](pictures/accuracy_routed.svg)\n",
        "### By framework\n",
        _table(
            header, [(name, *_errors(members)) for name, members in sorted(_by(rows, "framework").items())]
        ),
        "\nTwo constants are fitted per framework; one where it has fewer than five rows.\n",
        _table(("framework", "kernel slowdown", "exposed communication", "rows"), constants),
        "\n### By source\n",
        _table(header, [(name, *_errors(members)) for name, members in sorted(_by(rows, "source").items())]),
        "\n### By size\n",
        _table(header, [(name, *_errors(members)) for name, members in sorted(_by_size(rows).items())]),
    ]


def _by_size(rows: list[Priced]) -> dict[str, list[Priced]]:
    groups: dict[str, list[Priced]] = defaultdict(list)
    for row in rows:
        if row.measured is not None and row.cells["params_b"]:
            groups[_size_name(row)].append(row)
    return groups


def _vtrain_section() -> list[str]:
    groups = vtrain_groups()
    ratios = np.concatenate([group.predicted / group.measured for group in groups])
    rho = [group.spearman for group in groups]
    return [
        "## Ranking of layouts (vTrain, one node of A100)\n",
        f"{len(ratios)} step times of Megatron-DeepSpeed in {len(groups)} groups of one model on one "
        "number of GPUs. The launches per layer of this framework were read off these rows; no other "
        "constant was. "
        f"Spearman correlation inside a group: lowest {min(rho):.3f}, median {np.median(rho):.3f}. The "
        f"layout predicted to train fastest is at most {_percent(max(group.regret for group in groups))} "
        f"slower than the fastest measured one. Median error of the step time "
        f"{_percent(float(np.median(np.abs(ratios - 1))))}, 90th percentile "
        f"{_percent(float(np.quantile(np.abs(ratios - 1), 0.9)))}.\n",
        "![vTrain](pictures/accuracy_vtrain.svg)\n",
        *_ranking_lines(),
    ]


def _ranking_lines() -> list[str]:
    """How well layouts of a model are ranked that no constant was read off."""
    ours, megatron = find_framework("megatron-deepspeed"), find_framework("megatron")
    strange = replace(
        ours,
        kernel_slowdown=megatron.kernel_slowdown,
        exposed_communication=megatron.exposed_communication,
        launches_per_layer=megatron.launches_per_layer,
    )
    alone = [group.spearman for group in vtrain_groups(strange)]
    return [
        f"With the constants and launches of Megatron, which never saw these rows, the lowest correlation is "
        f"{min(alone):.3f} and the median {np.median(alone):.3f}.\n",
        "vTrain on several nodes:\n",
        _table(
            ("model", "layouts", "Spearman", "with Megatron's constants", "without tp = 2 and 4"),
            [
                (f"{size}B on {gpus}", len(rows), *_several_nodes(rows, (ours, strange)))
                for (size, gpus), rows in sorted(vtrain_several_nodes().items())
            ],
        ),
        RANKING,
    ]


def _several_nodes(rows: list[VtrainRow], frameworks: tuple[Framework, ...]) -> list[str]:
    values = [f"{spearman(rows, framework):.3f}" for framework in frameworks]
    plain = [row for row in rows if row.run.at.tp[0] not in (2, 4)]
    return [*values, f"{spearman(plain, frameworks[0]):.3f}"]


def _own_section() -> list[str]:
    rows = our_runtime_table()
    figures: list[str] = []
    for name in ("time_ratio", "allocated_ratio", "reserved_ratio"):
        errors = [abs(getattr(row, name) - 1.0) for row in rows if getattr(row, name) is not None]
        figures.append(_percent(float(np.median(errors))))
    return [
        "## Our own runtime, one H200\n",
        f"Median error of {len(rows)} steps: time {figures[0]}, allocated {figures[1]}, reserved "
        f"{figures[2]}. The passes of its element-wise kernels and of its loss, and which tensors stay, were "
        "settled on these rows.\n",
        _table(
            ("", "seconds", "time", "allocated", "reserved"),
            [
                (
                    row.label,
                    f"{row.step_seconds:.3f}",
                    f"{row.time_ratio:.2f}",
                    "" if row.allocated_ratio is None else f"{row.allocated_ratio:.2f}",
                    "" if row.reserved_ratio is None else f"{row.reserved_ratio:.2f}",
                )
                for row in rows
            ],
        ),
        "",
    ]


def _memory_section(rows: list[Priced]) -> list[str]:
    found = memory_errors(rows)
    reserved = np.array([abs(entry[1] - 1.0) for entry in found])
    allocated = np.array([abs(entry[2] - 1.0) for entry in found])
    return [
        "## Memory\n",
        f"{len(found)} rows publish a figure and can be priced. Most sources do not say whether it is "
        "allocated or reserved, nor of which rank. Median error: reserved "
        f"{_percent(float(np.median(reserved)))}, allocated {_percent(float(np.median(allocated)))}.\n",
        _table(
            ("row", "framework", "layout", "published", "reserved", "allocated", "fits", "note"),
            [_memory_row(row, first, second) for row, first, second in found],
        ),
        "",
    ]


def _memory_row(row: Priced, reserved: float, allocated: float) -> tuple[object, ...]:
    cells = row.cells
    layout = f"tp{cells['tp']} pp{cells['pp']} dp{cells['dp']} zero{cells['zero']} mbs{cells['mbs']}"
    published = float(cells["mem_gb"])
    note = "published: out of memory" if "; OOM" in cells["notes"] else ""
    verdict = "yes" if row.found.fits else "no"
    figures = [f"{ratio * published:.1f} ({ratio:.2f})" for ratio in (reserved, allocated)]
    return (row.line, cells["framework"], layout, f"{published:.1f}", *figures, verdict, note)


def _fitted_section(rows: list[Priced]) -> list[str]:
    """Which rows chose which constants, and the errors of those that did not."""
    memory = memory_left_out(memory_rows(rows))
    reserved, allocated = _medians([(one.reserved_ratio, one.allocated_ratio) for one in memory])
    as_is = " and ".join(_medians([entry[1:] for entry in memory_errors(rows)]))
    several = {f"{size}B on {gpus}": found for (size, gpus), found in sorted(vtrain_several_nodes().items())}
    one_node, nodes = one_node_rankings(), several_nodes_rankings(several)
    ranking = [
        (
            each.label,
            each.layouts,
            f"{each.chosen:g}",
            f"{each.spearman:.3f}",
            f"{each.spearman_by_own_rows:.3f}",
        )
        for each in (*one_node, *nodes)
    ]
    head = (
        "model",
        "layouts",
        "chosen by the others",
        "Spearman, left out",
        "Spearman, chosen by these rows",
    )
    return [
        "## Which rows are fitted, and which left out\n",
        _table(("chosen", "on", "left out for the figures of this page"), FITTED),
        "\nRanking: on one node the launches per layer of Megatron-DeepSpeed are chosen by the rows of all "
        "other models (by median correlation), on several nodes the time of messages is.\n",
        _table(head, ranking),
        "\nMemory of other frameworks, with their facts chosen by the rows of other sources "
        f"({len(MEMORY_FACTS)} combinations): median error reserved {reserved}, allocated {allocated}; with "
        f"the facts as they stand {as_is}.\n",
    ]


def _medians(ratios: Iterable[tuple[float, float]]) -> list[str]:
    """Median errors of reserved and allocated memory."""
    return [
        _percent(float(np.median(np.abs(np.array(column) - 1.0)))) for column in zip(*ratios, strict=True)
    ]


def memory_rows(rows: list[Priced]) -> list[MemoryRow]:
    """The rows with a published figure of memory."""
    return [
        MemoryRow(
            row.line,
            row.cells["source"],
            read_row(row.cells, where=f"row {row.line}"),
            float(row.cells["mem_gb"]),
        )
        for row in rows
        if row.cells["mem_gb"]
    ]


def page(rows: list[Priced], refused: list[tuple[int, str]]) -> str:
    """The accuracy page."""
    reasons: dict[str, list[str]] = defaultdict(list)
    for line, reason in refused:
        reasons[reason].append(str(line))
    parts = [
        "# Accuracy of predictions\n",
        "<!-- Written by bench/accuracy.py; run bench/calibrate.py before it. -->\n",
        "Predicted against published: 323 runs collected from papers, READMEs and release notes "
        "(`tests/data/published_runs.csv`), 1,440 step times of vTrain (VIA-Research, MIT licence), and the "
        "tables of the course decks. A prediction reads neither the model's name nor the source, except for "
        "a release of the software. Errors are "
        "|predicted / published - 1|; the last columns give them with every row of the same source left out "
        "of the fit.\n",
        *_time_section(rows),
        "",
        *_vtrain_section(),
        *_memory_section(rows),
        *_fitted_section(rows),
        *_own_section(),
        "## Tables of the course decks\n",
        "### Megatron weak scaling, TFLOP/s per GPU with recompute counted\n",
        _compared(megatron_table()),
        f"\n### Leonardo, TFLOP/s relative to the first row\n\nAssumed: {LEONARDO_ASSUMED}.\n",
        _compared(leonardo_table()),
        LEONARDO_70B,
        _compared(leonardo_what_if()),
        f"\n### Fine-tuning on Leonardo, speed-up\n\nAssumed: {FINE_TUNING_ASSUMED}. The 70B model on 3 GPUs "
        f"{'fits' if fine_tuning_fits(3) else 'does not fit'} (published: out of memory), on 4 it "
        f"{'fits' if fine_tuning_fits(4) else 'does not fit'}.\n",
        _compared(fine_tuning_table()),
        "\n### GPT-3 family, days for 300 B tokens on 480 GPUs\n",
        _compared(gpt3_table()),
        "\n### Durations of 300 B tokens at 140 TFLOP/s per GPU\n",
        _compared(duration_table()),
        "\n## DeepSeek-V3 on 2,048 H800\n",
        DEEPSEEK,
        _compared(deepseek_table()),
        "",
        WRONG.read_text(encoding="utf-8"),
        f"## Rows that are not predicted ({len(refused)})\n",
        _table(("why", "rows"), [(reason, ", ".join(lines)) for reason, lines in sorted(reasons.items())]),
    ]
    return "\n".join(parts) + "\n"


def main() -> None:
    """Write the page and its pictures."""
    rows, refused = load()
    _pictures(rows)
    PAGE.write_text(page(rows, refused), encoding="utf-8")


if __name__ == "__main__":
    main()
