"""The table of block memory: sections put together, and modes that were not traced."""

import pytest

from meshwright.plan.framework import our_runtime
from meshwright.plan.memory.block_table import (
    Mode,
    block_memory,
    find_section,
    parse_terms,
    show_terms,
    total,
)
from meshwright.plan.memory.rank_bytes import movable_bytes
from meshwright.plan.workload.layouts import FULL, layouts
from meshwright.plan.workload.workload import Workload
from meshwright.spec.families import family

PLAIN = Mode(compiled=False, recompute="none", weights="cast", fp8="bf16", tp="1")


def test_terms_round_trip_as_text() -> None:
    terms = {"t*D": 6.0, "T*HK": 4.0}
    assert parse_terms(show_terms(terms)) == terms
    assert show_terms(terms) == "T*HK:4 t*D:6"


def test_a_dense_block_keeps_what_its_layers_save_for_backward() -> None:
    """Norms keep fp32 inputs and their outputs, attention q, k, v and its output, SwiGLU four tensors."""
    kept = block_memory(PLAIN, "gqa", "plain", "swiglu").kept
    assert {name: kept[name] for name in ("t*D", "T*GK", "T*HK", "T*F")} == {
        "t*D": 12.0,
        "T*GK": 4.0,
        "T*HK": 4.0,
        "T*F": 8.0,
    }


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("tp", ["1", "tp", "tp_rows"])
def test_full_recompute_keeps_the_input_alone(tp: str, compiled: bool) -> None:
    mode = PLAIN._replace(compiled=compiled, recompute="full", tp=tp)
    assert block_memory(mode, "gqa", "plain", "swiglu").kept == {"t*D": 2.0}


@pytest.mark.parametrize("weights", ["cast", "bf16", "zero3"])
@pytest.mark.parametrize("fp8", ["bf16", "current", "mxfp8"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("tp", ["1", "tp", "tp_rows"])
def test_every_mode_has_every_section(
    weights: str, fp8: str, recompute: str, compiled: bool, tp: str
) -> None:
    mode = Mode(compiled, recompute, weights, fp8, tp)
    for attention, core in (("gqa", "plain"), ("latent", "ring"), ("qk_norm", "ulysses")):
        for mlp in ("swiglu", "gelu", "routed", "routed_shared", "routed_ep", "routed_shared_ep"):
            block = block_memory(mode, attention, core, mlp)
            assert block.forward
            assert block.backward


def test_a_section_that_was_not_traced_moves_by_what_the_mode_changes_of_the_plain_one() -> None:
    mode = PLAIN._replace(fp8="current")
    bf16, fp8 = (find_section(one, "attention", "qk_norm").kept for one in (PLAIN, mode))
    plain_bf16, plain_fp8 = (find_section(one, "attention", "gqa").kept for one in (PLAIN, mode))
    assert total(fp8, bf16, sign=-1.0) == total(plain_fp8, plain_bf16, sign=-1.0)


def test_every_second_block_recomputed_keeps_the_mean() -> None:
    work, stack = Workload(family("llama-3.1-8b"), 4096, compiled=True), our_runtime()
    none, full, half = (
        movable_bytes(work, layouts(recompute=bits, recompute_every=every), stack)[0, 0]
        for bits, every in ((0, 1), (FULL, 1), (FULL, 2))
    )
    assert half == pytest.approx((none + full) / 2)
    assert full < none
