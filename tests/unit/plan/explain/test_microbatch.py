"""`check` names a larger micro-batch that fits and is faster."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.run_files import DENSE

from meshwright.cli.main import run
from meshwright.hardware import cluster_of
from meshwright.hardware.machine import this_machine
from meshwright.plan.explain.microbatch import advise_local_microbatch, advise_microbatch
from meshwright.plan.predict import predict_run
from meshwright.spec.text import parse_run

GPT = """
model: gpt2-124m
schedule: {num_steps: 100}
precision: {compute: bf16}
data: {synthetic: {}, sequence_length: 512, batch_sequences: 64}
"""


def test_the_micro_batch_that_is_named_fits_and_is_faster():
    small, cluster = parse_run(GPT).require_valid(), cluster_of("h100:1")
    [note] = advise_microbatch(small, cluster)
    size = int(note.hint.removeprefix("data.microbatch_sequences="))
    better = small.with_(data=small.data.with_(microbatch_sequences=size))
    assert size > 1 and predict_run(better, cluster).fits
    assert predict_run(better, cluster).step_seconds < predict_run(small, cluster).step_seconds
    assert advise_microbatch(better, cluster) == []


def test_a_run_on_the_cpu_is_compared_with_the_memory_of_this_machine():
    tiny = parse_run(DENSE, ["device=cpu"]).require_valid()
    [note] = advise_local_microbatch(tiny, this_machine())
    assert note.hint == "data.microbatch_sequences=16"
    assert advise_local_microbatch(tiny, replace(this_machine(), free_memory_bytes=2**28)) == []


def test_check_prints_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "run.yaml").write_text(GPT)
    assert run(["check", str(tmp_path / "run.yaml"), "--on", "h100:1", "--json"]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert any(note["where"] == "data.microbatch_sequences" and "fits with" in note["fact"] for note in notes)
