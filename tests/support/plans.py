"""Plans that several tests look at; each is made once per process."""

from functools import cache

from meshwright.hardware.catalogue import parse_cluster
from meshwright.plan.make_plan import make_plan
from meshwright.plan.search.decision import Plan
from meshwright.plan.search.pins import parse_pins
from meshwright.plan.search.question import Objective
from meshwright.plan.search.request import FilledRequest, Request, fill_request


@cache
def asked(
    model: str,
    on: str,
    *pins: str,
    seq: int | None = 8192,
    batch_tokens: int | None = 2**22,
    objective: Objective = "speed",
) -> FilledRequest:
    """The resolved request of `meshwright plan MODEL --on CLUSTER PINS`."""
    return fill_request(
        Request(
            model=model,
            cluster=parse_cluster(on),
            pins=parse_pins(pins),
            sequence_length=seq,
            batch_tokens=batch_tokens,
            tokens=10**12,
            precision="bf16",
            objective=objective,
        )
    )


@cache
def planned(model: str, on: str, *pins: str, seq: int = 8192, batch_tokens: int = 2**22) -> Plan:
    """The plan of `meshwright plan MODEL --on CLUSTER PINS`."""
    return make_plan(asked(model, on, *pins, seq=seq, batch_tokens=batch_tokens).question)


def small_plan() -> Plan:
    """A model that fits on one device, planned for eight of them: plain DDP."""
    return planned("gpt3-1.3b", "a100:8", seq=2048, batch_tokens=2**20)
