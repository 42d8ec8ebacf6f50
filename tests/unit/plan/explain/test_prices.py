"""Notes with their price."""

from tests.support.run_files import VALID

from meshwright.hardware import parse_cluster
from meshwright.plan.explain.prices import with_prices
from meshwright.spec.advice import Advice, advise
from meshwright.spec.text import parse_run

GPU = ["device=cuda", "precision.compute=bf16", "model=llama-3.2-1b", "data.sequence_length=4096"]


def _notes(*overrides: str) -> list[Advice]:
    run = parse_run(VALID["dense"], [*GPU, *overrides]).require_valid()
    return with_prices(advise(run), run, parse_cluster(f"h200:{run.parallel.num_ranks}"))


def test_an_odd_mlp_says_what_it_costs() -> None:
    (note,) = [note for note in _notes("model.mlp.width=7201") if note.where == "model.mlp.width"]
    assert "shorter on NVIDIA H200" in note.fact
    assert "no more than" not in note.fact
    assert note.hint == "model.mlp.width=7232 fills the tiles"


def test_an_odd_vocabulary_costs_little_since_the_head_pads_it() -> None:
    (note,) = [note for note in _notes("model.vocab_size=32003") if note.where == "model.vocab_size"]
    assert "no more than 0.5% shorter" in note.fact


def test_other_notes_are_left_as_they_are() -> None:
    notes = [note for note in _notes("parallel.pp=8") if not note.change]
    run = parse_run(VALID["dense"], [*GPU, "parallel.pp=8"]).run
    assert notes == [note for note in advise(run) if not note.change]
