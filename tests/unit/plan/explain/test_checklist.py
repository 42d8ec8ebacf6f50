"""Each advisor of `check --on` with a run it leaves alone and a run it speaks about."""

import json

import pytest

from meshwright.cli.main import run as run_cli
from meshwright.hardware import cluster_of
from meshwright.plan.explain.checklist import CLUSTER_ADVISORS, advise_cluster
from meshwright.plan.explain.prices import with_change
from meshwright.plan.predict import predict_run
from meshwright.spec.advice import Advice
from meshwright.spec.text import load_run

LLAMA = "llama-3.1-8b-8gpu"
TP8 = ["parallel.dp_shard=1", "parallel.tp=8", "parallel.zero=0"]
GPIPE = ["parallel.pp=8", "parallel.dp_shard=1", "parallel.zero=0", "parallel.schedule=gpipe"]
SMALL = ["data.microbatch_sequences=1", "data.sequence_length=512"]
# advisor -> (run, words it leaves alone, words it speaks about, cluster, part of the note)
CASES = {
    "tp_stays_on_a_node": (LLAMA, ["parallel.tp=1"], TP8, "leonardo:2", "parallel.tp=4 parallel.dp_shard=2"),
    "matmuls_use_tensor_cores": (
        "llama-3.2-1b-1gpu",
        [],
        ["device=auto", *(f"precision.{key}=fp32" for key in ("compute", "weights", "gradients")), *SMALL],
        "h100:1",
        "precision.compute=tf32",
    ),
    "recompute_is_needed": (LLAMA, [], ["memory.recompute=full"], "h200:8", "memory.recompute=none"),
    "zero_stage_is_needed": (
        "llama-3.2-1b-1gpu",
        [],
        ["parallel.dp_shard=8", "parallel.zero=3", "data.batch_sequences=8", *SMALL],
        "h100:8",
        "parallel.zero=1",
    ),
    "blocks_are_compiled": ("llama-3.2-1b-1gpu", [], ["compile=false"], "h100:1", "compile=true"),
    "matmuls_fill_tiles_and_waves": (
        "llama-3.2-1b-1gpu",
        [],
        SMALL,
        "h100:1",
        "a larger data.microbatch_sequences",
    ),
    "tokens_suit_the_size": (
        LLAMA,
        ["schedule.num_steps=400K"],
        [],
        "h100:8",
        "to fine-tune, name the pre-trained weights",
    ),
}
BY_NAME = {advisor.__name__: advisor for advisor in CLUSTER_ADVISORS}


def notes(name: str, words: list[str]) -> list[Advice]:
    recipe, _, _, on, _ = CASES[name]
    run = load_run(recipe, words)
    return list(BY_NAME[name](run, cluster_of(on).with_devices(run.parallel.num_ranks)))


def test_every_advisor_has_a_case():
    assert list(CASES) == list(BY_NAME)


@pytest.mark.parametrize("name", CASES)
def test_silent(name: str):
    assert notes(name, CASES[name][1]) == []


@pytest.mark.parametrize("name", CASES)
def test_speaking(name: str):
    (note,) = notes(name, CASES[name][2])
    assert CASES[name][4] in note.hint
    assert note.cost is None or 0.01 < note.cost < 0.9


def test_the_change_of_a_note_saves_what_the_note_says():
    run, cluster = load_run(LLAMA, ["memory.recompute=full"]), cluster_of("h200:8")
    (note,) = [note for note in advise_cluster(run, cluster) if note.where == "memory.recompute"]
    changed = predict_run(with_change(run, dict(note.change)), cluster)
    saved = 1 - changed.step_seconds / predict_run(run, cluster).step_seconds
    assert changed.fits and note.cost == pytest.approx(saved)
    assert f"a step is {saved:.0%} shorter" in note.fact


def test_the_command_prints_costs(capsys: pytest.CaptureFixture[str]):
    assert run_cli(["check", "llama-3.2-1b-1gpu", "compile=false", "--on", "h100:1", "--json"]) == 0
    found = {note["where"]: note["cost"] for note in json.loads(capsys.readouterr().out)["notes"]}
    assert 0.1 < found["compile"] < 0.6 and found["schedule.num_steps"] is None


def test_adapters_are_not_trained_from_scratch():
    """A plan leaves the folder of the pre-trained weights open."""
    adapter = ["adapter.rank=8", "adapter.alpha=8", "precision.weights=fp32"]
    assert notes("tokens_suit_the_size", adapter) == []
