"""`meshwright plan --calibrate`: refits the time factors of a machine from its own runs. Needs no torch."""

import json
from pathlib import Path
from typing import Any

import typer

DEFAULT_OUTPUT = Path("machine.json")
WARMUP_SHARE, MAX_WARMUP = 0.2, 20
"""Steps at the start of a run that are left out: they compile, warm caches and fill pipelines."""
MIN_STEPS = 2


def calibrate(folders: list[str], *, on: str, output: Path | None, force: bool, as_json: bool) -> None:
    """Fit, print the error before and after, and write the profile that --on reads."""
    from meshwright.errors import SpecError
    from meshwright.hardware import cluster_of
    from meshwright.plan.calibrate import fit

    path = output or DEFAULT_OUTPUT
    if path.exists() and not force:
        hint = "name another file with -o, or overwrite it with --force"
        raise SpecError(f"{path} already exists", where=str(path), hint=hint)
    runs = [_measured(Path(folder)) for folder in folders]
    where = on or ("cpu" if all(each.run.device == "cpu" for each in runs) else "")
    if not where:
        hint = "such as --on h100:8: the device that the runs used"
        raise SpecError("no cluster is given", where="--on", hint=hint)
    found = fit(runs, cluster_of(where))
    _write(path, _document(where, found, max(each.run.parallel.num_ranks for each in runs)))
    typer.echo(json.dumps(_json(found, path)) if as_json else _text(found))
    typer.echo(f"written: {path}; `meshwright plan MODEL --on {path}` uses it", err=True)


def _measured(folder: Path) -> Any:
    """A run directory as one measurement: the median of its steps after warm-up."""
    from statistics import median

    from meshwright.errors import SpecError
    from meshwright.observe.history import read_history
    from meshwright.plan.calibrate import MeasuredRun
    from meshwright.spec.text import load_run

    if not (folder / "run.yaml").is_file():
        hint = "a folder that `meshwright train`, or `rehearse --measure --dir`, wrote"
        raise SpecError(f"{folder} is no run directory: it has no run.yaml", where="--calibrate", hint=hint)
    seconds = read_history(folder, ("step_seconds",)).values("step_seconds")
    warmup = min(MAX_WARMUP, int(WARMUP_SHARE * len(seconds)) or 1)
    if len(seconds) - warmup < MIN_STEPS:
        fact = f"{folder} has {len(seconds)} measured steps"
        raise SpecError(fact, where="--calibrate", hint=f"at least {MIN_STEPS + 1} are needed")
    return MeasuredRun(folder.name, load_run(folder / "run.yaml"), float(median(seconds[warmup:])))


def _document(on: str, found: Any, num_devices: int) -> dict[str, Any]:
    """The profile: that of --on where it is one, with the factors added."""
    from dataclasses import asdict
    from datetime import UTC, datetime

    from meshwright.hardware import cluster_of

    base: dict[str, Any] = {"device": cluster_of(on).device.name, "machine": {"num_devices": num_devices}}
    file = on.partition(".json")[0] + ".json"
    if ".json" in on:
        base = json.loads(Path(file).read_text(encoding="utf-8"))
    old = base.get("calibration", {})
    factors = asdict(found.calibration)
    for name in ("compute", "communication"):
        factors[name] *= float(old.get(name, 1.0))
    measured = {**base.get("measured", {}), "date": datetime.now(UTC).date().isoformat()}
    return {**base, "measured": measured, "calibration": factors}


def _write(path: Path, document: dict[str, Any]) -> None:
    from meshwright.errors import SpecError

    try:
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        fact = f"cannot write {path}: {error.strerror}"
        raise SpecError(fact, where=str(path), hint="name a file that can be written") from None


def _text(found: Any) -> str:
    from meshwright.units import show_seconds

    width = max(len(each.name) for each in found.runs)
    lines = [f"{'run':<{width}}  {'measured':>9}  {'before':>9}  {'error':>7}  {'after':>9}  {'error':>7}"]
    for each in found.runs:
        dropped = "  dropped: far from the others" if each.is_dropped else ""
        lines.append(
            f"{each.name:<{width}}  {show_seconds(each.measured_seconds):>9}  "
            f"{show_seconds(each.before_seconds):>9}  {each.before_error:>+7.0%}  "
            f"{show_seconds(each.after_seconds):>9}  {each.after_error:>+7.0%}{dropped}"
        )
    factors = found.calibration
    lines.append(
        f"kernels take {factors.compute:.3g} x and communication {factors.communication:.3g} x "
        "the predicted time"
    )
    lines.append(f"median error of the step time: {found.before_error:.1%} -> {found.after_error:.1%}")
    if found.left_out_error is not None:
        lines.append(f"of each run, fitted to the others: {found.left_out_error:.1%}")
    return "\n".join([*lines, *found.notes])


def _json(found: Any, path: Path) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "profile": str(path),
        "calibration": asdict(found.calibration),
        "before_error": found.before_error,
        "after_error": found.after_error,
        "left_out_error": found.left_out_error,
        "runs": [asdict(each) for each in found.runs],
        "notes": list(found.notes),
    }
