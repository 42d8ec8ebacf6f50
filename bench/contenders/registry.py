"""The contenders by name: how tables call them, which packages they need, which settings are tried.

To add one: a module of its name in this folder (see protocol.py), and an entry in CONTENDERS.
"""

import importlib.util
from argparse import Namespace
from dataclasses import dataclass
from typing import Any

from bench.workloads.cases import Case

from meshwright.errors import SpecError
from meshwright.spec import RunSpec

Settings = dict[str, Any]


@dataclass(frozen=True)
class Contender:
    """One framework, or ours. Settings are what its module reads with `job.setting`."""

    title: str
    packages: tuple[str, ...] = ()
    """Packages that must be installed."""
    documented: Settings | None = None
    """The settings that its documentation shows first."""
    best: Settings | None = None
    """The fastest settings that were known before measuring; None for ours, whose settings are the run's."""


CONTENDERS = {
    "ours": Contender("Meshwright"),
    "hf": Contender(
        "Hugging Face + Accelerate",
        packages=("transformers", "accelerate"),
        documented={"compile": False, "output": "full", "optimizer": "default"},
        best={"compile": True, "output": "loss", "optimizer": "fused"},
    ),
    "plain": Contender("plain torch", best={"compile": True, "optimizer": "fused"}),
    "titan": Contender(
        "torchtitan",
        packages=("torchtitan",),
        best={"compile": "regional", "optimizer": "fused"},
    ),
    "lightning": Contender(
        "Lightning",
        packages=("pytorch_lightning",),
        documented={"compile": False, "optimizer": "default"},
        best={"compile": True, "optimizer": "default"},  # its Trainer refuses to clip for a fused optimizer
    ),
}


def best_settings(peer: str) -> Settings:
    """The fastest settings of a peer that were known before measuring."""
    best = CONTENDERS[peer].best
    assert best is not None, f"{peer} has no settings of its own"
    return best


DOCUMENT_KERNELS = {
    "hf": ("sdpa", "flex_attention"),
    "plain": ("flex",),
    "titan": ("varlen", "flex"),
}
"""How each peer can keep documents separate."""


def sweep_of(peer: str, case: Case, microbatch: int, *, has_documents: bool = False) -> list[Settings]:
    """The settings of a peer that are tried; all of them make steps of the same tokens."""
    best, documented = best_settings(peer), CONTENDERS[peer].documented
    if has_documents:
        best = {**best, "microbatch": microbatch // 2} if peer == "titan" else best
        return [{**best, "attention": kind} for kind in DOCUMENT_KERNELS.get(peer, ())]
    if peer == "titan" and (case.model.moe is not None or case.model.positions != "rope"):
        return []  # its Llama alone takes part
    if peer == "titan":  # it keeps full logits, so the larger micro-batch does not fit beside others
        return [{**best, "microbatch": microbatch // 2}]
    smaller, larger = {"microbatch": microbatch // 2}, {"microbatch": microbatch * 2}
    if case.model.moe is not None:  # experts compile block by block only
        return [{**best, "compile": "regional"}] if peer == "hf" else []
    if case.peer_weights == "bf16":  # it hardly fits: settings that are known to be slow are left out
        return [best, {**best, **smaller}] if peer != "lightning" else []
    if documented is None:
        return [best, {**best, **smaller}]
    if peer == "lightning":
        return [documented, best, {**best, "optimizer": "fused", "clip": "own"}]
    return [
        documented,
        {**documented, **smaller},
        {**documented, "compile": True},
        best,
        {**best, "compile": "regional"},
        {**best, **smaller},
        {**best, **larger},
    ]


def settings_text(settings: Settings, run: RunSpec) -> str:
    """Settings as a label: `compiled, fused AdamW, 2 x 8`."""
    kind = settings.get("compile", True)
    parts = ["compiled by block" if kind == "regional" else "compiled" if kind else "eager"]
    if "output" in settings:
        parts.append("loss alone" if settings["output"] == "loss" else "logits returned")
    parts.append("fused AdamW" if settings.get("optimizer", "fused") == "fused" else "default AdamW")
    parts += [settings["attention"].removesuffix("_attention")] if "attention" in settings else []
    parts += ["clipped by the module"] if settings.get("clip") == "own" else []
    parts += ["recompute"] if settings.get("recompute") else []
    parts += ["all in bf16"] if settings.get("weights") == "bf16" else []
    return ", ".join([*parts, f"{run.accumulation} x {run.data.microbatch_sequences}"])


def missing_packages(name: str) -> list[str]:
    """Packages of a contender that are not installed."""
    return [package for package in CONTENDERS[name].packages if importlib.util.find_spec(package) is None]


def selected_contenders(options: Namespace) -> list[str]:
    """The contenders of `--only` that are installed; the others are named on stdout."""
    names = options.only.split(",") if options.only else list(CONTENDERS)
    unknown = [name for name in names if name not in CONTENDERS]
    if unknown:
        raise SpecError(
            f"no contender is called {unknown[0]!r}",
            where="--only",
            hint=f"known are {', '.join(CONTENDERS)}",
        )
    installed = []
    for name in names:
        missing = missing_packages(name)
        if missing:
            print(f"{name}: skipped, {' and '.join(missing)} not installed", flush=True)
        else:
            installed.append(name)
    return installed


def notes_of(options: Namespace) -> list[str]:
    """Sentences for the results page about contenders that are not installed."""
    notes = [
        f"{contender.title} did not take part: {' and '.join(missing_packages(name))} not installed."
        for name, contender in CONTENDERS.items()
        if missing_packages(name) and (not options.only or name in options.only.split(","))
    ]
    if importlib.util.find_spec("liger_kernel") is None:
        notes.append("Liger's kernels are not installed, so Hugging Face ran without them.")
    return notes
