"""The process of one contender: imports, builds, compiles, and then makes steps on command.

bench/interleaved/process.py starts it and talks to it over stdin and stdout.
"""

import importlib
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from bench.contenders.protocol import Job
from bench.interleaved.channel import Channel, worker_channel
from bench.interleaved.clock import WorkerClock
from bench.interleaved.compile_gate import gate_after_compiling

from meshwright.mesh import choose_device
from meshwright.spec import RunSpec

# Compiled forms of one function: blocks of several kinds, of a small model and of the full one.
RECOMPILE_LIMIT = 64


def serve(request: dict[str, Any], channel: Channel) -> None:
    """Import, build, compile and train one contender; an error ends the process."""
    contender = importlib.import_module(f"bench.contenders.{request['contender']}")
    run = RunSpec.model_validate(request["run"])
    channel.send(state="imported")
    channel.receive()  # the command to build
    device = choose_device(run.device, 0)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    torch.manual_seed(run.seed)
    job = Job(run, device, request["settings"])
    clock = WorkerClock(device, channel, warmup_steps=request["warmup_steps"])
    compile_ahead = getattr(contender, "compile_ahead", None)
    is_compiled = run.compile and bool(job.setting("compile", True))
    if is_compiled and compile_ahead is not None:
        clock.compile_seconds = compile_ahead(job)
    is_gated = is_compiled and compile_ahead is None
    if not is_gated:
        clock.wait_for_device()
    with gate_after_compiling(lambda: wait_without_weights(job, clock)) if is_gated else nullcontext():
        contender.contend(job, clock)


def wait_without_weights(job: Job, clock: WorkerClock) -> None:
    """Wait for the device with the weights freed; they are drawn again afterwards."""
    job.free_weights()
    clock.wait_for_device()
    job.restore_weights()


def main() -> None:
    """Serve the request in the file of the first argument; OOM is reported to the driver."""
    channel = worker_channel()
    try:
        serve(json.loads(Path(sys.argv[1]).read_text()), channel)
    except torch.OutOfMemoryError as error:
        channel.send(state="failed", error=f"out of memory: {str(error).split('. ')[0]}")


if __name__ == "__main__":
    main()
