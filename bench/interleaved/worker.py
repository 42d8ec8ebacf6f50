"""What runs in the process of one contender: imports, build, compile, and then steps when its turn comes.

Started by bench/interleaved/process.py, which talks to it over its standard input and output.
"""

import importlib
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from bench.contenders.protocol import Job
from bench.interleaved.channel import Channel, channel_of_child
from bench.interleaved.clock import TurnClock
from bench.interleaved.compile_gate import gate_after_compiling

from meshwright.mesh import choose_device
from meshwright.spec import RunSpec


def reside(request: dict[str, Any], channel: Channel) -> None:
    """Everything a contender does, in order; an error goes up and its words are the contender's last."""
    contender = importlib.import_module(f"bench.contenders.{request['contender']}")
    run = RunSpec.model_validate(request["run"])
    channel.send(state="imported")
    channel.receive()  # the order to build
    device = choose_device(run.device, 0)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = (
        64  # several kinds of blocks, of a small model and of the whole one
    )
    torch.manual_seed(run.seed)
    job = Job(run, device, request["settings"])
    clock = TurnClock(device, channel, warmup_steps=request["warmup_steps"])
    ahead = getattr(contender, "compile_ahead", None)
    is_compiled = run.compile and bool(job.setting("compile", True))
    if is_compiled and ahead is not None:
        clock.compile_seconds = ahead(job)
    is_gated = is_compiled and ahead is None
    if not is_gated:
        clock.take_card()
    with gate_after_compiling(lambda: fold_while(job, clock)) if is_gated else nullcontext():
        contender.contend(job, clock)


def fold_while(job: Job, clock: TurnClock) -> None:
    """Wait for the card without holding weights on it; they are drawn again."""
    job.fold()
    clock.take_card()
    job.unfold()


def main() -> None:
    """The request is a file; out of memory is told like every other end."""
    channel = channel_of_child()
    try:
        reside(json.loads(Path(sys.argv[1]).read_text()), channel)
    except torch.OutOfMemoryError as error:
        channel.send(state="failed", error=f"out of memory: {str(error).split('. ')[0]}")


if __name__ == "__main__":
    main()
