"""`models list` as a person and as a program use it."""

import json

import pytest

from meshwright.cli.main import run
from meshwright.spec.families import FAMILIES


def _run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = run(arguments)
    out, err = capsys.readouterr()
    return code, out, err


def test_every_family_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = _run(["models", "list"], capsys)
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[1:]] == list(FAMILIES)
    assert max(map(len, out.splitlines())) < 140


def test_json_is_one_document_of_exact_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = _run(["models", "list", "mixtral", "--json"], capsys)
    rows = json.loads(out)
    assert code == 0 and [row["family"] for row in rows] == ["mixtral-8x7b", "mixtral-8x22b"]
    assert rows[0]["parameters"] == 46_702_792_704 and rows[0]["kind"] == "GQA, 2 of 8 experts"


def test_nothing_found_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = _run(["models", "list", "zebra"], capsys)
    assert code == 2 and not out and "zebra" in err
