"""A shortage of memory between NCCL ranks on one card, wherever it strikes: nobody stays behind."""

import faulthandler
import tempfile
import threading
import time
from typing import Any, NamedTuple

import pytest
import torch
from tests.resume.test_shortage import BACK_OFF, LAYOUTS, Strike, final_tensors, run_of, train
from tests.support.harness import RTOL, worst_errors
from tests.support.tiny_runs import MODELS, tiny_run
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from meshwright.mesh import join_world, leave_world
from meshwright.models import build_decoder, initialise
from meshwright.resilience.plain_sums import add_plainly
from meshwright.spec import ParallelSpec, ScheduleSpec
from meshwright.train.oom_report import smaller_microbatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# More kernels in one micro-batch than a card's queue takes: the host then waits for the card in a launch.
DEEP = MODELS["tied"].with_(num_layers=12)
# Ranks share one card, and each of tp's collectives waits for its partner's turn on it: milliseconds.
FEW_STEPS = ScheduleSpec(num_steps=2, kind="linear", warmup_steps=1)
ONE_STEP = ScheduleSpec(num_steps=1, kind="linear", warmup_steps=0)
LAYOUTS_HERE = LAYOUTS | {"tp_pp": ParallelSpec(tp=2, pp=2)}
# Layout, and where it strikes. Partners then wait in a collective of the card that nobody else joins.
STRIKES = {
    "replicas": ("replicas", Strike(1, 2)),
    "zero_3": ("zero_3", Strike(1, 2)),
    "tp": ("tp", Strike(1, 2)),
    "pp": ("pp", Strike(1, 2)),
    "tp_between_collectives": ("tp", Strike(1, 6, "block")),
    "tp_backward": ("tp", Strike(0, 3, "backward")),
    "pp_first_stage": ("pp", Strike(0, 3)),
    "pp_backward": ("pp", Strike(0, 2, "backward")),
    "tp_pp": ("tp_pp", Strike(3, 2)),
}


def _run(layout: str, **changes: Any):
    run = run_of("one", memory=BACK_OFF, device="cuda", schedule=FEW_STEPS)
    return run.with_(parallel=LAYOUTS_HERE[layout], **changes)


@pytest.fixture(scope="module")
def expected(nccl_ranks, tmp_path_factory):
    """One rank, with small micro-batches from the start."""
    run_dir = tmp_path_factory.mktemp("one")
    train(nccl_ranks, smaller_microbatch(_run("one")), run_dir)
    return final_tensors(run_dir)


@pytest.mark.parametrize("case", STRIKES)
def test_a_back_off_between_nccl_ranks(nccl_ranks, expected, tmp_path, case):
    layout, strike = STRIKES[case]
    began = time.monotonic()
    ends = train(nccl_ranks, _run(layout), tmp_path, strike)
    print(f"{case}: {time.monotonic() - began:.1f} s, {[end.census for end in ends]}")
    assert max(worst_errors(final_tensors(tmp_path), expected).values()) < RTOL
    assert {end.census.models for end in ends} == {1}
    assert not {"shortage", "ending"} & {name for end in ends for name in end.census.threads}


def test_hosts_that_wait_in_a_launch_come_out_of_it(nccl_ranks, tmp_path):
    train(nccl_ranks, _run("tp", model=DEEP, schedule=ONE_STEP), tmp_path / "short", Strike(1, 2))
    train(nccl_ranks, smaller_microbatch(_run("one", model=DEEP, schedule=ONE_STEP)), tmp_path / "small")
    errors = worst_errors(final_tensors(tmp_path / "short"), final_tensors(tmp_path / "small"))
    assert max(errors.values()) < RTOL


def test_a_shortage_in_the_update_ends_the_run(nccl_ranks, tmp_path):
    """On the rank that is short; what starts ranks ends the others."""
    (end,) = train(nccl_ranks, _run("one"), tmp_path, Strike(0, 2, "update"))
    assert end.error is not None and "rank 0 ran out of memory in step 2" in end.error.fact


class Pause(NamedTuple):
    """What a host that waited for its card did to another thread."""

    waited_seconds: float
    longest_seconds: float
    """Of the other thread, between two ticks."""
    standing: str
    """Where all threads stood a second after the card was stopped."""


def _pause_of(action) -> Pause:
    """`action` gives a card that is busy for two seconds more than its queue takes."""
    is_over, pauses = threading.Event(), [0.0]

    def tick() -> None:
        last = time.monotonic()
        while not is_over.wait(0.005):
            now = time.monotonic()
            pauses[0], last = max(pauses[0], now - last), now

    ticker = threading.Thread(target=tick, daemon=True)
    with tempfile.TemporaryFile("w+") as standing:
        ticker.start()
        torch.cuda._sleep(4_000_000_000)  # cycles: more than two seconds
        faulthandler.dump_traceback_later(1.0, file=standing)
        began = time.monotonic()
        action()
        waited_seconds = time.monotonic() - began
        faulthandler.cancel_dump_traceback_later()
        is_over.set()
        ticker.join()
        torch.cuda.synchronize()
        standing.seek(0)
        return Pause(waited_seconds, pauses[0], standing.read())


@pytest.mark.parametrize("part", ["plain", "forward", "backward"])
def test_a_host_that_waits_for_its_card_lets_other_threads_run(part):
    """What looks out for a shortage is such a thread."""
    spec = tiny_run(MODELS["tied"].with_(num_layers=40)).model
    model = build_decoder(spec)
    initialise(model, 0, device="cuda")
    model.double()
    tokens_BS = torch.randint(64, (2, 16), device="cuda")
    positions_BS = torch.arange(16, device="cuda").expand(2, 16)
    weights_BS = torch.ones(2, 16, device="cuda", dtype=torch.float64)

    def forward():
        return model(tokens_BS, positions_BS=positions_BS, targets_BS=tokens_BS, weights_BS=weights_BS)

    def plain():
        for _ in range(4000):
            weights_BS.add_(1.0)

    for _ in range(2):  # loads kernels
        forward().backward()
    torch.cuda.synchronize()
    loss = forward()
    torch.cuda.synchronize()
    action = {"plain": plain, "forward": forward, "backward": loss.backward}[part]
    pause = _pause_of(action)
    print(f"{part}: waited {pause.waited_seconds:.2f} s, another thread paused {pause.longest_seconds:.2f} s")
    assert pause.waited_seconds > 1.0, "the queue took everything: nothing was tried"
    assert pause.longest_seconds < 0.5, pause.standing


def test_nor_does_a_sum_of_cut_gradients_stop_them():
    """Autograd's own sum of a DTensor's gradients holds Python's lock while it waits for the card."""
    join_world("cuda")
    try:
        mesh = init_device_mesh("cuda", (1,))
        module = nn.ParameterList(
            nn.Parameter(DTensor.from_local(torch.ones(8, 8, device="cuda"), mesh, [Shard(0)]))
            for _ in range(2500)
        )

        def loss() -> Tensor:
            return torch.stack([one.to_local().sum() for one in module]).sum()

        pauses = {}
        for name in ("autograd's", "plain"):
            kept = add_plainly([module]) if name == "plain" else []
            for _ in range(2):
                loss().backward()
            made = loss()  # its kernels must not be those that fill the queue
            torch.cuda.synchronize()
            pauses[name] = pause = _pause_of(made.backward)
            print(f"{name} sums: waited {pause.waited_seconds:.2f}, paused {pause.longest_seconds:.2f} s")
        assert len(kept) == len(module)
        assert min(pause.waited_seconds for pause in pauses.values()) > 1.0, "nothing was tried"
        assert pauses["plain"].longest_seconds < 0.5, pauses["plain"].standing
        # Else torch has mended it, and nothing has to be added plainly any more.
        assert pauses["autograd's"].longest_seconds > 0.5
    finally:
        leave_world()
