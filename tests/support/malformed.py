"""Deterministic mutations of valid text, as typing errors and damaged files produce them."""

import random
from collections.abc import Callable

TOKENS = (
    *("null", "~", "-1", "0", "1e400", ".nan", ".inf", "1e309", "9" * 30, "9" * 500, "0x", "true", "no"),
    *("''", '"', "[]", "{}", "[", "}", "*a", "&a", "&a [*a]", "!!python/object:x", "!x", "|", ">", "?"),
    *("- -", "<<", "---", "...", "%TAG", "@", "`", "\t", "\x00", "\x07", "\u2028", "é", "a=b", "#", ": :"),
    *("4M", "1e6", "80GiB", "1_000", "2024-01-01", "1:30", "llama-3.2-1b", "./", "/dev/null", "{a: {b: 1}}"),
)
Mutation = Callable[[random.Random, str], str]


def _delete_line(source: random.Random, text: str) -> str:
    lines = text.splitlines(keepends=True)
    del lines[source.randrange(len(lines))]
    return "".join(lines)


def _double_line(source: random.Random, text: str) -> str:
    lines = text.splitlines(keepends=True)
    line = source.randrange(len(lines))
    return "".join([*lines[: line + 1], *lines[line:]])


def _indent_line(source: random.Random, text: str) -> str:
    lines = text.splitlines(keepends=True)
    line = source.randrange(len(lines))
    lines[line] = " " * source.randrange(1, 5) + lines[line]
    return "".join(lines)


def _replace_value(source: random.Random, text: str) -> str:
    lines = text.splitlines(keepends=True)
    line = source.randrange(len(lines))
    key = lines[line].split(":")[0]
    lines[line] = f"{key}: {source.choice(TOKENS)}\n"
    return "".join(lines)


def _replace_number(source: random.Random, text: str) -> str:
    digits = [place for place, letter in enumerate(text) if letter.isdigit()] or [0]
    place = source.choice(digits)
    return text[:place] + source.choice(TOKENS) + text[place + 1 :]


def _change_letter(source: random.Random, text: str) -> str:
    place = source.randrange(len(text))
    return text[:place] + chr(source.choice([*range(32, 127), 9, 10, 0, 0xE9])) + text[place + 1 :]


def _insert(source: random.Random, text: str) -> str:
    place = source.randrange(len(text))
    return text[:place] + source.choice(TOKENS) + text[place:]


def _truncate(source: random.Random, text: str) -> str:
    return text[: source.randrange(len(text))]


def _swap_lines(source: random.Random, text: str) -> str:
    lines = text.splitlines(keepends=True)
    one, other = source.randrange(len(lines)), source.randrange(len(lines))
    lines[one], lines[other] = lines[other], lines[one]
    return "".join(lines)


MUTATIONS: tuple[Mutation, ...] = (
    _delete_line,
    _double_line,
    _indent_line,
    _replace_value,
    _replace_number,
    _change_letter,
    _insert,
    _truncate,
    _swap_lines,
)


def malformed(text: str, seed: int) -> str:
    """`text` after one to three mutations that depend only on the seed."""
    source = random.Random(seed)
    for _ in range(source.randrange(1, 4)):
        if text.strip():
            text = source.choice(MUTATIONS)(source, text)
    return text
