"""Seconds of attention against one H200: docs/decisions/2026-11-16-attention-kernels.md."""

import pytest

from meshwright.hardware import parse_cluster
from meshwright.plan.time.attention import runtime_attention_seconds
from meshwright.plan.workload.documents import assumed_documents
from meshwright.plan.workload.layouts import CP_KINDS, layouts
from meshwright.plan.workload.workload import Workload
from meshwright.spec.families import family

H200 = parse_cluster("h200:1").device


def _milliseconds(workload: Workload, sequences: int, **layout: object) -> float:
    at = layouts(microbatch_sequences=sequences, **layout)
    return 1e3 * float(sum(runtime_attention_seconds(workload, at, H200))[0])


def _workload(head_width: int, sequence: int, mean_tokens: int | None, window: int | None = None) -> Workload:
    model = family("llama-3.1-8b")
    attention = model.attention.with_(head_width=head_width, window=window)
    documents = assumed_documents(sequence, mean_tokens) if mean_tokens else None
    return Workload(model.with_(attention=attention), sequence, compiled=True, documents=documents)


@pytest.mark.parametrize(
    ("sequences", "sequence", "head_width", "mean_tokens", "measured"),
    [
        (8, 4096, 64, None, 5.1),
        (2, 8192, 128, None, 7.1),
        (1, 32768, 128, None, 56.5),
        (2, 4096, 128, None, 2.06),
        (8, 4096, 64, 512, 3.4),
        (2, 8192, 128, 1024, 3.9),
        (1, 32768, 128, 4096, 19.0),
        (2, 4096, 128, 2048, 2.3),
    ],
)
def test_one_layer_is_within_a_tenth_of_the_measured_kernel(
    sequences: int, sequence: int, head_width: int, mean_tokens: int | None, measured: float
) -> None:
    found = _milliseconds(_workload(head_width, sequence, mean_tokens), sequences)
    assert found == pytest.approx(measured, rel=0.12)


@pytest.mark.parametrize(
    ("sequences", "sequence", "window", "measured"),
    [(2, 8192, 4096, 6.4), (2, 8192, 1024, 3.5), (1, 32768, 4096, 16.5)],
)
def test_a_window_is_two_causal_calls(sequences: int, sequence: int, window: int, measured: float) -> None:
    found = _milliseconds(_workload(128, sequence, None, window), sequences)
    assert found == pytest.approx(measured, rel=0.2)


def test_the_slowest_rank_of_cp_decides_except_where_heads_are_sharded() -> None:
    workload = _workload(128, 32768, 4096)
    alone = _milliseconds(workload, 1)
    ring = _milliseconds(workload, 1, cp=8, cp_kind=CP_KINDS.index("ring"))
    ulysses = _milliseconds(workload, 1, cp=8, cp_kind=CP_KINDS.index("ulysses"))
    assert ulysses == pytest.approx(alone / 8, rel=0.02)
    assert ring > 1.2 * ulysses


def test_masks_skip_no_pair() -> None:
    workload = _workload(128, 4096, 512)
    masked = Workload(workload.model, 4096, "fp32", documents=workload.documents)
    assert _milliseconds(masked, 1) > 4 * _milliseconds(Workload(workload.model, 4096, "fp32"), 1) / 2
