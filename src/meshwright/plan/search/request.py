"""From the command line to a question: the complete run, with only its layout left open.

What the user does not give is filled in here, and each value that was filled in is listed in `assumed`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from meshwright.errors import SpecError, SpecErrors, read_trouble
from meshwright.files import read_text
from meshwright.hardware.catalogue import Cluster
from meshwright.plan.search.allow import parse_allow, reject_pinned
from meshwright.plan.search.finetune import (
    TUNING_BATCH_TOKENS,
    TUNING_SEQUENCE,
    TUNING_TOKENS,
    FineTuning,
    set_adapter,
    set_rate,
)
from meshwright.plan.search.pins import Pins
from meshwright.plan.search.question import Objective, Question
from meshwright.plan.workload.schedules import SCHEDULES, SPLIT_BACKWARD
from meshwright.spec.families import is_family
from meshwright.spec.huggingface import load_model
from meshwright.spec.model import ModelSpec
from meshwright.spec.parameters import num_parameters
from meshwright.spec.run import RunSpec
from meshwright.spec.text import parse_run, read_run, recipe_names
from meshwright.spec.yaml_text import dump_yaml, parse_yaml
from meshwright.units import show_bytes, show_count

DEFAULT_SEQUENCE = 8192
# Below this many parameters, published runs use batches of this many tokens.
DEFAULT_BATCH_TOKENS = ((1e9, 2**19), (5e9, 2**20), (1e11, 2**22), (float("inf"), 2**24))
OPTIMAL_TOKENS_PER_PARAMETER = 20
MAX_WARMUP_STEPS = 2000
NEAR_FRACTION = 0.1
"""A batch may differ this much from the requested tokens, to divide well."""
OPTION_OF_KEY = {
    "data.sequence_length": "--seq",
    "data.batch_sequences": "--batch-tokens",
    "precision.compute": "--precision",
    "schedule.num_steps": "--tokens",
}
MAX_SEQUENCE, MAX_TOKENS = 2**24, 10**16


@dataclass(frozen=True)
class Request:
    """The command line of `plan` in numbers; None for an option that was not given."""

    model: str | ModelSpec
    cluster: Cluster
    pins: Pins
    sequence_length: int | None = None
    batch_tokens: int | None = None
    tokens: int | None = None
    precision: str | None = None
    allow: str | None = None
    objective: Objective = "speed"
    finetune: FineTuning | None = None
    """How a pre-trained model is trained further; None: training from random weights."""

    @property
    def place(self) -> str:
        """The model in an error text."""
        return self.model if isinstance(self.model, str) else self.model.family


@dataclass(frozen=True)
class FilledRequest:
    """A complete question."""

    question: Question
    tokens: int
    """Tokens of the run, over all its steps."""
    assumed: tuple[str, ...]
    """The values that were filled in, each with the option that sets it."""


def fill_request(request: Request) -> FilledRequest:
    """The question of a request, with defaults for everything that it leaves open."""
    tree = _model_tree(request.model)
    model = _model_of(tree, request.place)
    request = _with_file(request, tree)
    formats: list[str] = []
    tree["precision"] = _precision_of(tree, request, formats)
    assumed = list(set_adapter(tree, request.finetune, request.pins))
    assumed += set_rate(tree, request.finetune, request.pins)
    length = _sequence_length(request, model, assumed)
    batch_sequences = _batch_sequences(request, model, length, assumed)
    tokens = _tokens(request, model, assumed)
    num_steps = max(1, -(-tokens // (batch_sequences * length)))
    assumed += formats
    tree["schedule"] = {
        "warmup_steps": min(MAX_WARMUP_STEPS, num_steps // 50),
        **_mapping(tree.get("schedule")),
        "num_steps": num_steps,
    }
    tree["data"] = _data(tree.get("data"), length, batch_sequences, request.pins, assumed)
    if "compile" not in tree and _compiles(request):
        tree["compile"] = True
        assumed.append("compiled blocks (compile=false turns it off)")
    assumed += _assumed_of_cluster(request.cluster)
    tree.setdefault("name", _name(model, request.cluster))
    run = _parsed(tree, request)
    reject_pinned(request.allow, request.pins)
    allow = parse_allow(request.allow)
    question = Question(
        run,
        request.cluster,
        request.pins,
        request.objective,
        allow=allow,
        from_trained=request.finetune is not None or run.is_finetuning,
    )
    assumed += question.workload.assumed
    if run.train_only and run.adapter is None:
        assumed.append("memory and time of training all weights, of which train_only freezes a part")
    return FilledRequest(question, tokens, tuple(assumed))


def _assumed_of_cluster(cluster: Cluster) -> Iterator[str]:
    """The network and the host memory of a cluster that is named by its device alone."""
    source = cluster.sources.get("network_bytes_per_second", "")
    if cluster.num_nodes > 1 and source.startswith("assumed"):
        rate = cluster.network.bytes_per_second / 1e9
        yield f"a network of {rate:g} GB/s per device and direction (a TOML file for --on sets it)"
    if cluster.device.name != "cpu" and "host_memory_bytes" not in cluster.sources:
        host = show_bytes(cluster.host_memory_bytes)
        yield f"{host} of host memory per node (a TOML file for --on sets it)"


def _parsed(tree: dict[str, Any], request: Request) -> RunSpec:
    """The run; an error names the option that the user gave, not the key that was filled in from it."""
    try:
        return parse_run(dump_yaml(tree), request.pins.overrides, place=request.place).require_valid()
    except SpecErrors as errors:
        raise SpecErrors([_relocated(each, request.place) for each in errors.violations]) from None


def _relocated(violation: SpecError, model: str) -> SpecError:
    key = violation.where.rsplit(" ", 1)[-1]
    if not violation.where.startswith(f"{model}:"):
        return violation
    # The text that was read is that of the completed run: its lines are none of the user's file.
    is_file = model.endswith((".yaml", ".yml"))
    where = f"{model} {key}" if is_file else OPTION_OF_KEY.get(key, key)
    return SpecError(violation.fact, where=where, hint=violation.hint)


def _mapping(value: object) -> dict[str, Any]:
    return dict(cast("Mapping[str, Any]", value)) if isinstance(value, dict) else {}


def _model_tree(text: str | ModelSpec) -> dict[str, Any]:
    """The `model:` section and everything else of a run file except its layout."""
    if isinstance(text, ModelSpec):
        return {"model": text.model_dump(mode="json")}
    is_recipe = text in recipe_names() and not is_family(text)
    if not is_recipe and not text.endswith((".yaml", ".yml")):
        return {"model": text}
    try:
        content = {"recipe": text} if is_recipe else parse_yaml(read_text(text), text).value
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(
            f"cannot read {text}: {read_trouble(error)}", where="MODEL", hint="name a family or a file"
        ) from None
    if not isinstance(content, dict):
        raise SpecError("this is not a mapping of keys to values", where=text)
    tree = cast("dict[str, Any]", content)
    if "recipe" in tree or {"model", "data"} <= set(tree):
        tree = read_run(text).run.model_dump(mode="json")
    elif "model" not in tree:
        return {"model": tree}
    return {key: value for key, value in tree.items() if key not in ("parallel", "memory")}


def _with_file(request: Request, tree: dict[str, Any]) -> Request:
    """The request with values of the run file for options that were not given."""
    data, num_steps = _mapping(tree.get("data")), _mapping(tree.get("schedule")).get("num_steps")
    length, sequences = data.get("sequence_length"), data.get("batch_sequences")
    if request.sequence_length is None and length:
        request = replace(request, sequence_length=int(length))
    if request.batch_tokens is None and length and sequences:
        request = replace(request, batch_tokens=int(length) * int(sequences))
    if request.tokens is None and request.batch_tokens and num_steps:
        request = replace(request, tokens=int(num_steps) * request.batch_tokens)
    return request


def _model_of(tree: dict[str, Any], text: str) -> ModelSpec:
    """The model, read by the same rules as a run file."""
    if isinstance(tree["model"], str):
        return load_model(tree["model"])
    data: dict[str, Any] = {"synthetic": {}, "sequence_length": 1, "batch_sequences": 1}
    probe: dict[str, Any] = {"model": tree["model"], "schedule": {"num_steps": 1}, "data": data}
    return parse_run(dump_yaml(probe), place=text).run.model


def _sequence_length(request: Request, model: ModelSpec, assumed: list[str]) -> int:
    if request.sequence_length is not None:
        return _within("--seq", request.sequence_length, MAX_SEQUENCE)
    length = min(model.max_positions, DEFAULT_SEQUENCE if request.finetune is None else TUNING_SEQUENCE)
    assumed.append(f"sequences of {length} tokens (--seq)")
    return length


def _within(option: str, number: int, maximum: int) -> int:
    if not 1 <= number <= maximum:
        raise SpecError(f"{option} is {number}", where=option, hint=f"use 1 to {maximum:,.0f}")
    return number


def _batch_sequences(request: Request, model: ModelSpec, length: int, assumed: list[str]) -> int:
    if request.batch_tokens is None:
        size = num_parameters(model)
        tokens = next(batch for below, batch in DEFAULT_BATCH_TOKENS if size < below)
        usual = "this size"
        if request.finetune is not None:
            tokens, usual = TUNING_BATCH_TOKENS, "fine-tuning"
        sequences = _divisible(max(1.0, tokens / length))
        batch = f"a batch of {sequences} sequences = {show_count(sequences * length)} tokens"
        assumed.append(f"{batch}, usual for {usual} (--batch-tokens)")
        return sequences
    tokens = _within("--batch-tokens", request.batch_tokens, MAX_TOKENS)
    if tokens < length:
        fact = f"--batch-tokens {tokens} is less than one sequence of {length}"
        raise SpecError(fact, where="--batch-tokens", hint=f"use at least {length}, or a shorter --seq")
    if tokens % length == 0:
        return tokens // length
    sequences = _divisible(tokens / length)
    batch = f"a batch of {sequences} sequences = {show_count(sequences * length)} tokens"
    assumed.append(f"{batch}: close to {show_count(tokens)}, and divisible by a high power of two")
    return sequences


def _divisible(wanted: float) -> int:
    """Close to this many sequences: a multiple of a high power of two, whatever the number of devices."""
    step = 2 ** int(wanted).bit_length()
    while step > 1:
        nearest_multiple = round(wanted / step) * step
        if nearest_multiple and abs(nearest_multiple - wanted) <= NEAR_FRACTION * wanted:
            return nearest_multiple
        step //= 2
    return max(1, round(wanted))


def _tokens(request: Request, model: ModelSpec, assumed: list[str]) -> int:
    if request.tokens is not None:
        return _within("--tokens", request.tokens, MAX_TOKENS)
    if request.finetune is not None:
        assumed.append(f"{show_count(TUNING_TOKENS)} tokens (--tokens)")
        return TUNING_TOKENS
    tokens = OPTIMAL_TOKENS_PER_PARAMETER * num_parameters(model)
    assumed.append(f"{show_count(tokens)} tokens, 20 per parameter: compute-optimal (--tokens)")
    return tokens


def _compiles(request: Request) -> bool:
    """Whether blocks are compiled: on accelerators, except for schedules that split the backward pass."""
    pinned = request.pins.allowed.get("schedule", ())
    splits = bool(pinned) and all(SCHEDULES[kind] in SPLIT_BACKWARD for kind in pinned)
    # memory.regather_tp_inputs decides what is saved for backward, and so would the compiler.
    is_set = any(request.pins.override_of(key) for key in ("compile", "memory.regather_tp_inputs"))
    return request.cluster.device.name != "cpu" and not splits and not is_set


def _precision_of(tree: dict[str, Any], request: Request, assumed: list[str]) -> dict[str, Any]:
    """The precision of the run file, with that of --precision, which comes later, in its place."""
    given = _mapping(tree.get("precision"))
    if given and request.precision is None:
        return given
    rest = {key: value for key, value in given.items() if key not in ("compute", "fp8", "loss_scale")}
    return {**rest, **_precision(request, assumed)}


def _precision(request: Request, assumed: list[str]) -> dict[str, Any]:
    if request.precision in ("fp8", "mxfp8"):
        device = request.cluster.device
        if "fp8" not in device.peak_flops_per_second:
            fact = f"{device.title} has no fp8 rate"
            raise SpecError(fact, where="--precision", hint="use bf16, or a device from Hopper or Ada on")
        return {"compute": "bf16", "fp8": "mxfp8" if request.precision == "mxfp8" else "current"}
    if request.precision is not None:
        compute = request.precision
    else:
        peaks = request.cluster.device.peak_flops_per_second
        wanted = ("fp32",) if request.cluster.device.name == "cpu" else ("bf16", "fp16", "fp32")
        compute = next((name for name in wanted if name in peaks), "fp32")
        lacks_bf16 = "" if compute != "fp16" else f": {request.cluster.device.title} has no bf16"
        assumed.append(f"{compute} compute{lacks_bf16} (--precision)")
    return {"compute": compute, **({"loss_scale": {}} if compute == "fp16" else {})}


def _data(given: object, length: int, batch_sequences: int, pins: Pins, assumed: list[str]) -> dict[str, Any]:
    data = _mapping(given)
    data.pop("microbatch_sequences", None)
    has_data = data.get("path") or data.get("blend") or pins.override_of("data.path")
    if not has_data and "synthetic" not in data:
        data["synthetic"] = {}
        assumed.append("generated text as data, until data.path=FILE is set")
    return {**data, "sequence_length": length, "batch_sequences": batch_sequences}


def _name(model: ModelSpec, cluster: Cluster) -> str:
    name = f"{model.family}-{cluster.name}-{cluster.num_devices}"
    return "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in name).strip(".-_")
