"""`meshwright.plan`, `predict` and `check`: the verbs of the same names, called from Python."""

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, TypedDict, Unpack

from meshwright.api.external import external_of
from meshwright.api.results import CheckResult, PlanResult, PredictionResult
from meshwright.errors import SpecError, SpecErrors
from meshwright.hardware import cluster_of
from meshwright.hardware.catalogue import Cluster
from meshwright.plan.choose_finetune import fill_finetune
from meshwright.plan.explain.microbatch import advise_microbatch
from meshwright.plan.external import ExternalModel, fill_external, predict_external
from meshwright.plan.make_plan import make_plan
from meshwright.plan.predict import predict_run
from meshwright.plan.search.finetune import require_known
from meshwright.plan.search.pins import parse_pins
from meshwright.plan.search.question import Objective
from meshwright.plan.search.request import FilledRequest, Request, fill_request
from meshwright.spec.advice import advise
from meshwright.spec.run import RunSpec
from meshwright.spec.text import LoadedRun, dump_run, parse_run, read_run
from meshwright.units import parse_count

RunLike = str | PathLike[str] | RunSpec | PlanResult
"""A run: a run file, the name of a recipe, a RunSpec, or a plan."""


class PlanSettings(TypedDict, total=False):
    """Keywords of `meshwright.plan`; each is the option of the same name of the command line."""

    seq: int | str
    batch_tokens: int | str
    tokens: int | str
    precision: str
    allow: str | Sequence[str]
    objective: Objective
    finetune: str
    top: int
    pins: Mapping[str, object]


def plan(model: str | PathLike[str], *, on: str | Cluster, **settings: Unpack[PlanSettings]) -> PlanResult:
    """Rank the layouts of a model on a cluster: `meshwright.plan("llama-3.1-8b", on="h100:8")`.

    `model` and `on` are those of the command line. `pins` fixes settings: `pins={"tp": 8, "zero": [1, 2]}`.
    The other keywords are `seq`, `batch_tokens`, `tokens` (numbers, or text such as "300B"), `precision`,
    `allow`, `objective`, `finetune` ("full", "lora", "qlora" or "auto", whose choice `finetune_reasons` of
    the result explains) and `top`. Raises PlanError where nothing fits, with what would. The config of a
    Hugging Face model outside of our families is traced; its plan has `call`, the call of `meshwright.fit`.
    """
    _reject_unknown(settings)
    external = external_of(str(model))
    pins = [f"{key}={_pin_text(value)}" for key, value in settings.get("pins", {}).items()]
    for name in ("allow", "finetune"):
        if external is not None and settings.get(name) is not None:
            fact = f"{name} has no effect for a model that is trained as a module"
            raise SpecError(fact, where=name, hint="leave it out")
    filled, reasons = fill_finetune(
        settings.get("finetune"),
        pins,
        lambda finetune, pinned: _filled(str(model), _cluster(on), external, settings, finetune, pinned),
    )
    found = make_plan(filled.question, top=settings.get("top", 5))
    return PlanResult(found, filled.tokens, filled.assumed, external, reasons)


def _filled(
    model: str,
    cluster: Cluster,
    external: ExternalModel | None,
    settings: PlanSettings,
    finetune: str | None,
    pins: Sequence[str],
) -> FilledRequest:
    """The question in numbers, with defaults for everything that was not given."""
    allow = settings.get("allow")
    request = Request(
        model=model,
        cluster=cluster,
        pins=parse_pins(pins if external is None else external.with_pins(pins)),
        sequence_length=_count("seq", settings.get("seq")),
        batch_tokens=_count("batch_tokens", settings.get("batch_tokens")),
        tokens=_count("tokens", settings.get("tokens")),
        precision=settings.get("precision"),
        allow=allow if allow is None or isinstance(allow, str) else ",".join(allow),
        objective=settings.get("objective", "speed"),
        finetune=require_known(finetune),
    )
    return fill_request(request) if external is None else fill_external(external, request)


def predict(run: RunLike, *, on: str | Cluster, overrides: Sequence[str] = ()) -> PredictionResult:
    """Predict memory, step time and MFU of a run on a cluster; it need not fit.

    `run` may also be the config of a Hugging Face model outside of our families; overrides set its layout.
    """
    cluster = _cluster(on)
    external = external_of(str(run)) if isinstance(run, str | PathLike) else None
    if external is not None:
        spec, found = predict_external(external, overrides, cluster)
        return PredictionResult(spec, cluster, found, external)
    spec = load(run, overrides).require_valid()
    return PredictionResult(spec, cluster, predict_run(spec, cluster))


def check(run: RunLike, *, on: str | Cluster | None = None, overrides: Sequence[str] = ()) -> CheckResult:
    """List the rules that a run breaks and what in it wastes the hardware; an invalid run raises nothing."""
    try:
        spec = load(run, overrides).require_valid()
    except SpecErrors as errors:
        return CheckResult(None, tuple(errors.violations))
    except SpecError as error:
        return CheckResult(None, (error,))
    notes = [*advise(spec), *(advise_microbatch(spec, _cluster(on)) if on is not None else [])]
    return CheckResult(spec, notes=tuple(notes))


def load(run: RunLike, overrides: Sequence[str] = ()) -> LoadedRun:
    """The run of a file, a recipe, a spec or a plan, with overrides such as `parallel.tp=2`."""
    if isinstance(run, PlanResult):
        run.require_run_file()
        run = run.run
    if isinstance(run, RunSpec):
        return parse_run(dump_run(run), overrides, place="RunSpec")
    return read_run(str(Path(run)) if not isinstance(run, str) else run, list(overrides))


def _cluster(on: str | Cluster) -> Cluster:
    return on if isinstance(on, Cluster) else cluster_of(on)


def _reject_unknown(settings: Mapping[str, Any]) -> None:
    for name in settings:
        if name not in PlanSettings.__annotations__:
            known = ", ".join(PlanSettings.__annotations__)
            raise SpecError(f"plan has no setting {name!r}", where="plan", hint=f"use {known}")


def _pin_text(value: object) -> str:
    """A pin as the command line writes it: `1,2` for a list, `true` for True."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ",".join(map(_pin_text, value))
    return str(value)


def _count(name: str, value: int | str | None) -> int | None:
    if value is None:
        return None
    try:
        found = parse_count(value)
    except ValueError as error:
        raise SpecError(str(error), where=name, hint="such as 8192, 4M or 300B") from None
    if not isinstance(found, int):
        raise SpecError(f"{name} is {value!r}", where=name, hint="such as 8192, 4M or 300B")
    return found
