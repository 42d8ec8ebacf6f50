"""What trades seconds for bytes."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator

from meshwright.spec.base import Positive, Spec

Offloaded = Literal["optimizer", "parameters", "activations"]
OFFLOAD_ORDER: tuple[Offloaded, ...] = ("optimizer", "parameters", "activations")


def _listed(said: Any) -> Any:
    """`optimizer,activations` on a command line is a list as well."""
    return [word.strip() for word in said.split(",") if word.strip()] if isinstance(said, str) else said


def _in_order(said: tuple[Offloaded, ...]) -> tuple[Offloaded, ...]:
    """The order in which they were said means nothing, so it is always the same."""
    twice = [word for word in OFFLOAD_ORDER if said.count(word) > 1]
    if twice:
        raise ValueError(f"{twice[0]} stands there twice")
    return tuple(word for word in OFFLOAD_ORDER if word in said)


class MemorySpec(Spec):
    """Nothing is traded by default."""

    recompute: Literal["none", "selective", "full"] = "none"
    """selective keeps matmul and attention outputs and recomputes the cheap rest."""
    recompute_every: Positive = 1
    """Recompute every k-th layer (1: all of them)."""
    offload: Annotated[tuple[Offloaded, ...], BeforeValidator(_listed), AfterValidator(_in_order)] = ()
    """What lives in host memory and comes to the device only while it is used: optimizer states during the
    update, parameters of a block and activations of a block while it computes. Of activations that is all
    that recompute leaves to keep. In any order."""
    regather_tp_inputs: bool = False
    """tp: gather the inputs of column-cut layers again in backward instead of keeping them gathered."""
    on_oom: Literal["stop", "halve_microbatch"] = "stop"
    """When a rank is out of memory: stop, or restart from the last checkpoint with smaller micro-batches."""
