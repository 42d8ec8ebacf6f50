"""Measurements on a CUDA device: fp8 matmuls, the attention kernel, the kernels of a step."""

import io
import json
from pathlib import Path

import pytest
import torch
from bench.contenders.plain import plain_model
from bench.contenders.protocol import Job
from bench.interleaved.channel import Channel
from bench.interleaved.clock import WorkerClock
from bench.step import parse
from bench.workloads.cases import CASES, build_run
from tests.support.runs import tiny_run

from meshwright.bench.attention import default_backend, profiled_kernel, time_attention
from meshwright.bench.copy import link_rows
from meshwright.bench.gemm import matmul_call, precisions_of, time_matmul
from meshwright.bench.kernel_time import profiled
from meshwright.bench.step import measure_step, on_random_tokens
from meshwright.observe.profile.kernel_classes import class_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda", 0)


def test_every_precision_multiplies_faster_in_fewer_bits() -> None:
    rates = {
        precision: time_matmul(4096, 4096, 4096, precision, CUDA, seconds=0.05)["teraflops"]
        for precision in precisions_of(CUDA)
    }
    # Matrix units against plain ones, and half the bits: both differ by far more than any spread.
    assert rates["fp32"] < rates["tf32"] < rates["bf16"]
    if "fp8" in rates:
        assert rates["bf16"] < rates["fp8"]


def test_kernels_of_a_matmul_are_profiled_and_classed() -> None:
    call = matmul_call(2048, 2048, 2048, "bf16", CUDA)
    found = profiled(lambda: [call() for _ in range(4)], num_steps=4)
    assert found.step_seconds > 0
    assert next(iter(found.seconds_by_class)) == "matmul", found.largest


def test_the_chosen_attention_kernel_can_be_timed() -> None:
    row = time_attention(default_backend(CUDA, 4096, 128), CUDA, 4096, 128, seconds=0.05)
    assert "error" not in row and row["forward_teraflops"] > 1
    assert profiled_kernel(row["backend"], CUDA, 4096, 128)


def test_the_link_to_the_host_goes_both_ways() -> None:
    names = [row["what"] for row in link_rows(CUDA, seconds=0.02)]
    assert len(names) == 4 and names[0] == "host to device, pinned"


def test_a_step_reports_its_memory_and_its_attention_kernel() -> None:
    run = tiny_run("gqa", microbatch_sequences=2)
    run = run.with_(device="cuda", precision=run.precision.with_(compute="bf16"))
    with on_random_tokens(run) as prepared:
        found = measure_step(prepared, seconds=0.1, warmup_steps=2)
    assert 0 < found["allocated_bytes"] <= found["reserved_bytes"]
    assert found["kernel_seconds"] and all(
        class_of(name) == "attention" for name in found["attention_kernels"]
    )


def test_an_idle_contender_frees_what_only_a_step_needs() -> None:
    window = {"command": "time", "seconds": 0.0, "fewest_steps": 2, "lead_steps": 1, "accumulation_factor": 1}
    commands = [window | {"is_profiled": True, "keeps_memory": False}, {"command": "stop"}]
    answers = io.StringIO()
    channel = Channel(io.StringIO("".join(json.dumps(one) + "\n" for one in commands)), answers)
    clock = WorkerClock(CUDA, channel, warmup_steps=1)
    weight = torch.randn(1024, 1024, device=CUDA)
    is_wanted = True
    while is_wanted:
        is_wanted = clock.after_step((weight @ torch.randn(1024, 1 << 15, device=CUDA)).sum())
    ready, timed = map(json.loads, answers.getvalue().splitlines())
    assert ready["idle_bytes"] < ready["peak_bytes"] - (100 << 20) and timed["row"]["num_steps"] == 2
    assert timed["row"]["kernel_seconds"]["matmul"] > 0


def test_freed_weights_leave_the_device(tmp_path: Path) -> None:
    options = parse(["--case", "tiny", "--device", "cuda", "--precision", "bf16"])
    job = Job(build_run(CASES["tiny"], options, tmp_path), CUDA)
    before = torch.cuda.memory_allocated()
    model = plain_model(job)
    held, first = torch.cuda.memory_allocated() - before, model.tokens.weight.clone()
    job.free_weights()
    assert torch.cuda.memory_allocated() - before < held / 4
    job.restore_weights()
    assert torch.equal(model.tokens.weight, first)
