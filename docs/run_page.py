"""Runs the code of a tutorial: `python docs/run_page.py docs/tutorials/collectives.md`.

The Python blocks of a page run in order in one namespace, on as many ranks as the page says ("on 2 ranks").
`--save FILE` writes the code as a script instead, for `python FILE` or `torchrun --nproc-per-node 2 FILE`.
`--write` replaces what the page says that its blocks print by what they print here; read the difference.

A block may be followed by what it prints. Its title says how the tests compare the two:

    prints                  equal, and `...` stands for anything within a line
    prints, within 5%       equal words, and numbers within 5%
    prints something like   equal words; the numbers depend on the machine
"""

import argparse
import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from meshwright.rehearse.rank_pool import RankPool

FENCED = re.compile(
    r'^```(?P<language>\w+)(?: title="(?P<title>[^"]*)")?\n(?P<text>.*?)^```$', re.MULTILINE | re.DOTALL
)
RANKS = re.compile(r"\bon (\d) ranks\b")
NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?![\w])")


class Block(NamedTuple):
    """A Python block of a page."""

    code: str
    """The code, after as many empty lines as make line numbers those of the page."""
    prints: str | None
    """What the page says that it prints, by all ranks in order."""
    comparison: str
    """The title of that text; empty where there is none."""
    span: tuple[int, int]
    """Where that text is in the page."""


class Page(NamedTuple):
    """The code of a page."""

    name: str
    num_ranks: int
    blocks: list[Block]


def read_page(path: Path) -> Page:
    """The Python blocks of a page, each with what it prints."""
    text = path.read_text()
    blocks: list[Block] = []
    for found in FENCED.finditer(text):
        if found["language"] == "python":
            before = "\n" * (text[: found.start()].count("\n") + 1)
            blocks.append(Block(before + found["text"], None, "", (0, 0)))
        elif (found["title"] or "").startswith("prints") and blocks:
            blocks[-1] = Block(blocks[-1].code, found["text"], found["title"], found.span("text"))
    ranks = RANKS.search(text)
    return Page(path.name, int(ranks[1]) if ranks else 1, blocks)


def run_on(pool: RankPool, page: Page, folder: Path) -> list[str]:
    """What each block of a page prints; `folder` is the current directory of the code."""
    printed = pool.run(_run_on_rank, page.num_ranks, page, folder)
    return ["".join(ranks) for ranks in zip(*printed, strict=True)]


def _run_on_rank(page: Page, folder: Path) -> list[str]:
    """What each block prints on this rank."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    printed: list[str] = []
    with contextlib.chdir(folder), _group_of_the_pool():
        for block in page.blocks:
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(compile(block.code, page.name, "exec"), namespace)
            printed.append(output.getvalue())
    return printed


@contextlib.contextmanager
def _group_of_the_pool() -> Iterator[None]:
    """`init_process_group` of a page does nothing: the pool has made the group of these ranks."""
    original = dist.init_process_group
    dist.init_process_group = lambda backend: None
    try:
        yield
    finally:
        dist.init_process_group = original


def difference(block: Block, printed: str) -> str | None:
    """The first line that differs from what the page says; None where all agree."""
    wanted, found = (block.prints or "").splitlines(), printed.splitlines()
    if len(wanted) != len(found):
        return f"{len(found)} lines are printed, {len(wanted)} are shown:\n{printed}"
    for line, other in zip(wanted, found, strict=True):
        if not _agrees(line.rstrip(), other.rstrip(), block.comparison):
            return f"{other!r} is shown as {line!r} ({block.comparison})"
    return None


def _agrees(wanted: str, found: str, comparison: str) -> bool:
    if comparison == "prints":
        return re.fullmatch(re.escape(wanted).replace(r"\.\.\.", ".*"), found) is not None
    words = [" ".join(NUMBER.sub("#", line).split()) for line in (wanted, found)]
    if words[0] != words[1] or comparison == "prints something like":
        return words[0] == words[1]
    share = float(comparison.removeprefix("prints, within ").removesuffix("%")) / 100
    numbers = [[float(one.replace(",", "")) for one in NUMBER.findall(line)] for line in (wanted, found)]
    return all(abs(a - b) <= share * abs(a) for a, b in zip(*numbers, strict=True))


def script(page: Page) -> str:
    """All code of a page as one program."""
    return "\n".join(block.code.strip() + "\n" for block in page.blocks)


def with_printed(text: str, page: Page, printed: list[str]) -> str:
    """The text of a page with what its blocks have printed."""
    for block, output in reversed(list(zip(page.blocks, printed, strict=True))):
        if block.comparison:
            start, end = block.span
            text = text[:start] + output + text[end:]
    return text


def main() -> None:
    """Run a page, or save its code."""
    parser = argparse.ArgumentParser(description="Run the code of a tutorial.")
    parser.add_argument("page", type=Path)
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the code as a script instead")
    parser.add_argument("--write", action="store_true", help="write what is printed into the page")
    arguments = parser.parse_args()
    page = read_page(arguments.page)
    if arguments.save:
        arguments.save.write_text(script(page))
        return
    with RankPool(max_ranks=page.num_ranks) as pool:
        printed = run_on(pool, page, Path.cwd())
    print("\n".join(printed))
    if arguments.write:
        arguments.page.write_text(with_printed(arguments.page.read_text(), page, printed))


if __name__ == "__main__":
    main()
