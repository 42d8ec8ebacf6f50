"""The driver of `bench.step`: which contenders share the device, the order of windows, failures."""

import dataclasses
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import bench.step as program
import pytest
import torch
from bench.contenders.plain import plain_model
from bench.contenders.protocol import Job
from bench.interleaved.channel import Channel
from bench.interleaved.clock import WorkerClock
from bench.interleaved.entries import entries_of
from bench.interleaved.process import CONTEXT_BYTES, GIB, ContenderProcess, Entry, error_line
from bench.interleaved.schedule import InterleavedSchedule, Pace, group_bytes
from bench.workloads.cases import CASES


def entry(peer: str, label: str = "", *, gib: tuple[float, float] = (1.0, 2.0), case: str = "1b") -> Entry:
    idle, peak = (int(size * GIB) for size in gib)
    return Entry(case, peer, label or peer, peer, {}, {}, idle // 2, idle, peak)


class Actor(ContenderProcess):
    """A contender without a process: every command is answered at once, as its label says.

    The number of a label is the seconds of its step; `dies` ends in its warm-up, `dies later` in its first
    window, `oom` runs out of memory while another one is warm, `early oom` while another one waits.
    """

    log: list[str]
    others: list["Actor"]

    def start(self, _folder: Path, *, warmup_steps: int) -> None:
        self._ends = os.pipe()
        self._answer("imported")

    def _answer(self, answer: str) -> None:
        self._last_answer = answer
        self.enter("importing") if self.state == "new" else None
        os.write(self._ends[1], b".")

    def fileno(self) -> int:
        return self._ends[0]

    def command(self, state: Any, **message: Any) -> None:
        self.enter(state)
        self.log.append(f"{message['command']} {self.entry.label}")
        label = self.entry.label
        waiting = ("imported", "compiled", "building") if "early" in label else ()
        others = [
            one for one in self.others if one is not self and one.state in ("warming", "idle", *waiting)
        ]
        answer = {"build": "compiled", "warm_up": "ready", "time": "timed"}[message["command"]]
        if (answer == "ready" and label == "dies") or (answer == "timed" and label == "dies later"):
            answer = "died"
        if answer == "ready" and "oom" in label and others:
            answer = "oom"
        self._answer(answer)

    def receive(self) -> None:
        os.read(self._ends[0], 1)
        if self._last_answer in ("died", "oom"):
            self.end("out of memory: 1 GiB" if self._last_answer == "oom" else "it broke")
            return
        states = {"imported": "imported", "compiled": "compiled", "ready": "idle", "timed": "idle"}
        self.enter(states[self._last_answer])  # type: ignore[arg-type]
        if self._last_answer == "timed":
            numbers = [part for part in self.entry.label.split() if part.isdigit()]
            seconds = float(numbers[0]) if numbers else 1.0
            self.timings.append({"step_seconds": seconds, "accumulation_factor": 1})

    def end(self, error: str | None = None) -> None:
        self.error = error
        self.log.append(f"end {self.entry.label}")
        self.enter("ended")
        for number in self._ends:
            os.close(number)


@pytest.fixture
def drive(tmp_path: Path) -> Callable[..., tuple[list[str], list[tuple[str, str]]]]:
    """Run entries on a device of this many GiB; returns the commands and the reports."""

    def run(entries: list[Entry], gib: float = 100.0, **pace: Any) -> tuple[list[str], list[tuple[str, str]]]:
        log: list[str] = []
        reported: list[tuple[str, str]] = []
        actors: list[Actor] = []

        def make(one: Entry) -> Actor:
            actor = Actor(one)
            actor.log, actor.others = log, actors
            actors.append(actor)
            return actor

        schedule = InterleavedSchedule(
            int(gib * GIB), Pace(**pace), tmp_path, lambda kind, one: reported.append((kind, one.entry.label))
        )
        schedule.run(entries, make)
        assert all(actor.state == "ended" for actor in actors)
        return log, reported

    return run


def windows_of(log: list[str]) -> list[str]:
    return [line.removeprefix("time ") for line in log if line.startswith("time ")]


def test_windows_go_round_when_all_are_warm(drive: Any) -> None:
    log, _ = drive([entry("a"), entry("b"), entry("c")])
    assert windows_of(log) == ["a", "b", "c", "a", "b", "c"]
    assert max(log.index(f"warm_up {name}") for name in "abc") < log.index("time a")


def test_the_best_setting_of_a_peer_takes_part_in_the_rounds(drive: Any) -> None:
    log, reported = drive([entry("ours"), entry("hf", "hf 3"), entry("hf", "hf 2"), entry("hf", "hf 4")])
    assert windows_of(log) == ["hf 3", "hf 2", "hf 4", "hf 2", "ours", "hf 2", "ours"]
    assert [kind for kind, label in reported if label == "hf 2"] == ["sweep", "round", "round"]


@pytest.mark.parametrize("how", ["dies", "dies later"])
def test_a_contender_that_dies_is_reported_and_the_others_go_on(drive: Any, how: str) -> None:
    log, reported = drive([entry("a"), entry("b", how), entry("c")])
    assert ("error", how) in reported
    assert [name for name in windows_of(log) if name != how] == ["a", "c", "a", "c"]


def test_what_does_not_fit_together_is_timed_one_after_the_other(drive: Any) -> None:
    large = (60.0, 90.0)
    log, _ = drive([entry("a", gib=large), entry("b", gib=large)])
    assert windows_of(log) == ["a", "a", "b", "b"]
    assert log.index("end a") < log.index("warm_up b")
    assert log.index("build b") < log.index("warm_up a")  # it compiles while the other warms up


def test_a_group_is_all_idle_and_the_largest_running(drive: Any) -> None:
    pair = [ContenderProcess(entry("a", gib=(10.0, 50.0))), ContenderProcess(entry("b", gib=(20.0, 40.0)))]
    assert group_bytes(pair, num_waiting=3) == 70 * GIB + 5 * CONTEXT_BYTES
    # 10 + 10 + 40 of the larger one, and a context each: with 61 GiB they go one by one.
    assert windows_of(drive([entry("a", gib=(10, 50)), entry("b", gib=(10, 50))], 62.0)[0]) == ["a", "b"] * 2
    log = drive([entry("a", gib=(10, 50)), entry("b", gib=(10, 50))], 61.0)[0]
    assert windows_of(log) == ["a", "a", "b", "b"]


def test_slower_settings_of_a_sweep_make_room_for_the_next(drive: Any) -> None:
    """Three idle ones do not fit, so the third waits until the slower of the first two has ended."""
    size = (20.0, 50.0)
    log, _ = drive([entry("hf", f"hf {n}", gib=size) for n in (3, 2, 1)], 75.0)
    assert windows_of(log) == ["hf 3", "hf 2", "hf 1", "hf 1", "hf 1"]
    assert log.index("end hf 3") < log.index("warm_up hf 1")


def test_oom_beside_others_is_retried_alone(drive: Any) -> None:
    entries = [entry("a", gib=(20.0, 30.0)), entry("b", "oom", gib=(20.0, 30.0))]
    log, reported = drive(entries)
    assert windows_of(log) == ["a", "a", "oom", "oom"]
    assert "error" not in [kind for kind, _ in reported]


def test_oom_beside_waiting_processes_is_retried_alone(drive: Any) -> None:
    log, reported = drive([entry("a", "early oom", gib=(60.0, 85.0)), entry("b", gib=(60.0, 85.0))])
    assert windows_of(log) == ["b", "b", "early oom", "early oom"]
    assert "error" not in [kind for kind, _ in reported]


def test_where_none_can_share_a_setting_is_timed_once_unless_it_is_the_fastest(drive: Any) -> None:
    large = (60.0, 85.0)
    peers = [entry("hf", f"hf {n}", gib=large) for n in (2, 3, 1)]
    log, _ = drive([entry("ours", gib=large), *peers])
    assert windows_of(log) == ["ours", "ours", "hf 2", "hf 2", "hf 3", "hf 1", "hf 1", "hf 1"]


def test_the_fastest_of_a_sweep_that_had_to_make_room_is_built_again(drive: Any) -> None:
    log, reported = drive([entry("hf", "hf 1", gib=(40.0, 60.0)), entry("hf", "hf 2", gib=(45.0, 55.0))])
    assert windows_of(log) == ["hf 1", "hf 2", "hf 1", "hf 1"]
    assert log.count("build hf 1") == 2 and log.index("end hf 1") < log.index("warm_up hf 2")
    assert [kind for kind, label in reported if label == "hf 1"] == ["sweep", "round", "round"]


def test_two_that_run_out_of_memory_at_once_are_both_retried(drive: Any) -> None:
    pair = [entry("a", "oom", gib=(10.0, 30.0)), entry("b", "oom", gib=(10.0, 30.0))]
    log, reported = drive(pair)
    assert windows_of(log) == ["oom"] * 4 and "error" not in [kind for kind, _ in reported]


def test_an_entry_that_can_only_be_alone_comes_last(drive: Any) -> None:
    log, _ = drive([entry("a", gib=(10.0, 99.0)), entry("b"), entry("c")])
    assert windows_of(log) == ["b", "c", "b", "c", "a", "a"]


def test_cases_are_not_mixed_in_a_group(drive: Any) -> None:
    log, _ = drive([entry("a"), entry("b", case="8b"), entry("c")])
    assert windows_of(log) == ["a", "c", "a", "c", "b", "b"]


def test_more_micro_batches_are_timed_after_the_rounds(drive: Any) -> None:
    _, reported = drive([dataclasses.replace(entry("a"), accumulation_factor=4), entry("b")], rounds=1)
    assert reported == [("round", "a"), ("round", "b"), ("long_step", "a")]


def test_real_processes_are_timed_and_one_that_fails_leaves_its_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "--case",
        "tiny",
        "--only",
        "plain",
        "--eager",
        "--no-sweep",
        "--precision",
        "fp32",
        "--rounds",
        "1",
    ]
    options = program.parse(
        [*arguments, "--device", "cpu", "--seconds", "0.01", "--out", str(tmp_path / "out")]
    )
    broken = {"contender": "nobody", "label": "nobody", "peer": "nobody"}

    def with_one_more(*arguments: Any) -> list[Entry]:
        (plain,) = entries_of(*arguments)
        return [plain, dataclasses.replace(plain, **broken)]

    with patch.object(program, "entries_of", with_one_more):
        assert program.measure(options) == 0
    (path,) = (tmp_path / "out").glob("step_tiny_fp32_*.json")
    plain, failed = sorted(json.loads(path.read_text())["rows"], key=lambda row: "error" in row)
    assert plain["kind"] == "round" and plain["num_steps"] >= 2
    assert "No module named 'bench.contenders.nobody'" in failed["error"]
    assert "No module named" in capsys.readouterr().out


def test_a_clock_answers_each_command_and_multiplies_micro_batches() -> None:
    window = {
        "command": "time",
        "seconds": 0.0,
        "fewest_steps": 2,
        "is_profiled": True,
        "keeps_memory": False,
    }
    usual = window | {"lead_steps": 1, "accumulation_factor": 1}
    long_step = window | {"lead_steps": 0, "accumulation_factor": 4}
    commands = [usual, long_step, {"command": "stop"}]
    answers = io.StringIO()
    channel = Channel(io.StringIO("".join(json.dumps(one) + "\n" for one in commands)), answers)
    clock = WorkerClock(torch.device("cpu"), channel, warmup_steps=1)
    factors, is_wanted = [], True
    while is_wanted:
        factors.append(clock.accumulation_factor)
        is_wanted = clock.after_step(torch.tensor(7.0))
    # The first step and warm-up; lead step and two timed ones; two timed ones of four times the size.
    assert factors == [1, 1, 1, 1, 1, 4, 4]
    reported = [json.loads(line) for line in answers.getvalue().splitlines()]
    assert [message["state"] for message in reported] == ["ready", "timed", "timed"]
    assert reported[0]["first_loss"] == 7.0 and reported[1]["row"]["num_steps"] == 2


def test_the_error_of_a_log_is_its_last_exception() -> None:
    assert error_line(["Traceback", "ValueError: no", "  note"]) == "ValueError: no"
    assert error_line([]) == "the process ended without output"


def test_the_gate_waits_once_between_compiling_and_running() -> None:
    from bench.interleaved.compile_gate import compile_fx, functorch_config, gate_after_compiling

    seen: list[str] = []

    def compile_it(name: str) -> Callable[[], str]:
        seen.append(f"compile {name}")
        assert functorch_config.force_non_lazy_backward_lowering
        return lambda: seen.append(f"run {name}") or name

    with (
        patch.object(compile_fx, "compile_fx", compile_it),
        gate_after_compiling(lambda: seen.append("wait")),
    ):
        first = compile_fx.compile_fx("a")
        assert [first(), first(), compile_fx.compile_fx("b")()] == ["a", "a", "b"]
    assert seen == ["compile a", "wait", "run a", "run a", "compile b", "run b"]


def test_freed_weights_take_no_memory_and_are_restored(tmp_path: Path) -> None:
    options = program.parse(["--case", "tiny", "--precision", "fp32", "--device", "cpu", "--eager"])
    job = Job(program.build_run(CASES["tiny"], options, tmp_path), torch.device("cpu"))
    model = plain_model(job)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    job.free_weights()
    assert sum(one.untyped_storage().nbytes() for one in model.parameters()) == 0
    job.restore_weights()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
