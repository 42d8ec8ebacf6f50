"""`plan --budget`: sizes and tokens of a budget, with the loss expected of each."""

import json

import pytest

from meshwright.cli.main import run as run_command
from meshwright.errors import SpecError
from meshwright.hardware import cluster_of
from meshwright.plan.budget import budget_hours, scaled
from meshwright.plan.scaling_law import CHINCHILLA
from meshwright.spec.families import family
from meshwright.spec.parameters import num_parameters

H100 = cluster_of("h100:8")


@pytest.mark.parametrize(
    ("text", "hours"),
    [("80 gpu-hours", 10), ("10 gpu-days", 30), ("2 days", 48), ("1 weeks", 168), ("1,600 money", 100)],
)
def test_budgets(text: str, hours: float):
    assert budget_hours(text, H100, 2.0) == pytest.approx(hours)


@pytest.mark.parametrize("text", ["", "much", "-3 days", "0 days", "10", "3 moons", "1.2.3 days"])
def test_what_is_no_budget(text: str):
    with pytest.raises(SpecError, match="is no budget"):
        budget_hours(text, H100, None)


def test_money_needs_a_price():
    with pytest.raises(SpecError, match="needs a price"):
        budget_hours("100 money", H100, None)


@pytest.mark.parametrize("parameters", [3e8, 3e9, 6e10])
def test_a_scaled_model_has_about_the_size(parameters: float):
    model = scaled(family("llama-3.1-8b"), parameters)
    assert num_parameters(model) == pytest.approx(parameters, rel=0.2)
    assert model.attention.num_heads % model.attention.num_kv_heads == 0


def test_the_table_is_the_law_at_the_predicted_speed(capsys: pytest.CaptureFixture[str]):
    assert (
        run_command(["plan", "llama-3.2-1b", "--on", "h100:8", "--budget", "2000 gpu-hours", "--json"]) == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["hours"] == 250 and "2404.10102" in found["source"]
    rows = found["alternatives"]
    assert [row["parameters"] for row in rows] == sorted(row["parameters"] for row in rows)
    for row in rows:
        assert row["tokens"] == pytest.approx(row["tokens_per_second"] * 3600 * 250)
        assert row["expected_loss"] == pytest.approx(CHINCHILLA.loss(row["parameters"], row["tokens"]))
    losses = [row["expected_loss"] for row in rows]
    assert 0 < losses.index(min(losses)) < len(rows) - 1  # both ends are worse


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["llama-3.2-1b", "--tokens", "1B"], "--tokens has no effect with --budget"),
        (["mixtral-8x7b"], "routed experts"),
    ],
)
def test_what_cannot_be_asked(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]):
    assert run_command(["plan", *arguments, "--on", "h100:8", "--budget", "1 days"]) == 2
    assert text in capsys.readouterr().err
