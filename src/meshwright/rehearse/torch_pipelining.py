"""That a pipeline stage begins the weight pass of a split backward, of which torch tells nobody.

The pass runs no hook of a module or an activation: `PipelineStage.backward_weight_one_chunk` is wrapped.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

from torch.distributed.pipelining import PipelineStage


@contextlib.contextmanager
def weight_passes_reported(report: Callable[[int], None]) -> Iterator[None]:
    """Inside, `report` is called with the micro-batch before each weight pass."""
    run = PipelineStage.backward_weight_one_chunk

    def reported(stage: Any, microbatch: int, **how: Any) -> None:
        report(microbatch)
        run(stage, microbatch, **how)

    with patch.object(PipelineStage, "backward_weight_one_chunk", reported):
        yield
