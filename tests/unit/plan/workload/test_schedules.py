"""Our pipeline orders are the ones torch executes."""

from collections import Counter
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from meshwright.plan.memory.in_flight import in_flight
from meshwright.plan.workload.layouts import layouts
from meshwright.plan.workload.schedules import (
    SCHEDULES,
    Action,
    PipelineShape,
    actions,
    peak_in_flight,
    problem,
    rank_stages,
    stage_rank,
)

GRID = [
    (schedule, PipelineShape(pp, virtual_stages, num_microbatches))
    for schedule in SCHEDULES
    for pp in (2, 3, 4, 8)
    for virtual_stages in (1, 2, 3, 4)
    for num_microbatches in (1, 2, 3, 4, 6, 8, 10, 12, 16, 17, 32)
]
LEGAL = [(schedule, shape) for schedule, shape in GRID if problem(schedule, shape) is None]
TORCH_CLASS = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "looped_bfs": "ScheduleLoopedBFS",
    "interleaved_zero_bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}


class RecordingStage:
    """A fake pipeline stage: it does not communicate, and records the calls that it gets."""

    is_first = is_last = False
    submod = None

    def __init__(self, stage_index: int, *, num_stages: int, pp: int, rank: int) -> None:
        self.stage_index, self.num_stages = stage_index, num_stages
        self.group_size, self.group_rank = pp, rank
        self.done: list[Action] = []

    def forward_one_chunk(self, microbatch: int, *_: Any, **__: Any) -> None:
        self.done.append(Action("F", self.stage_index, microbatch))

    def backward_one_chunk(self, microbatch: int, **_: Any) -> None:
        self.done.append(Action("B", self.stage_index, microbatch))

    def perform_reduce_grad(self, _: int) -> None:
        pass

    def _no_messages(self, _: int) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = _no_messages


def torch_single_stage_order(schedule: str, rank: int, shape: PipelineShape) -> list[Action]:
    """What GPipe and 1F1B do when stepped: their printed order has a mistake on the last rank."""
    stage = RecordingStage(rank, num_stages=shape.pp, pp=shape.pp, rank=rank)
    runner = getattr(torch_schedules, TORCH_CLASS[schedule])(stage, shape.num_microbatches)
    runner._initialize_stage = lambda *_: None
    runner._step_microbatches([()] * shape.num_microbatches, [{}] * shape.num_microbatches)
    return stage.done


def torch_multi_stage_order(schedule: str, shape: PipelineShape) -> list[list[Action]]:
    stages = [
        RecordingStage(index, num_stages=shape.num_stages, pp=shape.pp, rank=0)
        for index in range(0, shape.num_stages, shape.pp)
    ]
    built = getattr(torch_schedules, TORCH_CLASS[schedule])(stages, shape.num_microbatches)
    return [_flat(built.pipeline_order[rank]) for rank in range(shape.pp)]


def _flat(torch_actions: list[Any]) -> list[Action]:
    flat = []
    for action in filter(None, torch_actions):
        for part in action.sub_actions or (action,):
            flat.append(Action(part.computation_type.value, part.stage_index, part.microbatch_index))
    return flat


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_order_is_the_one_torch_runs(schedule: str) -> None:
    shapes = [shape for name, shape in LEGAL if name == schedule]
    assert shapes
    for shape in shapes:
        ours = [list(rank_actions) for rank_actions in actions(schedule, shape)]
        if schedule in ("gpipe", "1f1b"):
            theirs = [torch_single_stage_order(schedule, rank, shape) for rank in range(shape.pp)]
        else:
            theirs = torch_multi_stage_order(schedule, shape)
        assert ours == theirs, shape


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_shapes_called_illegal_are_refused_by_torch_too(schedule: str) -> None:
    refused = [shape for name, shape in GRID if name == schedule and problem(name, shape)]
    for shape in refused:
        if schedule in ("gpipe", "1f1b") and shape.virtual_stages > 1:
            continue  # their constructors take one stage: there is nothing to hand a second one to
        with pytest.raises(ValueError, match=r"microbatches|2 stages"):
            if schedule == "1f1b":
                torch_single_stage_order(schedule, 0, shape)
            else:
                torch_multi_stage_order(schedule, shape)


@pytest.mark.parametrize(("schedule", "shape"), LEGAL[::7])
def test_every_stage_sees_every_microbatch_once_each_way(schedule: str, shape: PipelineShape) -> None:
    done = Counter(action for rank_actions in actions(schedule, shape) for action in rank_actions)
    assert set(done.values()) == {1}
    for stage in range(shape.num_stages):
        for microbatch in range(shape.num_microbatches):
            kinds = {kind for kind in "FBIW" if (kind, stage, microbatch) in done}
            assert kinds in ({"F", "B"}, {"F", "I", "W"})


def test_stages_fold_in_v_schedules_and_loop_in_others() -> None:
    assert [stage_rank("zbv", stage, 4) for stage in range(8)] == [0, 1, 2, 3, 3, 2, 1, 0]
    assert [stage_rank("interleaved_1f1b", stage, 4) for stage in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert rank_stages("zbv", 1, PipelineShape(4, 2, 8)) == (1, 6)


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_in_flight_counts_follow_the_published_table(pp: int) -> None:
    m = 4 * pp
    by_rank = lambda schedule, v: [  # noqa: E731
        peak_in_flight(rank_actions) for rank_actions in actions(schedule, PipelineShape(pp, v, m))
    ]
    assert by_rank("gpipe", 1) == [m] * pp
    assert by_rank("1f1b", 1) == [pp - rank for rank in range(pp)]
    assert by_rank("interleaved_1f1b", 2) == [pp + 2 * (pp - rank - 1) + 1 for rank in range(pp)]
    assert by_rank("interleaved_zero_bubble", 1) == [pp] * pp
    # Two half-size stages per rank: 2 pp of them are pp micro-batches of a full rank.
    assert max(by_rank("zbv", 2)) == 2 * pp
    assert max(by_rank("dualpipev", 2)) == 2 * pp + 1


def test_a_shape_that_cannot_run_says_why() -> None:
    assert problem("zbv", PipelineShape(4, 1, 8)) == "zbv needs exactly 2 stages per rank, not 1"
    with pytest.raises(ValueError, match="at least pp=4"):
        actions("1f1b", PipelineShape(4, 1, 2))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_closed_form_of_microbatches_in_flight_is_the_count(schedule: str) -> None:
    """`memory.in_flight` prices thousands of layouts; it must equal the count over the actions."""
    for shape in [shape for name, shape in LEGAL if name == schedule]:
        if shape.num_microbatches % shape.pp:
            continue  # the search proposes full rounds only
        at = layouts(
            pp=shape.pp,
            virtual_stages=shape.virtual_stages,
            num_microbatches=shape.num_microbatches,
            schedule=SCHEDULES.index(schedule),
        )
        counted = [peak_in_flight(rank) / shape.virtual_stages for rank in actions(schedule, shape)]
        first, second, last = in_flight(at)[0]
        assert first == pytest.approx(counted[0]) or (schedule == "zbv" and first >= counted[0]), shape
        assert second == pytest.approx(counted[1]) or (schedule == "zbv" and second >= counted[1]), shape
        assert last == pytest.approx(counted[-1]), shape
