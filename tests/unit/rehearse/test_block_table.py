"""The planner's table of block memory is what the trace says now."""

import json
from typing import Any

import pytest

from meshwright.plan.memory.block_table import Mode
from meshwright.rehearse.block_kinds import Kind, kinds
from meshwright.rehearse.block_table import plain_kind, read_kind, sections_of, table_path

EAGER = Mode(compiled=False, recompute="selective", weights="cast", fp8="bf16", tp="tp")
SPOT_CHECKS = [
    Kind(EAGER),
    Kind(EAGER._replace(recompute="none", tp="1"), "latent", "routed"),
    Kind(EAGER._replace(recompute="full", tp="1", weights="zero3")),
    Kind(EAGER._replace(recompute="none", tp="1", compiled=True)),
]
HINT = "block_table.json is stale: run `python -m meshwright.rehearse.block_table`"


def stored() -> dict[str, Any]:
    return json.loads(table_path().read_text(encoding="utf-8"))["modes"]


def check_kind(kind: Kind) -> None:
    plain = read_kind(plain_kind(kind)) if kind.core != "plain" else None
    for section, named in sections_of(kind, read_kind(kind), plain).items():
        for name, found in named.items():
            assert stored()[str(kind.mode)][section][name] == found, f"{kind}: {HINT}"


@pytest.mark.parametrize("kind", SPOT_CHECKS, ids=str)
def test_the_table_is_what_the_trace_says(kind: Kind) -> None:
    check_kind(kind)


@pytest.mark.soak
@pytest.mark.parametrize("kind", list(kinds()), ids=str)
def test_every_kind_of_the_table(kind: Kind) -> None:
    check_kind(kind)
