"""The 1,440 single-node step times of vTrain (VIA-Research, MIT licence) against predictions.

Megatron-DeepSpeed on 2 to 8 A100, fp16, full recompute, 1F1B; tests/data/vtrain_single_node_a100.csv.
"""

import csv
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from meshwright.hardware import parse_cluster
from meshwright.plan.framework import Framework
from meshwright.plan.time.step_time import step_cost
from meshwright.plan.workload.layouts import FULL, layouts
from meshwright.plan.workload.workload import Workload
from meshwright.published.frameworks import find_framework
from meshwright.published.table import TableRun, measured_seconds, read_row
from meshwright.spec.model import AttentionSpec, MlpSpec, ModelSpec, RopeSpec

TABLE = Path(__file__).parents[1] / "tests" / "data" / "vtrain_single_node_a100.csv"
PUBLISHED = Path(__file__).parents[1] / "tests" / "data" / "published_runs.csv"
VOCAB_SIZE = 50257


@dataclass(frozen=True)
class VtrainGroup:
    """All measured layouts of one model on one number of GPUs."""

    num_devices: int
    width: int
    num_layers: int
    measured: np.ndarray
    predicted: np.ndarray
    batch: np.ndarray

    @property
    def spearman(self) -> float:
        """Rank correlation of predicted and measured step times."""
        ranks = [np.argsort(np.argsort(values)) for values in (self.measured, self.predicted)]
        return float(np.corrcoef(np.stack(ranks))[0, 1])

    @property
    def regret(self) -> float:
        """How much slower, in sequences per second, the layout predicted best is than the measured best."""
        rates = self.batch / self.measured
        chosen = int((self.batch / self.predicted).argmax())
        return float(rates.max() / rates[chosen] - 1.0)


def _model(width: int, heads: int, layers: int, sequence: int) -> ModelSpec:
    attention = AttentionSpec(num_heads=heads, num_kv_heads=heads, head_width=width // heads)
    return ModelSpec(
        vocab_size=VOCAB_SIZE,
        num_layers=layers,
        width=width,
        max_positions=sequence,
        attention=attention,
        mlp=MlpSpec(kind="gelu", width=4 * width),
        norm="layer",
        rope=RopeSpec(),
        tied_head=True,
        dropout=0.1,
    )


def vtrain_groups(framework: Framework | None = None) -> list[VtrainGroup]:
    """All groups; the layouts of a group are predicted in one call."""
    priced_as = framework or find_framework("megatron-deepspeed")
    with TABLE.open(newline="", encoding="utf-8") as file:
        rows = [[float(cell) for cell in row] for row in list(csv.reader(file))[1:]]
    by_model: dict[tuple[int, ...], list[list[float]]] = defaultdict(list)
    for row in rows:
        gpus, batch, micro, width, heads, layers, sequence, tp, dp, pp, milliseconds = row
        key = (int(gpus), int(width), int(heads), int(layers), int(sequence))
        by_model[key].append([batch, micro, tp, dp, pp, milliseconds / 1e3])
    return [_group(key, np.array(members), priced_as) for key, members in sorted(by_model.items())]


def _group(key: tuple[int, ...], members: np.ndarray, framework: Framework) -> VtrainGroup:
    gpus, width, heads, layers, sequence = key
    batch, micro, tp, dp, pp = members[:, :5].astype(np.int64).T
    at = layouts(
        tp=tp,
        pp=pp,
        dp_shard=dp,
        microbatch_sequences=micro,
        num_microbatches=batch // (micro * dp),
        recompute=FULL,
    )
    workload = Workload(_model(width, heads, layers, sequence), sequence, "fp16", attention_kernel="unfused")
    cluster = parse_cluster("dgx-a100:1").with_devices(gpus)
    cost = step_cost(workload, at, cluster, framework)
    return VtrainGroup(gpus, width, layers, members[:, 5], cost.step_seconds, batch.astype(np.float64))


@dataclass(frozen=True)
class VtrainRow:
    """A published layout on several nodes with its measured seconds."""

    run: TableRun
    seconds: float


def vtrain_several_nodes() -> dict[tuple[str, str], list[VtrainRow]]:
    """The rows of vTrain in the table of published runs, by size in billions and number of GPUs."""
    found: dict[tuple[str, str], list[VtrainRow]] = defaultdict(list)
    with PUBLISHED.open(newline="", encoding="utf-8") as file:
        for cells in csv.DictReader(file):
            if cells["source"].startswith("vTrain"):
                run = read_row(cells, where="vTrain")
                seconds = measured_seconds(cells, run)
                assert seconds is not None
                found[cells["params_b"], cells["gpus"]].append(VtrainRow(run, seconds))
    return dict(found)


def spearman(rows: list[VtrainRow], framework: Framework) -> float:
    """Rank correlation of predicted and measured step times."""
    predicted = [
        float(step_cost(row.run.workload, row.run.at, row.run.cluster, framework).step_seconds[0])
        for row in rows
    ]
    ranks = [np.argsort(np.argsort(values)) for values in (predicted, [row.seconds for row in rows])]
    return float(np.corrcoef(np.stack(ranks))[0, 1])
