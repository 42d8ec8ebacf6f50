"""Settings that trade time for memory: recompute (activation checkpointing), offload, regather."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator

from meshwright.spec.base import Positive, Spec

Recompute = Literal["none", "selective", "full"]
OnOom = Literal["stop", "halve_microbatch"]
Offloaded = Literal["optimizer", "parameters", "activations", "embedding"]
OFFLOAD_ORDER: tuple[Offloaded, ...] = ("optimizer", "parameters", "activations", "embedding")


def _as_list(value: Any) -> Any:
    """The list that `optimizer,activations` on a command line means."""
    return [word.strip() for word in value.split(",") if word.strip()] if isinstance(value, str) else value


def _in_order(value: tuple[Offloaded, ...]) -> tuple[Offloaded, ...]:
    """The same items in a fixed order: the order in a file has no meaning."""
    twice = [word for word in OFFLOAD_ORDER if value.count(word) > 1]
    if twice:
        raise ValueError(f"{twice[0]} is listed twice")
    return tuple(word for word in OFFLOAD_ORDER if word in value)


class MemorySpec(Spec):
    """Everything is kept on the device by default."""

    recompute: Recompute = "none"
    """Activation checkpointing: full recomputes each block in backward; selective saves matmul and attention
    outputs and recomputes the cheap rest."""
    recompute_every: Positive = 1
    """Recompute every k-th layer (1: all of them)."""
    offload: Annotated[tuple[Offloaded, ...], BeforeValidator(_as_list), AfterValidator(_in_order)] = ()
    """State that lives in host memory and is prefetched to the device only while it is used: optimizer states
    during the update, parameters and activations of a block while it computes. With recompute only the
    activations that it still saves are offloaded. embedding: a frozen token table that the head does not
    share stays in host memory, and the device reads the rows of a micro-batch from there. The order of the
    list has no meaning."""
    regather_tp_inputs: bool = False
    """tp: all-gather the inputs of column-wise layers again in backward instead of saving them gathered."""
    on_oom: OnOom = "stop"
    """When a rank is out of memory: stop, or restart from the last checkpoint with smaller micro-batches."""
