"""Recipes are the planner's own choices: none is much slower than the plan for its model and devices."""

import pytest

from meshwright.hardware.catalogue import parse_cluster
from meshwright.plan.make_plan import make_plan
from meshwright.plan.search.candidate import candidate_of, layout_text
from meshwright.plan.search.pins import parse_pins
from meshwright.plan.search.request import Request, fill_request
from meshwright.plan.search.search import TIE_FRACTION
from meshwright.spec.text import find_run_file, load_run, recipe_names

ON_CPU = ("demo",)
PER_NODE = 8
ON_24_GB = ("llama-3.1-8b-lora-24gb", "llama-3.1-8b-qlora-24gb", "llama-3.1-70b-qlora-8gpu")
"""They are for small cards, and leave a part of the memory free: with adapters it is predicted by formula."""
SLACK_ON_24_GB = 0.2


@pytest.mark.parametrize("name", [name for name in recipe_names() if name not in ON_CPU])
def test_no_recipe_is_much_slower_than_its_plan(name: str) -> None:
    """Every other recipe is for GPUs of 80 GB, eight to a node."""
    run = load_run(name)
    ranks = run.parallel.num_ranks
    cluster = parse_cluster(f"{'rtx4090' if name in ON_24_GB else 'h100'}:{ranks}")
    assert cluster.devices_per_node == min(ranks, PER_NODE)
    recipe = candidate_of(run, cluster)
    # The planner compiles unless it is told not to, and a recipe file has told it.
    filled = fill_request(Request(str(find_run_file(name)), cluster, parse_pins(["compile=true"])))
    best = make_plan(filled.question).best
    limit = best.step_seconds * (1.0 + (SLACK_ON_24_GB if name in ON_24_GB else TIE_FRACTION))
    assert recipe.step_seconds <= limit, f"{layout_text(run)}; the plan: {layout_text(best.run)}"
    assert recipe.device_bytes <= filled.question.memory_budget_bytes
