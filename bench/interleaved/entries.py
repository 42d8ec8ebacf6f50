"""The entries of a case: each contender with each of its settings, and estimates of its device memory."""

from argparse import Namespace
from pathlib import Path

from bench.contenders.registry import (
    Settings,
    best_settings,
    selected_contenders,
    settings_text,
    sweep_of,
)
from bench.interleaved.process import GIB, Entry
from bench.workloads.cases import CASES, CAST_PER_STEP, FP8, Case, build_run, with_microbatch

from meshwright.spec import RunSpec
from meshwright.spec.parameters import num_parameters

# Activations that a peer saves, relative to its model compiled as one graph; measured.
SAVED_BY_COMPILE = {True: 1.0, "regional": 2.1, False: 2.8}


def entries_of(name: str, options: Namespace, data: Path) -> list[Entry]:
    """All entries of a case, in the order in which they are timed."""
    case = CASES[name]
    found: list[Entry] = []
    for contender in selected_contenders(options):
        if contender == "ours":
            found += _our_entries(name, case, options, data)
        elif options.precision in ("all", "bf16", "fp32"):
            found += _peer_entries(name, case, contender, options, data)
    return sorted(found, key=lambda entry: _order(entry, case))


def _order(entry: Entry, case: Case) -> int:
    """fp8 comes last. Where several fit on the device, peers are swept before ours occupies memory."""
    if entry.is_fp8:
        return 2
    is_alone = case.peer_weights == "bf16"
    return int((entry.contender == "ours") != is_alone)


def _our_entries(name: str, case: Case, options: Namespace, data: Path) -> list[Entry]:
    overrides_of: dict[str, tuple[str, ...]] = {}
    if options.precision != "fp8":
        overrides_of["ours"] = ()
    if options.precision in ("all", "fp8"):
        overrides_of |= {f"ours, {kind}": FP8[kind] for kind in case.fp8}
    found = []
    for label, overrides in overrides_of.items():
        run = build_run(case, options, data, overrides)
        bytes_per_parameter = (10 if case.ours else 16) + 2 * (CAST_PER_STEP in overrides)
        state_gib = num_parameters(case.model) * bytes_per_parameter / GIB
        peak_gib = state_gib + _activation_gib(case, run)
        gib = (0.25 * peak_gib, state_gib, peak_gib)
        factor = case.accumulation_factor if label == "ours" else None
        found.append(_entry((name, label, label, "ours"), {}, run, gib, factor))
    return found


def _peer_entries(name: str, case: Case, peer: str, options: Namespace, data: Path) -> list[Entry]:
    base = build_run(case, options, data)
    tried = sweep_of(
        peer, case, base.data.microbatch_sequences, has_documents=base.data.documents == "separate"
    )
    if not options.sweep:
        tried = tried[:1] if options.documents else [best_settings(peer)]
    found: list[Entry] = []
    for settings in tried:
        run = with_microbatch(base, settings.get("microbatch", base.data.microbatch_sequences))
        if run is None:
            continue
        settings = {**settings, "weights": case.peer_weights, **({"compile": False} if options.eager else {})}
        label = f"{peer}: {settings_text(settings, run)}"
        if label in [entry.label for entry in found]:
            continue
        gib = _peer_gib(case, settings, run)
        found.append(_entry((name, peer, label, peer), settings, run, gib, None))
    return found


def _peer_gib(case: Case, settings: Settings, run: RunSpec) -> tuple[float, float, float]:
    weights_gib = num_parameters(case.model) * (4 if case.peer_weights == "fp32" else 2) / GIB
    saved_gib = _activation_gib(case, run) * case.peer_activations * SAVED_BY_COMPILE[settings["compile"]]
    if settings.get("output") == "full":  # the returned logits, their fp32 copy and its gradient
        tokens = run.data.microbatch_sequences * run.data.sequence_length
        saved_gib += 2 * 4 * case.model.vocab_size * tokens / GIB
    return weights_gib, 3 * weights_gib, 4 * weights_gib + saved_gib


def _activation_gib(case: Case, run: RunSpec) -> float:
    return case.activation_gib * run.data.microbatch_sequences / case.microbatch


def _entry(
    names: tuple[str, str, str, str],
    settings: Settings,
    run: RunSpec,
    gib: tuple[float, float, float],
    accumulation_factor: int | None,
) -> Entry:
    case, peer, label, contender = names
    built, idle, peak = (int(size * GIB) for size in gib)
    return Entry(
        case=case,
        peer=peer,
        label=label,
        contender=contender,
        settings=settings,
        run=run.model_dump(mode="json"),
        built_bytes=built,
        idle_bytes=idle,
        peak_bytes=peak,
        accumulation_factor=accumulation_factor,
    )
