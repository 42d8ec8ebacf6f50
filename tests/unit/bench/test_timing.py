"""Times, kernel classes and the clock of steps, without a GPU."""

import pytest
import torch

from meshwright.bench.kernel_time import budget_of, show_budget
from meshwright.bench.machine_facts import machine_facts, read_samples, sampled_clock
from meshwright.bench.step_clock import FEWEST_STEPS, StepClock
from meshwright.bench.timing import measure, sustained_seconds, timing_of

CPU = torch.device("cpu")


def test_median_and_tenths() -> None:
    found = timing_of([float(value) for value in range(11)])
    assert (found.median, found.p10, found.p90, found.num_calls) == (5.0, 1.0, 9.0, 11)
    assert found.spread == pytest.approx(8 / 5)


def test_a_call_is_warmed_up_before_it_is_timed() -> None:
    calls: list[int] = []
    found = measure(lambda: calls.append(1), CPU, seconds=1e-6)
    assert found.num_calls == 5 and len(calls) == 3 + 1 + 5


def test_only_the_last_third_of_a_long_hold_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine calls are timed alone and take 2 s each, so nine fit into 18 s: six of them are not timed."""
    now, calls = [0.0], []

    def call() -> None:
        calls.append(1)
        now[0] += 2.0 if len(calls) <= 15 else 1.0

    monkeypatch.setattr("meshwright.bench.timing.time.perf_counter", lambda: now[0])
    assert sustained_seconds(call, CPU, seconds=18.0) == 1.0
    assert len(calls) == 18


def test_a_budget_counts_kernels_and_the_gaps_between_them() -> None:
    kernels = [("gemm_a", 0.0, 2.0), ("gemm_a", 3.0, 5.0), ("triton_poi_x", 4.0, 6.0)]
    found = budget_of(kernels, num_steps=2)
    assert found.step_seconds == 3.0
    assert found.seconds_by_class == {"matmul": 2.0, "element-wise": 1.0, "gaps": 0.5}
    assert found.largest[0] == ("gemm_a", 2.0, 1)
    assert "matmul" in show_budget(found) and "66.7%" in show_budget(found)


def test_an_empty_trace_is_an_empty_budget() -> None:
    assert budget_of([], num_steps=1).step_seconds == 0.0


def test_samples_of_the_driver_are_read_and_text_is_skipped() -> None:
    assert read_samples(["1980, 690.5, 61", "[N/A], [N/A], 60", "1920, 700.5, 63"]) == {
        "clock_mhz": 1950.0,
        "power_watts": 695.5,
        "temperature_celsius": 62.0,
    }
    assert read_samples([]) == {}


def test_facts_and_samples_of_a_cpu() -> None:
    facts = machine_facts(CPU)
    assert facts["torch"] == torch.__version__ and facts["device"] and facts["cudnn"] is None
    with sampled_clock(CPU) as found:
        pass
    assert found == {}


def test_the_clock_asks_for_steps_until_its_window_is_full() -> None:
    clock = StepClock(CPU, seconds=1e-9, warmup_steps=2)
    losses = (torch.tensor(10.0 - step) for step in range(100))
    num_steps = 1
    while clock.after_step(next(losses)):
        num_steps += 1
    found = clock.result()
    # The first step, two of warm-up, one to learn the length of a step, then the window.
    assert num_steps == 4 + FEWEST_STEPS
    assert found["num_steps"] == FEWEST_STEPS
    assert found["first_loss"] == 10.0 and found["last_loss"] == 10.0 - (num_steps - 1)
    assert 0 < found["p10_seconds"] <= found["step_seconds"] <= found["p90_seconds"]
    assert found["graphs_compiled_in_window"] == 0
