"""`meshwright` in a rank that runs out of memory where a test says, in place of `python -m meshwright`.

    python -m tests.support.oom_rank PLACE RANK STEP <arguments of meshwright>

PLACE is forward, backward or update. The OOM is raised on rank RANK in step STEP, as long as micro-batches
have two or more sequences (RANK -1: on every rank, in every step, whatever the micro-batch).
"""

import os
import sys

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from meshwright.cli.main import main
from meshwright.models.decoder import Decoder

TEXT = "CUDA out of memory. Tried to allocate 2.00 GiB."


class Oom:
    """Raises torch's OOM at one place of one step."""

    def __init__(self, place: str, rank: int, step: int) -> None:
        self._place, self._rank, self._step = place, rank, step
        self._num_updates, self._num_sequences = 0, 0

    def before_forward(self, module: object, inputs: tuple[torch.Tensor, ...]) -> None:
        """Hook of every module."""
        if isinstance(module, Decoder) and torch.is_grad_enabled() and inputs:
            self._num_sequences = len(inputs[0])
            self._raise_if_due("forward")

    def after_forward(self, module: object, inputs: object, output: torch.Tensor) -> None:
        """Hook of every module."""
        if isinstance(module, Decoder) and output.requires_grad:
            output.register_hook(lambda _: self._raise_if_due("backward"))

    def before_update(self, *_: object) -> None:
        """Hook of every optimizer."""
        self._raise_if_due("update")

    def after_update(self, *_: object) -> None:
        """Hook of every optimizer."""
        self._num_updates += 1

    def _raise_if_due(self, place: str) -> None:
        is_here = self._rank == -1 or int(os.environ["RANK"]) == self._rank
        is_due = self._rank == -1 or (self._num_updates + 1 == self._step and self._num_sequences > 1)
        if place == self._place and is_here and is_due:
            raise torch.OutOfMemoryError(TEXT)


def plant(place: str, rank: int, step: int) -> None:
    """Register the hooks; they stay."""
    oom = Oom(place, rank, step)
    register_module_forward_pre_hook(oom.before_forward)
    register_module_forward_hook(oom.after_forward)
    register_optimizer_step_pre_hook(oom.before_update)
    register_optimizer_step_post_hook(oom.after_update)


if __name__ == "__main__":
    if torch.cuda.is_available():  # ranks share one card, which NCCL allows to ranks of different hosts only
        os.environ.update(
            NCCL_HOSTID=f"host{os.environ['RANK']}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1"
        )
    plant(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    del sys.argv[1:4]
    main()
