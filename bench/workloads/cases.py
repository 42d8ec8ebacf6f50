"""The models and batches of `bench/step.py`, who computes them, and with which settings."""

import importlib.util
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.contenders.protocol import missing_packages
from bench.interleaved.process import GIB, Entry

from meshwright.errors import SpecError
from meshwright.spec import (
    AttentionSpec,
    DataSpec,
    MlpSpec,
    ModelSpec,
    OptimSpec,
    PrecisionSpec,
    RopeSpec,
    RunSpec,
    ScheduleSpec,
)
from meshwright.spec.families import family
from meshwright.spec.parameters import num_parameters
from meshwright.spec.text import dump_run, parse_run

PEERS = {"hf": "Hugging Face + Accelerate", "plain": "plain torch", "lightning": "Lightning"}
CONTENDERS = ("ours", *PEERS)
Settings = dict[str, Any]
# What a peer keeps for backward compared with its model compiled whole, as measured.
KEEPS = {True: 1.0, "regional": 2.1, False: 2.8}


@dataclass(frozen=True)
class Case:
    """A model and a batch that everyone computes."""

    model: ModelSpec
    sequence_length: int
    microbatch: int
    accumulation: int
    activation_gib: float = 0.0
    """About what a micro-batch of ours takes beside the state: an estimate for the first warm-up only."""
    peer_activations: float = 1.35
    """How many times that a compiled peer takes, as measured; more where the logits weigh more."""
    peer_weights: str = "fp32"
    """bf16: what fits with peers that have no exact small master; their rows say so."""
    ours: tuple[str, ...] = ()
    """Settings of ours."""
    fp8: tuple[str, ...] = ()
    """Names of FP8 that are measured."""
    times: int | None = None
    """Ours besides with so many times the micro-batches: the update's share falls."""


def _tiny(kind: str) -> ModelSpec:
    if kind == "gpt":
        return (
            family("gpt2-124m")
            .with_(num_layers=3, width=64, vocab_size=512, max_positions=64)
            .with_(
                attention=family("gpt2-124m").attention.with_(num_heads=2, num_kv_heads=2, head_width=32),
                mlp=family("gpt2-124m").mlp.with_(width=256),
            )
        )
    return ModelSpec(
        vocab_size=512,
        num_layers=4,
        width=64,
        max_positions=64,
        attention=AttentionSpec(num_heads=4, num_kv_heads=2, head_width=16),
        mlp=MlpSpec(width=128),
        rope=RopeSpec(),
    )


# 10 bytes per parameter: weights and their lower bits, gradients and two moments, two bytes each.
_SMALL_STATE = ("precision.weights=bf16_exact", "precision.gradients=bf16", "optim.state=bf16")
_ENDS = ("precision.fp8=current",)
_HEAD = (*_ENDS, "precision.fp8.bf16_ends=0")
_ONCE = "precision.fp8.cast_weights=per_step"  # two bytes per weight more
FP8 = {
    "fp8, end blocks in bf16": _ENDS,
    "fp8, head alone in bf16": _HEAD,
    "fp8, end blocks in bf16, weights cast once a step": (*_ENDS, _ONCE),
    "fp8, head alone in bf16, weights cast once a step": (*_HEAD, _ONCE),
}
_PLAIN_FP8, _FAST_FP8 = tuple(FP8)[:2], tuple(FP8)[2:]
CASES = {
    # The vocabulary is padded from 50257 to a multiple of 128, for everyone.
    "124m": Case(family("gpt2-124m").with_(vocab_size=50304), 1024, 64, 2, 20.0, 1.7),
    "1b": Case(family("llama-3.2-1b"), 4096, 8, 2, activation_gib=43.0, fp8=_FAST_FP8, times=4),
    "8b": Case(
        family("llama-3.1-8b"),
        4096,
        2,
        4,
        activation_gib=40.0,
        peer_weights="bf16",
        ours=_SMALL_STATE,
        fp8=(*_PLAIN_FP8, _FAST_FP8[1]),  # the fast ones hardly fit
        times=4,
    ),
    "tiny": Case(_tiny("llama"), 64, 2, 2, fp8=_FAST_FP8, times=2),
    "tiny-gpt": Case(_tiny("gpt"), 64, 2, 2),
}
# What a peer's documentation shows first, and the best known beforehand.
DOCUMENTED: dict[str, Settings] = {
    "hf": {"compile": False, "output": "full", "optimizer": "default"},
    "lightning": {"compile": False, "optimizer": "default"},
}
BEST: dict[str, Settings] = {
    "hf": {"compile": True, "output": "loss", "optimizer": "fused"},
    "plain": {"compile": True, "optimizer": "fused"},
    "lightning": {"compile": True, "optimizer": "default"},  # it refuses to clip for a fused one
}


def sweep_of(peer: str, case: Case, microbatch: int) -> list[Settings]:
    """Every setting that is tried of a peer; all of them make steps of the same tokens."""
    best = BEST[peer]
    smaller, larger = {"microbatch": microbatch // 2}, {"microbatch": microbatch * 2}
    if case.peer_weights == "bf16":  # hardly fits: what is known to be slow is left out
        return [best, {**best, **smaller}] if peer != "lightning" else []
    tried: dict[str, list[Settings]] = {
        "hf": [
            DOCUMENTED["hf"],
            {**DOCUMENTED["hf"], **smaller},
            {**DOCUMENTED["hf"], "compile": True},
            best,
            {**best, "compile": "regional"},
            {**best, **smaller},
            {**best, **larger},
        ],
        "plain": [best, {**best, **smaller}],
        "lightning": [DOCUMENTED["lightning"], best, {**best, "optimizer": "fused", "clip": "own"}],
    }
    return tried[peer]


def words_of(settings: Settings, run: RunSpec) -> str:
    """Settings as a reader wants them."""
    kind = settings.get("compile", True)
    words = ["compiled by block" if kind == "regional" else "compiled" if kind else "eager"]
    if "output" in settings:
        words.append("loss alone" if settings["output"] == "loss" else "logits returned")
    words.append("fused AdamW" if settings.get("optimizer", "fused") == "fused" else "AdamW as it comes")
    words += ["clipped by the module"] if settings.get("clip") == "own" else []
    words += ["recompute"] if settings.get("recompute") else []
    words += ["all in bf16"] if settings.get("weights") == "bf16" else []
    return ", ".join([*words, f"{run.accumulation} x {run.data.microbatch_sequences}"])


# ---- run files ----------------------------------------------------------------------------------


def build_run(case: Case, options: Namespace, data: Path, overrides: tuple[str, ...] = ()) -> RunSpec:
    """The run file that ours trains from; peers read model, batch and optimizer out of it."""
    microbatch = options.microbatch or case.microbatch
    run = RunSpec(
        name="bench",
        device=options.device,
        compile=not options.eager,
        model=case.model,
        precision=PrecisionSpec(compute="fp32" if options.precision == "fp32" else "bf16"),
        optim=OptimSpec(lr=1e-4),
        schedule=ScheduleSpec(num_steps=100_000, kind="constant"),
        data=DataSpec(
            path=str(data),
            sequence_length=case.sequence_length,
            batch_sequences=microbatch * (options.accumulation or case.accumulation),
            microbatch_sequences=microbatch,
            documents="joined",
            shuffle=False,
        ),
    )
    return parse_run(dump_run(run), [*case.ours, *overrides, *options.set]).require_valid()


def with_microbatch(run: RunSpec, size: int) -> RunSpec | None:
    """The same tokens in micro-batches of another size; None where they do not divide."""
    if size < 1 or run.data.batch_sequences % size:
        return None
    return run.with_(data=run.data.with_(microbatch_sequences=size))


# ---- entries ------------------------------------------------------------------------------------


def entries_of(name: str, options: Namespace, data: Path) -> list[Entry]:
    """Everyone who computes a case, in the order of their turns; who is not installed is told in a line."""
    case = CASES[name]
    found: list[Entry] = []
    for contender in contenders_of(options):
        if contender == "ours":
            found += _our_entries(name, case, options, data)
        elif options.precision in ("all", "bf16", "fp32"):
            found += _peer_entries(name, case, contender, options, data)
    return sorted(found, key=lambda entry: _place(entry, case))


def _place(entry: Entry, case: Case) -> int:
    """fp8 is a class of its own and comes last. Peers are swept before ours takes room on the card, where
    several fit it at all."""
    if entry.run["precision"]["fp8"] is not None:
        return 2
    is_crowded = case.peer_weights == "bf16"
    return int((entry.contender == "ours") != is_crowded)


def contenders_of(options: Namespace) -> list[str]:
    """Who takes part."""
    names = options.only.split(",") if options.only else list(CONTENDERS)
    unknown = [name for name in names if name not in CONTENDERS]
    if unknown:
        raise SpecError(
            f"no contender is called {unknown[0]!r}",
            where="--only",
            hint=f"known are {', '.join(CONTENDERS)}",
        )
    present = []
    for name in names:
        missing = missing_packages(name)
        if missing:
            print(f"{name}: skipped, {' and '.join(missing)} not installed", flush=True)
        else:
            present.append(name)
    return present


def notes_of(options: Namespace) -> list[str]:
    """What a reader must know about who did not take part."""
    notes = [
        f"{PEERS.get(name, name)} did not take part: {' and '.join(missing_packages(name))} not installed."
        for name in CONTENDERS
        if missing_packages(name) and (not options.only or name in options.only.split(","))
    ]
    if importlib.util.find_spec("liger_kernel") is None:
        notes.append("Liger's kernels are not installed, so Hugging Face ran without them.")
    return notes


def _our_entries(name: str, case: Case, options: Namespace, data: Path) -> list[Entry]:
    kinds: dict[str, tuple[str, ...]] = {}
    if options.precision != "fp8":
        kinds["ours"] = ()
    if options.precision in ("all", "fp8"):
        kinds |= {f"ours, {kind}": FP8[kind] for kind in case.fp8}
    found = []
    for label, overrides in kinds.items():
        run = build_run(case, options, data, overrides)
        state_bytes = (10 if case.ours else 16) + 2 * (_ONCE in overrides)
        state_gib = num_parameters(case.model) * state_bytes / GIB
        peak_gib = state_gib + _activations(case, run)
        gib = (0.25 * peak_gib, state_gib, peak_gib)
        found.append(
            _entry(name, label, label, "ours", {}, run, gib, case.times if label == "ours" else None)
        )
    return found


def _peer_entries(name: str, case: Case, peer: str, options: Namespace, data: Path) -> list[Entry]:
    whole = build_run(case, options, data)
    sizes = sweep_of(peer, case, whole.data.microbatch_sequences) if options.sweep else [BEST[peer]]
    found = []
    for settings in sizes:
        run = with_microbatch(whole, settings.get("microbatch", whole.data.microbatch_sequences))
        if run is None:
            continue
        settings = {**settings, "weights": case.peer_weights, **({"compile": False} if options.eager else {})}
        label = f"{peer}: {words_of(settings, run)}"
        if label in [entry.label for entry in found]:
            continue
        weights_gib = num_parameters(case.model) * (4 if case.peer_weights == "fp32" else 2) / GIB
        kept_gib = _activations(case, run) * case.peer_activations * KEEPS[settings["compile"]]
        if settings.get("output") == "full":  # handed out, copied to fp32, and their gradients
            tokens = run.data.microbatch_sequences * run.data.sequence_length
            kept_gib += 2 * 4 * case.model.vocab_size * tokens / GIB
        gib = (weights_gib, 3 * weights_gib, 4 * weights_gib + kept_gib)
        found.append(_entry(name, peer, label, peer, settings, run, gib, None))
    return found


def _activations(case: Case, run: RunSpec) -> float:
    return case.activation_gib * run.data.microbatch_sequences / case.microbatch


def _entry(
    name: str,
    peer: str,
    label: str,
    contender: str,
    settings: Settings,
    run: RunSpec,
    gib: tuple[float, float, float],
    times: int | None,
) -> Entry:
    built, rest, peak = (int(size * GIB) for size in gib)
    return Entry(
        case=name,
        peer=peer,
        label=label,
        contender=contender,
        settings=settings,
        run=run.model_dump(mode="json"),
        built_bytes=built,
        rest_bytes=rest,
        peak_bytes=peak,
        times=times,
    )
