"""The table of faults counts what failed, and pools trials of the same fault."""

from types import SimpleNamespace

from tests.support.fault_table import Trial, record, recorded, table


def _report(trial: Trial, outcome: str) -> SimpleNamespace:
    report = SimpleNamespace(user_properties=[], when="call", outcome=outcome)
    record(report, trial)
    return report


def test_trials_of_failed_tests_have_not_survived():
    kill = Trial("kill -9", lost_steps=2, detect_seconds=0.25, resume_seconds=2.0)
    reports = [_report(kill, "passed"), _report(kill, "failed"), SimpleNamespace(when="call")]
    found = recorded([*reports, _report(Trial("disk full", lost_steps=None), "passed")])
    assert [trial.survived for trial in found] == [True, False, True]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table(found).splitlines()]
    assert lines[0] == ["fault", "trials", "survived", "lost steps", "seconds to detect", "seconds to resume"]
    assert lines[2] == ["kill -9", "2", "1", "mean 2.0, max 2", "0.2, max 0.2", "2.0, max 2.0"]
    assert lines[3] == ["disk full", "1", "1", "-", "-", "-"]
