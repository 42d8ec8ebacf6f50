"""The proof as `rehearse` tells it: what is left out first, then one line per small world."""

import sys
from collections.abc import Iterator
from typing import Any


def tell_proof(run: Any, *, full: bool, quiet: bool = False) -> Iterator[dict[str, Any]]:
    """Prove a run on ranks of this machine; one document per verdict. A failed one is raised, exit code 4."""
    import torch

    from meshwright.rehearse.prove import layout_text, prove, require_proved
    from meshwright.rehearse.shrink import shrink

    smalls = shrink(run, full=full)
    on_card = torch.cuda.is_available() and run.device != "cpu"
    for small in smalls:
        _say(f"proving {layout_text(small.run.parallel)} in float64 against one device")
        if small.changes:
            _say(f"  smaller or left out: {', '.join(small.changes)}")
    for verdict in prove(smalls, ranks=("cpu", "cuda") if on_card else ("cpu",)):
        require_proved(verdict)
        if not quiet:
            print(f"proved: {verdict.line}", flush=True)
        yield document(verdict)


def document(verdict: Any) -> dict[str, Any]:
    """For --json."""
    name, error = verdict.worst
    return {
        "layout": verdict.shrunken.run.parallel.model_dump(mode="json"),
        "ranks": verdict.ranks,
        "left_out": list(verdict.shrunken.changes),
        "optimizers": list(verdict.optimizers),
        "num_gradients": verdict.num_gradients,
        "worst_error": error,
        "worst": name,
        "tolerance": verdict.tolerance,
        "seconds": verdict.seconds,
        "line": verdict.line,
    }


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
