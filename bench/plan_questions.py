"""Seven models on fourteen clusters: where a plan contradicts itself, and where more devices are slower.

    python -m bench.plan_questions                # the table of 98 questions
    python -m bench.plan_questions --growing      # each model on one node more, several times

A plan refutes itself when its table or its sentences name an alternative that is allowed, fits, and is faster
by more than the tie margin. A refusal contradicts itself when its numbers fit. Both are read from the text.
"""

import argparse
import sys
import time
from collections import Counter

from tests.support.plan_claims import ask, contradictory, self_refuting

from meshwright.errors import MeshwrightError

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


def main() -> None:
    """Print the findings and their counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--growing", action="store_true", help="count steps that get slower with devices")
    parser.add_argument("--quiet", action="store_true", help="only the counts")
    arguments = parser.parse_args()
    start = time.process_time()
    found = growing(quiet=arguments.quiet) if arguments.growing else questions(quiet=arguments.quiet)
    counts = ", ".join(f"{name}: {count}" for name, count in found.items())
    print(f"{counts}; {time.process_time() - start:.1f} s of CPU")


def questions(*, quiet: bool) -> Counter[str]:
    """The 98 questions."""
    counts: Counter[str] = Counter(
        dict.fromkeys(("questions", "refused", "self-refuting", "contradictory"), 0)
    )
    for model in MODELS:
        for on in CLUSTERS:
            answer = ask(model, on)
            is_refused = isinstance(answer, MeshwrightError)
            refuting = [] if is_refused else self_refuting(answer)
            wrong = contradictory(answer)
            counts.update({"questions": 1, "refused": is_refused})
            counts.update({"self-refuting": bool(refuting), "contradictory": bool(wrong)})
            for kind, sentences in (("refutes itself", refuting), ("contradicts", wrong)):
                for sentence in [] if quiet else sentences:
                    print(f"{model} on {on} {kind}: {sentence}")
            sys.stdout.flush()
    return counts


def growing(*, quiet: bool) -> Counter[str]:
    """The same question on more and more devices."""
    counts: Counter[str] = Counter({"steps": 0, "slower": 0})
    for model, device, sizes in GROWING:
        before = float("inf")
        for size in sizes:
            answer = ask(model, f"{device}:{size}")
            days = float("inf") if isinstance(answer, MeshwrightError) else answer["best"]["days"]
            counts.update({"steps": 1, "slower": days > before * (1 + 1e-9)})
            if days > before * (1 + 1e-9) and not quiet:
                print(f"{model} on {device}:{size}: {days:.3f} days, {before:.3f} on fewer devices")
            before = days
    return counts


if __name__ == "__main__":
    main()
