"""`meshwright plan` for a Hugging Face decoder outside of our families, trained as a module. Needs torch."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import typer


def external_of(model: str) -> Any | None:
    """The decoder of a config whose type is none of our families; None for every other MODEL."""
    from meshwright.spec.huggingface.read import is_external_config

    path = Path(model).expanduser()
    if not is_external_config(path):
        return None
    from meshwright.modules.external_decoder import external_decoder

    return external_decoder(path)


def with_decoder_pins(decoder: Any, pins: list[str]) -> list[str]:
    """The user's pins and those of the layouts that `fit` can run; the user's have to be among them."""
    from meshwright.errors import SpecError

    ours = dict(pin.split("=", 1) for pin in decoder.pins)
    given = dict(pin.split("=", 1) for pin in pins if "=" in pin)
    for key, value in given.items():
        allowed = ours.get(key.removeprefix("parallel."))
        if allowed is not None and not set(value.split(",")) <= set(allowed.split(",")):
            fact = f"{key}={value} is not possible for {decoder.name} as a module"
            raise SpecError(fact, where=key, hint=f"{key}={allowed}")
    return [*pins, *(f"{key}={value}" for key, value in ours.items() if key not in given)]


def priced_as_module(filled: Any, decoder: Any) -> Any:
    """The request with the memory of the module instead of that of our blocks."""
    from meshwright.plan.external import module_runtime
    from meshwright.plan.workload.formats import state_bytes

    runtime = module_runtime(decoder, state_bytes(filled.question.run.precision))
    return replace(filled, question=replace(filled.question, module_runtime=runtime))


def show_decoder(decoder: Any, run: Any) -> None:
    """What was traced, how far the priced decoder is from it, and the call that trains it."""
    from meshwright.spec.parameters import num_parameters
    from meshwright.units import show_bytes, show_count

    priced = num_parameters(decoder.model) / decoder.num_parameters - 1.0
    typer.echo(
        f"\n{decoder.name}: {show_count(decoder.num_parameters)} parameters (priced as a decoder of the same "
        f"sizes, {priced:+.2%}), {show_bytes(decoder.saved_bytes_per_token)} saved for backward per token "
        "and block, traced on the meta device"
    )
    typer.echo(f"train it as a module: {decoder.fit_text(run)}")
