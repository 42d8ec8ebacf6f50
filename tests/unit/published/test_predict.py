"""Prediction of a table of published runs, and the errors of a bad table."""

import csv
import io
from pathlib import Path

import pytest

from meshwright.errors import SpecError
from meshwright.plan.workload.layouts import ACTIVATION, CORE_ATTENTION, EXPERTS, FULL, MLP, NORMS
from meshwright.published.predict import PREDICTED_COLUMNS, predict_rows, predict_table
from meshwright.published.table import read_row
from meshwright.published.table_text import parse_network, parse_precision, parse_recompute

ROW = {
    "framework": "megatron",
    "params_b": "8.03",
    "layers": "32",
    "hidden": "4096",
    "ffn": "14336",
    "heads": "32",
    "kv_heads": "8",
    "vocab": "128256",
    "seq": "8192",
    "gpu": "H100 SXM 80GB",
    "gpus": "16",
    "gpus_per_node": "8",
    "network": "NVLink4 + 8x400Gb/s IB per node",
    "tp": "2",
    "pp": "1",
    "mbs": "1",
    "gbs": "128",
    "zero": "1",
    "recompute": "none",
    "precision": "bf16",
}


def test_a_row_has_the_columns_of_the_contract() -> None:
    (cells,) = predict_rows([ROW])
    assert tuple(cells) == PREDICTED_COLUMNS
    assert cells["error"] == ""
    assert float(cells["pred_step_time_low_s"]) < float(cells["pred_step_time_s"])
    assert float(cells["pred_step_time_s"]) < float(cells["pred_step_time_high_s"])
    assert float(cells["pred_alloc_gb"]) < float(cells["pred_mem_gb"])
    tokens = float(cells["pred_tokens_s_gpu"]) * 16 * float(cells["pred_step_time_s"])
    assert tokens == pytest.approx(128 * 8192, rel=1e-3)


def test_neither_source_nor_model_is_read() -> None:
    named = {**ROW, "source": "a paper", "model": "a model", "step_time_s": "1", "tokens_s_gpu": "1"}
    assert predict_rows([named]) == predict_rows([ROW])


def test_the_flop_convention_moves_tflops_only() -> None:
    strict, noncausal = predict_rows([ROW, {**ROW, "notes": "flop=noncausal; something"}])
    assert strict["pred_step_time_s"] == noncausal["pred_step_time_s"]
    # 57.9 GF per token against 51.5 for Llama3-8B at 8K.
    ratio = float(noncausal["pred_tflops_per_gpu"]) / float(strict["pred_tflops_per_gpu"])
    assert ratio == pytest.approx(57.9 / 51.5, rel=0.005)


def test_what_a_row_leaves_out_is_listed() -> None:
    short = {k: v for k, v in ROW.items() if k not in ("mbs", "zero", "recompute", "network")}
    (cells,) = predict_rows([short])
    assert cells["error"] == ""
    for name in ("mbs=1", "zero=1", "recompute=none", "network="):
        assert name in cells["assumed"]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"layers": "thirty"}, "layers = 'thirty' is not a number"),
        ({"layers": ""}, "layers is not stated"),
        ({"tp": ""}, "tp and pp are not stated"),
        ({"tp": "3"}, "does not divide gpus = 16"),
        ({"dp": "5"}, "dp = 5"),
        ({"gbs": "3"}, "does not divide gbs = 3"),
        ({"gpu": "H1000"}, "unknown device"),
        ({"framework": "megaton"}, "unknown framework"),
        ({"gpus": "-4"}, "gpus"),
        ({"seq": "1e400"}, "seq"),
        ({"seq": "4096.5"}, "seq"),
        ({"heads": "33"}, "heads = 33"),
        ({"ep": "4"}, "experts"),
        ({"recompute": "a bit"}, "recompute = 'a bit'"),
        ({"precision": "int3"}, "precision = 'int3'"),
        ({"params_b": "many"}, "params_b = 'many'"),
        ({"gpu": "A100 SXM 80GB", "precision": "fp8"}, "no fp8 rate"),
    ],
)
def test_a_row_that_cannot_be_predicted_has_the_reason(change: dict[str, str], text: str) -> None:
    bad, good = predict_rows([{**ROW, **change}, ROW])
    assert text in bad["error"]
    assert bad["pred_step_time_s"] == ""
    assert good["error"] == ""


@pytest.mark.parametrize(
    ("text", "precision"),
    [
        ("FP8-CS", "fp8"),
        ("fp8 (delayed, hybrid; not restated)", "fp8"),
        ("FP8-MX", "mxfp8"),
        ("MXFP8", "mxfp8"),
        ("NVFP4", "nvfp4"),
        ("16-bit (bf16 assumed)", "bf16"),
        ("bf16 (fp32 grad accumulation)", "bf16"),
        ("fp16 (assumed)", "fp16"),
    ],
)
def test_published_precisions(text: str, precision: str) -> None:
    assert parse_precision(text) == precision


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("none in script", 0),
        ("full (implied by FLOP factor 4)", FULL),
        ("core_attn", CORE_ATTENTION),
        ("selective(core attention)+sequence parallel", CORE_ATTENTION),
        ("core_attn+layernorm", CORE_ATTENTION | NORMS),
        ("mlp+core_attn", MLP | CORE_ATTENTION),
        ("moe_act", ACTIVATION),
        ("moe+layernorm", EXPERTS | NORMS),
        ("selective", NORMS | ACTIVATION),
    ],
)
def test_published_recompute(text: str, bits: int) -> None:
    assert parse_recompute(text) == bits


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("NVLink3 + 8x200Gb/s HDR IB per node (Selene)", 25e9),
        ("NVLink3 + 800Gb/s per node (simulator config)", 12.5e9),
        ("NVLink4 + IB 8x50 GB/s per node (stated)", 50e9),
        ("NVLink4 + IB (not stated)", None),
        ("", None),
    ],
)
def test_published_networks(text: str, rate: float | None) -> None:
    assert parse_network(text, 8) == rate


def test_a_routed_model_is_known_by_its_shape() -> None:
    row = {**ROW, "layers": "48", "hidden": "2048", "ffn": "768", "heads": "32", "vocab": "151936", "ep": "8"}
    model = read_row({**row, "params_b": "30.5"}, where="row 2").workload.model
    assert model.moe is not None
    assert (model.moe.num_experts, model.moe.top_k, model.attention.head_width) == (128, 8, 128)


class TestFiles:
    """Reading and writing tables as files."""

    def test_a_table_keeps_its_columns_and_gains_ours(self, tmp_path: Path) -> None:
        path = tmp_path / "rows.csv"
        path.write_text(",".join(["note", *ROW]) + "\n" + ",".join(["mine", *ROW.values()]) + "\n")
        text, _ = predict_table(path)
        (row,) = csv.DictReader(io.StringIO(text))
        assert row["note"] == "mine"
        assert float(row["pred_step_time_s"]) > 0

    def test_a_short_line_is_that_rows_error(self, tmp_path: Path) -> None:
        path = tmp_path / "rows.csv"
        lines = [",".join(ROW), "a,b,c", ",".join(ROW.values())]
        path.write_text("\n".join(lines))
        _, (bad, good) = predict_table(path)
        assert bad["error"] == f"row 2: 3 cells under {len(ROW)} columns"
        assert good["error"] == ""

    @pytest.mark.parametrize(
        ("content", "text"),
        [
            (b"", "is empty"),
            (b"\xff\xfe\x00", "cannot read"),
            (b"gpu,gpu\n1,2\n", "occurs twice"),
            (b"model,speed\na,1\n", "no column 'gpu'"),
        ],
    )
    def test_what_is_no_table_is_an_error(self, tmp_path: Path, content: bytes, text: str) -> None:
        path = tmp_path / "rows.csv"
        path.write_bytes(content)
        with pytest.raises(SpecError, match=text):
            predict_table(path)
