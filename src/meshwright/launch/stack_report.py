"""Where a rank is, read from the stacks that it wrote: in which collective, called from where."""

import re
from dataclasses import dataclass

_FRAME = re.compile(r'\s*File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>\S+)')
_COLLECTIVE_FILES = ("torch/distributed/", "torch/nn/parallel/")
_COLLECTIVES = re.compile(
    r"(?:all_reduce|reduce_scatter|all_gather|all_to_all|broadcast|barrier|gather|scatter|reduce|send|recv|wait)"
)
_PACKAGES = ("/site-packages/", "/dist-packages/", "/lib/python")


@dataclass(frozen=True)
class Frame:
    """One frame of a stack."""

    file: str
    line: int
    name: str

    @property
    def place(self) -> str:
        """`train/loop.py:67 in drive`: the last folders of the file are enough to find it."""
        return f"{'/'.join(self.file.split('/')[-2:])}:{self.line} in {self.name}"


def frames_of(stack: str) -> list[Frame]:
    """The frames of one thread, the innermost first, as faulthandler writes them."""
    found = (_FRAME.match(line) for line in stack.splitlines())
    return [Frame(one["file"], int(one["line"]), one["name"]) for one in found if one]


def threads_of(stacks: str) -> list[str]:
    """The stacks of the threads, the main thread first: Python writes it last."""
    return list(reversed([one.strip() for one in stacks.split("\n\n") if one.strip()]))


def where_is(stacks: str) -> str:
    """One line: the collective that a rank is in and its caller, or where else it is."""
    threads = [frames for frames in map(frames_of, threads_of(stacks)) if frames]
    if not threads:
        return "wrote no stack: it is not running Python code"
    for frames in threads:
        collective = next((frame for frame in frames if _is_collective(frame)), None)
        if collective is not None:
            return f"in {collective.name}, called from {_caller(frames).place}"
    return f"in no collective: {_caller(threads[0]).place}"


def _is_collective(frame: Frame) -> bool:
    is_there = any(part in frame.file for part in _COLLECTIVE_FILES)
    return is_there and _COLLECTIVES.match(frame.name.removeprefix("_")) is not None


def _caller(frames: list[Frame]) -> Frame:
    """The innermost frame outside of installed packages."""
    own = (frame for frame in frames if not any(part in frame.file for part in _PACKAGES))
    return next(own, frames[0])
