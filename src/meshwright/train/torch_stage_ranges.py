"""Names every action of a pipeline stage in a profiler trace: torch names them in some schedules only.

The methods of `PipelineStage` that run one micro-batch are wrapped while a profile is recorded.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from torch.distributed.pipelining import PipelineStage
from torch.profiler import record_function

from meshwright.observe.profile.pipeline_timeline import action_name

_forward = PipelineStage.forward_one_chunk
_backward = PipelineStage.backward_one_chunk
_backward_weight = PipelineStage.backward_weight_one_chunk


def _named_forward(stage: Any, microbatch: int, *arguments: Any, **settings: Any) -> Any:
    with record_function(action_name("F", stage.stage_index, microbatch)):
        return _forward(stage, microbatch, *arguments, **settings)


def _named_backward(stage: Any, microbatch: int, *arguments: Any, **settings: Any) -> Any:
    is_full = settings.get("full_backward", True)
    with record_function(action_name("B" if is_full else "I", stage.stage_index, microbatch)):
        return _backward(stage, microbatch, *arguments, **settings)


def _named_backward_weight(stage: Any, microbatch: int, *arguments: Any, **settings: Any) -> Any:
    with record_function(action_name("W", stage.stage_index, microbatch)):
        return _backward_weight(stage, microbatch, *arguments, **settings)


@contextmanager
def stage_actions_named() -> Iterator[None]:
    """While inside, forwards and backwards of pipeline stages are ranges of the profiler."""
    with ExitStack() as patched:
        patched.enter_context(patch.object(PipelineStage, "forward_one_chunk", _named_forward))
        patched.enter_context(patch.object(PipelineStage, "backward_one_chunk", _named_backward))
        patched.enter_context(
            patch.object(PipelineStage, "backward_weight_one_chunk", _named_backward_weight)
        )
        yield
