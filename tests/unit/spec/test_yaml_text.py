"""Scalars as people mean them, line numbers, and what is refused."""

import pytest
import yaml

from meshwright.errors import SpecError
from meshwright.spec.yaml_text import dump_yaml, parse_yaml, walk


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("3E+2", 300.0),
        (".5", 0.5),
        ("12", 12),
        ("-3", -3),
        ("007", 7),
        ("0x1f", 31),
        ("0o17", 15),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("no", "no"),
        ("on", "on"),
        ("yes", "yes"),
        ("1_000", "1_000"),
        ("12:30", "12:30"),
        ("2024-01-31", "2024-01-31"),
        ("4M", "4M"),
        ("'12'", "12"),
        ('"true"', "true"),
        (".inf", float("inf")),
        ("1" * 401, "1" * 401),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: object):
    parsed = parse_yaml(f"key: {text}", "run.yaml").value["key"]
    assert parsed == value
    assert type(parsed) is type(value)


def test_lines_are_kept():
    parsed = parse_yaml("a: 1\nb:\n  c: 2\n  d: [3,\n    4]\n", "run.yaml")
    assert parsed.lines[("a",)] == 1
    assert parsed.lines[("b", "c")] == 3
    assert parsed.lines[("b", "d", 1)] == 5


def test_a_duplicate_key_is_an_error_with_both_lines():
    parsed = parse_yaml("a:\n  b: 1\n  c: 2\n  b: 3\n", "run.yaml")
    assert [str(violation) for violation in parsed.violations] == [
        "run.yaml:4 a.b: a.b is set twice: in line 2 and in line 4\n  hint: keep one of the two"
    ]
    assert parsed.value == {"a": {"b": 1, "c": 2}}


def test_a_tag_is_refused_and_not_obeyed():
    parsed = parse_yaml("a: !!python/object/apply:os.getcwd []\nb: !mine 3", "run.yaml")
    assert len(parsed.violations) == 2
    assert parsed.value == {"a": [], "b": 3}


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9)
)


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        (BOMB, "more than 10000 values"),
        ("a: &a [*a]", "nested deeper than 32 levels"),
        ("[" * 5000, "nested deeper than 32 levels"),
        ("{a: " * 40 + "1" + "}" * 40, "nested deeper than 32 levels"),
        ("a: [1", "this is not YAML"),
        ("a: *unknown", "this is not YAML"),
        ("a: 1\n---\nb: 2", "this is not YAML"),
        ("\tb: 2", "this is not YAML"),
        ("a: \x00", "this is not YAML"),
    ],
    ids=range(9),
)
def test_what_cannot_be_read_is_a_fact(text: str, fact: str):
    with pytest.raises(SpecError, match=fact):
        parse_yaml(text, "run.yaml")


@pytest.mark.parametrize(
    "word", ["1e4", "no", "true", "null", "", "0x1f", "12", ".5", "a: b", "# x", "é", "~", ".inf"]
)
def test_text_that_looks_like_something_else_comes_back_as_text(word: str):
    assert parse_yaml(dump_yaml({"key": word}), "run.yaml").value == {"key": word}


def test_walk_gives_leaves():
    assert list(walk({"a": {"b": 1, "c": {}}, "d": [2]})) == [
        (("a", "b"), 1),
        (("a", "c"), {}),
        (("d",), [2]),
    ]


@pytest.mark.parametrize(
    "text", ["no", "NO", "on", "off", "yes", "1_000", "12:30:00", "2024-01-01", "017", "~"]
)
def test_readers_of_yaml_1_1_find_text_where_we_wrote_text(text: str):
    written = dump_yaml({"key": text})
    assert yaml.safe_load(written) == {"key": text}
    assert parse_yaml(written, "run.yaml").value == {"key": text}
