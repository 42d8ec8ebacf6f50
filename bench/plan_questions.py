"""Seven models on fourteen clusters: where a plan contradicts itself, and where more devices are slower.

    python -m bench.plan_questions --answers answers.jsonl --out bench/results/plan_questions_<date>.md

A plan refutes itself when its table or its sentences name an alternative that is allowed, fits, and is faster
by more than the tie margin. A refusal contradicts itself when its numbers fit. Both are read from the text.
A step of a growing cluster is not monotone when it is slower than the one on fewer devices.

Each answer is appended to `--answers` as it comes, and a question that is there already is not asked again,
so a run that was stopped goes on. `--limit` stops after so many seconds. The page has all answers so far.
"""

import argparse
import json
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.support.plan_claims import Document, ask, contradictory, self_refuting

from meshwright.errors import MeshwrightError
from meshwright.units import show_bytes, show_seconds

MODELS = (
    "llama-3.2-1b",
    "llama-3.1-8b",
    "qwen2.5-32b",
    "llama-3.1-70b",
    "llama-3.1-405b",
    "mixtral-8x7b",
    "qwen3-30b-a3b",
)
CLUSTERS = (
    "rtx4090:1",
    "rtx4090:8",
    "l40s:8",
    "v100:16",
    "a100-40gb:16",
    "leonardo:4",
    "leonardo:64",
    "h100:1",
    "h100:8",
    "h100:16",
    "dgx-h100:2",
    "dgx-h100:32",
    "gh200:1x16",
    "b200:8",
)
GROWING = (
    ("llama-3.1-8b", "h100", (1, 2, 4, 6, 8, 16, 24, 40, 48, 56, 64, 72)),
    ("llama-3.1-70b", "h100", (16, 24, 40, 48, 56, 64, 72, 80, 88, 96)),
    ("llama-3.1-70b", "h100", (392, 400, 408, 416, 424, 432, 512)),
    ("qwen2.5-32b", "a100", (8, 16, 24, 32, 40, 48, 56, 64)),
    ("mixtral-8x7b", "h100", (8, 16, 24, 32, 40, 48)),
    ("qwen3-30b-a3b", "a100-40gb", (8, 16, 24, 32, 40, 48)),
)
NAMED = (
    ("llama-3.1-70b", "dgx-h100:2"),
    ("llama-3.1-8b", "rtx4090:8"),
    ("qwen2.5-32b", "h100:8"),
    ("mixtral-8x7b", "h100:16"),
    ("qwen3-30b-a3b", "a100-40gb:16"),
)
"""Questions whose plans refuted themselves before offload was part of the search."""
BEFORE = {"plans that refute themselves": 14, "refusals that contradict themselves": 13}
"""Of the 98 questions, before offload was part of the search."""
SLOWER = 1.0 + 1e-9
Question = tuple[str, str]
Answers = dict[Question, dict[str, Any]]


def main() -> None:
    """Ask what is missing, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--answers", type=Path, required=True, help="one JSON object per answer")
    parser.add_argument("--out", type=Path, help="write the page here")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds after which to stop")
    arguments = parser.parse_args()
    stop_at = time.monotonic() + arguments.limit
    known = read_answers(arguments.answers)
    for question in all_questions():
        if question not in known and time.monotonic() < stop_at:
            known[question] = answer_to(*question)
            with arguments.answers.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"question": question, **known[question]}) + "\n")
    page = "\n".join(page_lines(known))
    print(page)
    if arguments.out is not None:
        arguments.out.write_text(page + "\n", encoding="utf-8")


def all_questions() -> list[Question]:
    """The 98 questions and the growing clusters, each question once."""
    grown = [(model, f"{device}:{size}") for model, device, sizes in GROWING for size in sizes]
    return list(dict.fromkeys([*((model, on) for model in MODELS for on in CLUSTERS), *grown]))


def read_answers(file: Path) -> Answers:
    """The answers of earlier runs."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    found = (json.loads(line) for line in lines)
    return {(answer["question"][0], answer["question"][1]): answer for answer in found}


def answer_to(model: str, on: str) -> dict[str, Any]:
    """The plan of one question, and what contradicts it in its own text."""
    start = time.process_time()
    answer = ask(model, on)
    seconds = time.process_time() - start
    if isinstance(answer, MeshwrightError):
        found = {"refused": answer.fact, "days": None, "refuting": []}
    else:
        found = {**_shown(answer), "days": answer["best"]["days"], "refuting": self_refuting(answer)}
    return {**found, "contradictory": contradictory(answer), "cpu_seconds": round(seconds, 2)}


def _shown(answer: Document) -> dict[str, Any]:
    best = answer["best"]
    parallel = {
        name: value for name, value in best["parallel"].items() if isinstance(value, int) and value > 1
    }
    parts = [f"{name}={value}" for name, value in parallel.items()]
    parts.append(f"micro={best['microbatch_sequences']}x{best['accumulation']}")
    if best["recompute"] != "none":
        every = f"/{best['recompute_every']}" if best["recompute_every"] > 1 else ""
        parts.append(f"recompute={best['recompute']}{every}")
    if best["offload"]:
        parts.append(f"offload={'+'.join(best['offload'])}")
    return {
        "layout": " ".join(parts),
        "step_seconds": best["step_seconds"],
        "device_bytes": best["device_bytes"],
        "num_ranks": best["num_ranks"],
    }


def page_lines(known: Answers) -> Iterator[str]:
    """The page: counts before and now, the questions of before, every answer."""
    asked = [(model, on) for model in MODELS for on in CLUSTERS if (model, on) in known]
    answers = [known[question] for question in asked]
    slower, num_steps = _slower_steps(known)
    yield "# Plans of seven models on fourteen clusters\n"
    yield f"`bench.plan_questions`: {len(asked)} of {len(MODELS) * len(CLUSTERS)} questions answered.\n"
    yield "| of these | before | now |\n|---|---|---|"
    now = (
        sum(bool(answer["refuting"]) for answer in answers),
        sum(bool(answer["contradictory"]) for answer in answers),
    )
    for (name, count), new in zip(BEFORE.items(), now, strict=True):
        yield f"| {name} | {count} | {new} |"
    yield f"| steps that are slower on more devices, of {num_steps} | not counted | {len(slower)} |"
    yield f"| refused | not counted | {sum('refused' in answer for answer in answers)} |"
    for question in asked:
        for sentence in [*known[question]["refuting"], *known[question]["contradictory"]]:
            yield f"\n{' on '.join(question)}: {sentence}"
    yield from (f"\n{line}" for line in slower)
    yield "\n## Questions whose plans refuted themselves before\n"
    yield from _table([question for question in NAMED if question in known], known)
    yield "\n## All questions\n"
    yield from _table(asked, known)
    yield "\n## Growing clusters\n"
    yield from _growing_table(known)


def _table(questions: list[Question], known: Answers) -> Iterator[str]:
    yield "| model | on | plan | step | memory | CPU s |\n|---|---|---|---|---|---|"
    for model, on in questions:
        answer = known[model, on]
        cpu = answer["cpu_seconds"]
        if "refused" in answer:
            yield f"| {model} | {on} | {answer['refused']} | | | {cpu} |"
            continue
        step, memory = show_seconds(answer["step_seconds"]), show_bytes(answer["device_bytes"])
        yield f"| {model} | {on} | {answer['layout']} | {step} | {memory} | {cpu} |"


def _growing_table(known: Answers) -> Iterator[str]:
    yield "| model | device | days on each number of devices |\n|---|---|---|"
    for model, device, sizes in GROWING:
        rows = [(size, known.get((model, f"{device}:{size}"))) for size in sizes]
        days = [f"{size}: {_days_text(answer)}" for size, answer in rows if answer is not None]
        yield f"| {model} | {device} | {', '.join(days)} |"


def _days_text(answer: dict[str, Any]) -> str:
    return "does not fit" if answer["days"] is None else f"{answer['days']:.4g}"


def _slower_steps(known: Answers) -> tuple[list[str], int]:
    """Each step that is slower than the one on fewer devices, and how many steps there are."""
    found: list[str] = []
    num_steps = 0
    for model, device, sizes in GROWING:
        rows = [
            (size, known[model, f"{device}:{size}"]) for size in sizes if (model, f"{device}:{size}") in known
        ]
        for (fewer, before), (size, answer) in pairwise(rows):
            num_steps += 1
            least = float("inf") if before["days"] is None else before["days"]
            days = float("inf") if answer["days"] is None else answer["days"]
            if days > least * SLOWER:
                found.append(f"{model} on {device}: {days:.4g} days on {size}, {least:.4g} on {fewer}")
    return found, num_steps


if __name__ == "__main__":
    main()
