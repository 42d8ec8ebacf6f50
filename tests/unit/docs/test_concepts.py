"""The pages about parallelism say what the program does: rules, pictures, bubbles, bytes, traffic."""

import importlib
import re
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
from tests.support.equivalence import Result, run_case
from tests.support.runs import MODELS, SEQUENCE_LENGTH, tiny_run

from meshwright.plan.time.timeline import StageSeconds, simulate
from meshwright.plan.workload.schedules import SCHEDULES, PipelineShape, actions, peak_in_flight
from meshwright.rehearse.rank_pool import RankPool
from meshwright.spec import ParallelSpec, RunSpec
from meshwright.spec.conditions import CONDITIONS
from meshwright.spec.parameters import num_parameters
from meshwright.spec.rules_memory import MEMORY_RULES
from meshwright.spec.rules_parallel import PARALLEL_RULES

DOCS = Path(__file__).parents[3] / "docs"
CONCEPTS = DOCS / "concepts"
FLOAT64 = 8
# The last one is counted: in the first, a pipeline's ranks also tell each other the shapes they will send.
NUM_STEPS = 2


@pytest.fixture
def drawing(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """docs/draw_parallelism.py, as the script that it is."""
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module("draw_parallelism")


def rows(page: str) -> list[list[str]]:
    """The cells of every table row of a page."""
    lines = (CONCEPTS / page).read_text().splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]


def row(page: str, first: str) -> list[str]:
    """The one row whose first cell is this."""
    found = [cells for cells in rows(page) if cells[0] == first]
    assert len(found) == 1, f"{page} has {len(found)} rows {first!r}"
    return found[0]


# Rules and pictures -------------------------------------------------------------------------------------


REFUSALS = {"parallelism.md": PARALLEL_RULES, "memory.md": MEMORY_RULES}
EACH_REFUSAL = [(page, rule) for page, rules in REFUSALS.items() for rule in rules]


@pytest.mark.parametrize(("page", "rule"), EACH_REFUSAL, ids=lambda one: getattr(one, "__name__", one))
def test_every_refusal_has_its_reason(page, rule):
    assert len(row(page, " ".join(rule.__doc__.split()))[1]) > 10


@pytest.mark.parametrize("page", REFUSALS)
def test_no_refusal_is_made_up(page):
    listed = (
        (CONCEPTS / page).read_text().split("| rule | why |")[1].split("\n\n")[0].strip().splitlines()[1:]
    )
    assert len(listed) == len(REFUSALS[page])


def test_every_condition_of_an_axis_is_listed():
    conditions = [condition for condition in CONDITIONS if condition.key.startswith("parallel.")]
    for condition in conditions:
        assert row("parallelism.md", f"`{condition.key}`")[1] == condition.text
    assert conditions


def test_pictures_are_what_the_script_draws(drawing: ModuleType):
    for name, text in drawing.pictures().items():
        assert (DOCS / name).read_text() == text, f"{name}: run `python docs/draw_parallelism.py`, look at it"


def test_every_picture_is_shown(drawing: ModuleType):
    shown = "\n".join(page.read_text() for page in CONCEPTS.glob("*.md"))
    drawn = [Path(name).name for name in drawing.pictures()]
    assert [name for name in drawn if f"{name})" not in shown] == []


# Numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_table_of_schedules_is_the_simulation(schedule):
    stages, bubble, held = (row("pipeline_parallel.md", f"`{schedule}`")[i] for i in (1, 4, 5))
    shape = PipelineShape(4, 1 if stages == "1" else 2, 8)
    seconds = StageSeconds.uniform(shape.num_stages, forward=1, backward_input=1, backward_weight=1)
    simulated = simulate(schedule, shape, seconds).bubble_overhead
    assert bubble.split()[0] == f"{simulated:.1%}"
    most = max(peak_in_flight(rank) for rank in actions(schedule, shape)) / shape.virtual_stages
    assert float(held) == most


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_formulas_of_schedules_hold_for_other_shapes(schedule):
    stages, bubble, held = row("pipeline_parallel.md", f"`{schedule}`")[1:4]
    for p, m in ((2, 8), (4, 16), (8, 16)):
        for v in {"1": (1,), "v": (2, 4), "2, folded": (2,)}[stages]:
            shape = PipelineShape(p, v, m)
            seconds = StageSeconds.uniform(shape.num_stages, forward=1, backward_input=1, backward_weight=1)
            names = {"p": p, "m": m, "v": v}
            found = simulate(schedule, shape, seconds).bubble_overhead
            assert found == pytest.approx(evaluate(bubble, names))
            most = max(peak_in_flight(rank) for rank in actions(schedule, shape)) / v
            assert most == pytest.approx(evaluate(held, names))


def evaluate(formula: str, names: dict[str, int]) -> float:
    """The value of `(p-1) / (3 m v)`: a space between factors multiplies."""
    for _ in range(2):
        formula = re.sub(r"([\w)]) ([\w(])", r"\1*\2", formula)
    return float(eval(formula, {"__builtins__": {}}, names))


def elements(results: list[Result], kind: str, axis: str) -> int:
    """What the first rank sends in calls of this kind over this axis, norm excepted."""
    calls = results[0].communication
    counted = ((size, n) for (kind_, axis_, size), n in calls.items() if (kind_, axis_) == (kind, axis))
    return sum(size // FLOAT64 * n for size, n in counted if size > FLOAT64)


def run_of(parallel: ParallelSpec, model: str = "gqa") -> RunSpec:
    return tiny_run(MODELS[model], parallel=parallel, optim="adamw")


@pytest.mark.parametrize("zero", (0, 1, 2, 3))
def test_data_parallel_holds_and_sends_what_the_page_says(ranks: RankPool, zero: int):
    run = run_of(ParallelSpec(dp_shard=2, zero=zero) if zero else ParallelSpec(dp_replicate=2))
    p, m, n = num_parameters(run.model), run.accumulation, 2
    results = run_case(ranks, run, num_steps=NUM_STEPS, records_traffic=True)
    axis = "dp_shard" if zero else "dp_replicate"
    sent = 2 * elements(results, "all_reduce", axis)
    sent += elements(results, "all_gather", axis) + elements(results, "reduce_scatter", axis)
    said = [cells for cells in rows("data_parallel.md") if cells[0] == str(zero)]
    bytes_held, traffic = said
    assert sent == evaluate(traffic[2].replace("P", "p"), {"p": p, "m": m})
    assert results[0].held.parameters == p * FLOAT64 * evaluate(bytes_held[1], {"n": n}) / 4
    assert results[0].held.optimizer == p * FLOAT64 * evaluate(bytes_held[3], {"n": n}) / 4


@pytest.mark.parametrize("reduce", ("each_microbatch", "last_microbatch"))
def test_a_pipeline_gathers_once(ranks: RankPool, reduce: str):
    """`3 with pp` of the page, with and without `grad_reduce: last_microbatch`."""
    model = MODELS["gqa"].with_(num_layers=3)
    parallel = ParallelSpec(pp=2, dp_shard=2, zero=3, grad_reduce=reduce)
    run = tiny_run(model, parallel=parallel, optim="adamw")
    results = run_case(ranks, run, num_steps=NUM_STEPS, records_traffic=True)
    held = sum(weight.numel() for weight in results[0].weights.values())
    scatters = run.accumulation if reduce == "each_microbatch" else 1
    assert elements(results, "reduce_scatter", "dp_shard") == scatters * held
    assert elements(results, "all_gather", "dp_shard") == held


def test_tensor_parallel_sends_what_the_page_says(ranks: RankPool):
    run = run_of(ParallelSpec(tp=2))
    results = run_case(ranks, run, num_steps=NUM_STEPS, records_traffic=True)
    size = SEQUENCE_LENGTH * run.model.width
    calls = run.accumulation * (4 * run.model.num_layers + 2)
    assert elements(results, "all_gather", "tp") == calls * size
    assert elements(results, "reduce_scatter", "tp") == calls * size
    norms = (2 * run.model.num_layers + 1) * run.model.width
    assert elements(results, "all_reduce", "tp") == run.accumulation * 3 * SEQUENCE_LENGTH + norms


def test_pipeline_parallel_sends_what_the_page_says(ranks: RankPool):
    model = MODELS["tied"].with_(num_layers=3)
    run = tiny_run(model, parallel=ParallelSpec(pp=2), optim="adamw")
    results = run_case(ranks, run, num_steps=NUM_STEPS, records_traffic=True)
    assert elements(results, "send", "pp") == run.accumulation * SEQUENCE_LENGTH * model.width
    assert elements(results, "recv", "pp") == run.accumulation * SEQUENCE_LENGTH * model.width
    assert elements(results, "all_reduce", "pp") == model.vocab_size * model.width


def test_expert_parallel_sends_what_the_page_says(ranks: RankPool):
    run = run_of(ParallelSpec(dp_shard=2, zero=1, ep=2), "moe")
    moe = run.model.moe
    assert moe is not None
    results = run_case(ranks, run, num_steps=NUM_STEPS, records_traffic=True)
    calls = Counter()
    for (kind, _, size), count in results[0].communication.items():
        calls[size // FLOAT64] += count if kind == "all_to_all" else 0
    layers = run.accumulation * run.model.num_layers
    assert calls.pop(moe.num_experts) == layers
    sent_first = moe.top_k * SEQUENCE_LENGTH * run.model.width
    # Rows both ways and their weights, and in backward the same.
    assert calls.total() == 6 * layers and calls[sent_first] >= 2 * layers
    # What this rank receives varies with the routing; over both ranks it is what they send.
    both = sum(
        size * count
        for result in results
        for (kind, _, size), count in result.communication.items()
        if kind == "all_to_all" and size > moe.num_experts * FLOAT64
    )
    weights = sent_first // run.model.width
    assert both == 2 * layers * (4 * sent_first + 2 * weights) * FLOAT64
