"""Which size to train on how many tokens for a budget: a published law at the cluster's predicted speed."""

import re
from dataclasses import dataclass

from meshwright.errors import PlanError, SpecError
from meshwright.hardware.catalogue import Cluster
from meshwright.plan.make_plan import make_plan
from meshwright.plan.predict import predict_run
from meshwright.plan.scaling_law import CHINCHILLA
from meshwright.plan.search.pins import Pins
from meshwright.plan.search.request import Request, fill_request
from meshwright.spec.model import ModelSpec
from meshwright.spec.parallel import MESH_ORDER, ParallelSpec
from meshwright.spec.parameters import num_parameters

# Parameters of the alternatives over those that are compute-optimal.
SIZES = (0.125, 0.25, 0.5, 1.0, 2.0)
# What a first look assumes of the hardware, to find the sizes whose speed is then predicted.
_USUAL_MFU = 0.4
_TILE = 128
_FORM = re.compile(r"([0-9.]+)\s*(gpu-hours|gpu-days|hours|days|weeks|money)")


@dataclass(frozen=True)
class Alternative:
    """One size that the budget trains."""

    model: ModelSpec
    num_parameters: int
    tokens: float
    tokens_per_second: float
    mfu: float
    layout: str
    expected_loss: float


def budget_hours(text: str, cluster: Cluster, price: float | None) -> float:
    """Hours of the whole cluster that a budget such as `10000 gpu-hours`, `30 days` or `50000 money` buys."""
    hint = "such as 10000 gpu-hours, 30 days, or 50000 money with --price per device-hour"
    found = _FORM.fullmatch(text.strip().lower().replace(",", ""))
    try:
        amount = float(found[1]) if found else 0.0
    except ValueError:
        amount = 0.0
    if found is None or not 0 < amount < 1e15:
        raise SpecError(f"{text!r} is no budget", where="--budget", hint=hint)
    if found[2] == "money":
        if not price:
            raise SpecError(
                "a budget in money needs a price", where="--price", hint="money per device-hour, such as 2.5"
            )
        return amount / price / cluster.num_devices
    device_hours = {"gpu-hours": 1.0, "gpu-days": 24.0}
    if found[2] in device_hours:
        return amount * device_hours[found[2]] / cluster.num_devices
    return amount * {"hours": 1.0, "days": 24.0, "weeks": 168.0}[found[2]]


def alternatives(template: ModelSpec, cluster: Cluster, hours: float, precision: str) -> list[Alternative]:
    """Models with the proportions of the template around the compute-optimal size, by size.

    Each is planned on the cluster, so that its tokens follow from its own predicted speed. A size that does
    not fit the cluster is left out; PlanError where none fits.
    """
    peak = cluster.device.peak(precision) * cluster.num_devices
    best = CHINCHILLA.optimal_parameters(_USUAL_MFU * peak * 3600.0 * hours)
    models = {num_parameters(model): model for model in (scaled(template, best * size) for size in SIZES)}
    found = [_alternative(models[count], cluster, hours, precision) for count in sorted(models)]
    fitting = [one for one in found if one is not None]
    if not fitting:
        raise PlanError(
            f"no size near {best:.3g} parameters fits {cluster.name}",
            where="--budget",
            hint="name more devices with --on",
        )
    return fitting


def scaled(template: ModelSpec, parameters: float) -> ModelSpec:
    """The template with about so many parameters: depth and width grow together."""
    low, high = 0.02, 20.0
    for _ in range(40):
        middle = (low * high) ** 0.5
        too_large = num_parameters(_scaled_by(template, middle)) > parameters
        low, high = (low, middle) if too_large else (middle, high)
    return _scaled_by(template, low)


def _scaled_by(template: ModelSpec, factor: float) -> ModelSpec:
    attention = template.attention
    heads = max(1, round(attention.num_heads * factor))
    most = min(heads, attention.num_kv_heads)
    kv_heads = max(count for count in range(1, most + 1) if heads % count == 0)
    # The head's width stays, so the width of the model grows by whole heads.
    width = heads * template.width // attention.num_heads
    return template.with_(
        num_layers=max(1, round(template.num_layers * factor)),
        width=width,
        attention=attention.with_(num_heads=heads, num_kv_heads=kv_heads),
        mlp=template.mlp.with_(width=max(_TILE, round(template.mlp.width * factor / _TILE) * _TILE)),
    )


def _alternative(model: ModelSpec, cluster: Cluster, hours: float, precision: str) -> Alternative | None:
    try:
        request = Request(model, cluster, Pins(), precision=precision)
        best = make_plan(fill_request(request).question, top=1).best
    except PlanError:
        return None
    predicted = predict_run(best.run, cluster.with_devices(best.run.parallel.num_ranks))
    speed = predicted.tokens_per_second_per_device * predicted.num_devices
    tokens, count = speed * 3600.0 * hours, num_parameters(model)
    return Alternative(
        model=model,
        num_parameters=count,
        tokens=tokens,
        tokens_per_second=speed,
        mfu=predicted.mfu,
        layout=_layout(best.run.parallel),
        expected_loss=CHINCHILLA.loss(count, tokens),
    )


def _layout(parallel: ParallelSpec) -> str:
    degrees = [f"{axis}={getattr(parallel, axis)}" for axis in MESH_ORDER if getattr(parallel, axis) > 1]
    return " ".join([*degrees, f"zero={parallel.zero}"]) if degrees else "one device"
