"""`meshwright.plan`, `predict`, `check` and `train` from Python, and what a notebook shows of them."""

import json
import subprocess
import sys
import xml.dom.minidom
from pathlib import Path

import pytest

import meshwright
from meshwright.api.questions import PlanSettings
from meshwright.api.results import PlanResult
from meshwright.errors import PlanError, SpecError
from meshwright.hardware import parse_cluster
from meshwright.spec.text import load_run

SHORT = ["parallel.dp_replicate=1", "schedule.num_steps=3", "schedule.warmup_steps=1"]


@pytest.fixture(scope="module")
def planned() -> PlanResult:
    return meshwright.plan("Qwen/Qwen3-0.6B", on="h100:8", seq=2048, tokens="30B", pins={"zero": [1, 2]})


def _require_well_formed(html: str) -> None:
    assert html.startswith("<style>") and "<script" not in html
    xml.dom.minidom.parseString(f"<html>{html}</html>")


def test_a_plan_is_the_choice_of_the_command_line(planned: PlanResult) -> None:
    assert planned.run.parallel.num_ranks == 8 and planned.run.parallel.zero in (1, 2)
    assert planned.top[0] is planned.best and planned.step_seconds > 0
    assert planned.why and any("bf16 compute" in each for each in planned.assumed)
    assert json.dumps(planned.to_dict())
    assert planned.layout in repr(planned)


def test_a_notebook_shows_tables_and_pictures(planned: PlanResult) -> None:
    html = planned._repr_html_()
    _require_well_formed(html)
    assert html.count("<svg") == 2 and "<table>" in html and planned.layout in html
    predicted = meshwright.predict(planned, on="h100:8")
    _require_well_formed(predicted._repr_html_())
    assert predicted.step_seconds == pytest.approx(planned.step_seconds, rel=1e-6)
    assert predicted.fits and "MFU" in repr(predicted)


def test_a_plan_is_saved_as_a_run_file(planned: PlanResult, tmp_path: Path) -> None:
    assert load_run(planned.save(tmp_path / "run.yaml")) == planned.run
    assert "<svg" in planned.report(tmp_path / "plan.html").read_text()


def test_the_kind_of_fine_tuning_is_chosen_with_reasons() -> None:
    tuned = meshwright.plan("llama-3.1-8b", on="t4:1", seq=2048, finetune="auto", pins={"adapter.rank": 8})
    adapter = tuned.run.adapter
    assert adapter is not None and (adapter.base, adapter.rank) == ("nf4", 8)
    full, lora, qlora = tuned.finetune_reasons
    assert "full fine-tuning does not fit" in full and "lora" in lora and "qlora" in qlora
    smaller = meshwright.plan("Qwen/Qwen3-0.6B", on="h100:1", finetune="auto", pins={"adapter.rank": 8})
    assert smaller.run.adapter is None
    assert smaller.finetune_reasons[-1] == "adapter.rank=8 has no effect: full fine-tuning has no adapters"
    with pytest.raises(SpecError, match="--finetune is 'dora'"):
        meshwright.plan("llama-3.1-8b", on="t4:1", finetune="dora")


def test_predict_takes_overrides_and_a_cluster(planned: PlanResult) -> None:
    cluster = parse_cluster("h100:8")
    slower = meshwright.predict(planned.run, on=cluster, overrides=["memory.recompute=full"])
    assert slower.step_seconds > planned.step_seconds


def test_check_lists_violations_and_notes(tmp_path: Path) -> None:
    broken = meshwright.check("demo", overrides=["parallel.tp=3"])
    assert not broken.is_valid and broken.run is None
    assert "parallel.tp" in repr(broken)
    _require_well_formed(broken._repr_html_())
    valid = meshwright.check("demo", overrides=SHORT)
    assert valid.is_valid and valid.run is not None
    _require_well_formed(valid._repr_html_())
    assert not meshwright.check(tmp_path / "none.yaml").is_valid


def test_wrong_input_raises(planned: PlanResult) -> None:
    with pytest.raises(SpecError, match="plan has no setting 'sequence'"):
        meshwright.plan("qwen3-0.6b", on="h100:8", sequence=3)  # type: ignore[call-arg]
    with pytest.raises(SpecError, match="is not a number"):
        meshwright.plan("qwen3-0.6b", on="h100:8", tokens="many")
    with pytest.raises(PlanError, match="does not fit"):
        meshwright.plan("llama-3.1-70b", on="h100:1", pins={"memory.offload": "[]"})
    with pytest.raises(SpecError, match="16 devices"):
        meshwright.predict(planned, on="h100:16")
    assert set(PlanSettings.__annotations__) >= {"seq", "tokens", "pins"}


def test_train_returns_what_was_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stopped = meshwright.train("demo", directory=tmp_path / "run", overrides=SHORT, stop_after=2)
    assert not stopped.is_finished and list(stopped.history.steps) == [1, 2]
    assert 0 < stopped.loss < 10 and "2 of 3" in repr(stopped)
    _require_well_formed(stopped._repr_html_())
    assert "step" in capsys.readouterr().out


def test_import_is_quick_and_needs_no_torch() -> None:
    code = (
        "import sys, meshwright; assert len([m for m in sys.modules if m.startswith('meshwright')]) == 1\n"
        "from meshwright.plan.search import pins\n"
        "found = meshwright.plan('qwen3-0.6b', on='h100:1', seq=2048)\n"
        "meshwright.check('demo'); assert callable(meshwright.train); found._repr_html_()\n"
        "assert 'torch' not in sys.modules and 'plan' in dir(meshwright)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
