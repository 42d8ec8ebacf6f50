"""Settings that a run may change when it goes on, and those that its checkpoints fix."""

import pytest
from tests.support.runs import tiny_run

from meshwright.spec.changes import changed_settings, refused_changes
from meshwright.spec.modules import LoopSpec
from meshwright.spec.run import RunSpec

RUN = tiny_run("moe", optim="sgd")


def refused(before: RunSpec, after: RunSpec) -> list[str]:
    changes = changed_settings(before.model_dump(mode="json"), after)
    assert changes
    return [change.key for change, _ in refused_changes(changes, after)]


@pytest.mark.parametrize(
    "changes",
    [
        {"schedule": RUN.schedule.with_(num_steps=9, kind="cosine")},
        {"optim": RUN.optim.with_(lr=1.0, weight_decay=0.0, beta1=0.5, ema_decay=0.9)},
        {"data": RUN.data.with_(batch_sequences=4, path="elsewhere", sequence_length=8)},
        {"observe": RUN.observe.with_(evaluate={"every_steps": 2})},
        {"precision": RUN.precision.with_(compute="bf16")},
        {"model": RUN.model.with_(dropout=0.5)},
        {"checkpoint": RUN.checkpoint.with_(keep_last=7)},
        {"deterministic": True},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_training_settings_may_change(changes: dict[str, object]):
    assert refused(RUN, RUN.with_(**changes)) == []


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"seed": 1}, "seed"),
        ({"model": RUN.model.with_(width=32)}, "model.width"),
        ({"model": RUN.model.with_(vocab_size=99)}, "model.vocab_size"),
        ({"model": RUN.model.with_(rope={"theta": 5.0})}, "model.rope.theta"),
        ({"model": RUN.model.with_(moe=None)}, "model.moe"),
        ({"optim": RUN.optim.with_(kind="lars")}, "optim.kind"),
        ({"optim": RUN.optim.with_(beta1=0.0)}, "optim.beta1"),
        ({"checkpoint": RUN.checkpoint.with_(start_from="runs/other")}, "checkpoint.start_from"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_saved_state_fixes_is_refused(changes: dict[str, object], key: str):
    assert refused(RUN, RUN.with_(**changes)) == [key]


def test_initial_weights_may_be_left_out_later():
    started = RUN.with_(checkpoint=RUN.checkpoint.with_(start_from="runs/other"))
    assert refused(started, RUN) == []


def test_an_optimizer_of_the_users_is_not_replaced():
    changes = changed_settings(LoopSpec().model_dump(mode="json"), LoopSpec(optim={"lr": 1.0}))  # pyright: ignore[reportArgumentType]
    assert [change.key for change, _ in refused_changes(changes, LoopSpec())] == ["optim"]
