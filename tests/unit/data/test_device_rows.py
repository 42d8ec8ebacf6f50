"""A dataset on the device gives the same batches, tensor by tensor, and is priced in the plan's memory."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.runs import tiny_run

from meshwright.data.batches import Batches, build_batches
from meshwright.data.pack import pack
from meshwright.data.tokenize import ByteTokenizer
from meshwright.data.write import new_dataset
from meshwright.errors import DataError
from meshwright.hardware import parse_cluster
from meshwright.plan.predict import predict_run
from meshwright.rehearse.trace import trace_rank
from meshwright.spec import DataSpec, PrecisionSpec

MIB = 2**20


def dataset(folder: Path) -> str:
    lines = [json.dumps({"text": f"line {line} " * (1 + line % 9)}) for line in range(80)]
    (folder / "a.jsonl").write_text("\n".join(lines))
    pack([folder / "a.jsonl"], folder / "a", tokenizer=ByteTokenizer())
    return str(folder / "a")


def weighted_dataset(folder: Path) -> str:
    """Chats in miniature: every second token has the weight 0.5, the others none."""
    with new_dataset(folder / "w", ByteTokenizer(), is_weighted=True) as writer:
        for number in range(30):
            writer.append([(np.arange(20) + number).astype(np.uint16)])
            writer.append_weights([np.arange(21) % 2 / 2])
        writer.finish(["generated"])
    return str(folder / "w")


def spec_of(path: str, **changes: Any) -> DataSpec:
    settings = {"path": path, "sequence_length": 32, "batch_sequences": 6, "microbatch_sequences": 3}
    return DataSpec.model_validate(settings | changes)


def build(spec: DataSpec, rank: int) -> Batches:
    return build_batches(spec, seed=3, vocab_size=257, dp_rank=rank, dp_size=2, dtype=torch.float64)


def assert_same(first: Any, second: Any) -> None:
    assert (first.num_tokens, first.sample_ids) == (second.num_tokens, second.sample_ids)
    for one, other in zip(first.microbatches, second.microbatches, strict=True):
        for name, value in one._asdict().items():
            same = getattr(other, name)
            assert torch.equal(value, same) if isinstance(value, torch.Tensor) else value == same, name


CASES: dict[str, dict[str, Any]] = {
    "cut": {},
    "joined": {"documents": "joined"},
    "whole": {"packing": "whole", "holdout": {"share": 0.2}},
    "weights": {"packing": "whole"},
    "last batch is short": {"max_epochs": 1},
}


@pytest.mark.parametrize("case", CASES)
def test_batches_are_the_same(tmp_path: Path, case: str) -> None:
    path = weighted_dataset(tmp_path) if case == "weights" else dataset(tmp_path)
    for rank in range(2):
        read = build(spec_of(path, **CASES[case]), rank)
        kept = build(spec_of(path, on_device_bytes=MIB, **CASES[case]), rank)
        for _ in range(12):
            first, second = next(read, None), next(kept, None)
            if first is None:
                assert second is None and case == "last batch is short"
                break
            assert_same(first, second)
        assert read.state() == kept.state()
        read.close()
        kept.close()


def test_more_than_the_budget_is_refused(tmp_path: Path) -> None:
    path = dataset(tmp_path)
    with pytest.raises(DataError, match=r"sequences take .* on the device, on_device_bytes is") as caught:
        build(spec_of(path, on_device_bytes=1000), 0)
    needed = int(caught.value.hint.split()[1])
    build(spec_of(path, on_device_bytes=needed), 0).close()


def test_the_plan_and_the_rehearsal_count_it() -> None:
    run = tiny_run(microbatch_sequences=4).with_(precision=PrecisionSpec(compute="bf16"))
    kept = run.with_(data=run.data.with_(on_device_bytes=64 * MIB))
    cluster = parse_cluster("h200:1")
    plain, more = predict_run(run, cluster).stages[0], predict_run(kept, cluster).stages[0]
    assert more.items["batch"] - plain.items.get("batch", 0.0) == 64 * MIB
    traces = [trace_rank(one, 0, num_steps=1) for one in (run, kept)]
    peaks = [max(np.cumsum([event.num_bytes for event in trace.events])) for trace in traces]
    assert peaks[1] - peaks[0] == 64 * MIB
