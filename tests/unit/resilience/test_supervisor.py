"""The supervisor's decisions, and the same code over 54 simulated days on 16,384 GPUs."""

import pytest

from meshwright.launch.attempt import AttemptEnd, cause_of
from meshwright.resilience.simulation import SimulatedRun, simulate
from meshwright.resilience.supervisor import End, History, Restart, decide
from meshwright.spec.resilience import RestartSpec

POLICY = RestartSpec(max_restarts=10, backoff_seconds=2, max_backoff_seconds=5)
KILLED = AttemptEnd("killed", 4, "rank 1 was killed", reached_step=17)


def test_a_killed_run_restarts_at_once_after_progress_and_counts_what_it_repeats():
    history, action = decide(History(published_step=10), KILLED, POLICY, published_step=15)
    assert action == Restart(number=1, delay_seconds=0.0, lost_steps=2)
    assert history == History(published_step=15, num_restarts=1, lost_steps=2)


def test_delays_double_without_progress_and_the_third_cycle_ends_the_run():
    history, actions = History(), []
    for _ in range(3):
        history, action = decide(history, KILLED, POLICY, published_step=0)
        actions.append(action)
    assert [action.delay_seconds for action in actions[:2]] == [2.0, 4.0]
    assert isinstance(actions[2], End) and actions[2].code == 93
    assert "3 starts in a row ended without a newer checkpoint than step 0" in actions[2].reason
    assert "rank 1 was killed" in actions[2].reason


def test_delays_have_a_limit_and_progress_starts_the_count_again():
    policy = POLICY.with_(max_cycles_without_progress=9)
    history = History(cycles_without_progress=7)
    _, action = decide(history, KILLED, policy, published_step=0)
    assert isinstance(action, Restart) and action.delay_seconds == 5.0
    after, action = decide(history, KILLED, policy, published_step=1)
    assert isinstance(action, Restart) and action.delay_seconds == 0.0 and after.cycles_without_progress == 0


def test_restarts_are_bounded_also_with_progress():
    history = History(num_restarts=10)
    _, action = decide(history, KILLED, POLICY, published_step=5)
    assert action == End(4, "resilience.restart.max_restarts=10 are used up")
    assert decide(History(), KILLED, POLICY.with_(max_restarts=0), published_step=5)[1] == End(4)


@pytest.mark.parametrize("cause", ["done", "stopped", "refused", "failed", "out_of_memory"])
def test_what_a_restart_would_meet_again_ends_the_run(cause):
    _, action = decide(History(), AttemptEnd(cause, 2, reached_step=1), POLICY, published_step=1)
    assert action == End(2)


def test_an_exception_before_the_first_step_ends_the_run_and_a_later_one_restarts():
    early = AttemptEnd("error", 70)
    assert isinstance(decide(History(), early, POLICY, published_step=0)[1], End)
    later = AttemptEnd("error", 70, reached_step=3)
    assert isinstance(decide(History(), later, POLICY, published_step=0)[1], Restart)


def test_another_number_of_ranks_is_no_failure():
    resized = AttemptEnd("resized", 0, "devices are used again", reached_step=15)
    history, action = decide(History(num_restarts=10), resized, POLICY, published_step=15)
    assert action == Restart(number=10, delay_seconds=0.0, lost_steps=0)
    assert history.num_restarts == 10, "it does not count against max_restarts"


def test_starts_on_other_devices_begin_a_new_count_without_progress():
    history = History(cycles_without_progress=2)
    after, action = decide(history, KILLED, POLICY, published_step=0, has_new_mesh=True)
    assert isinstance(action, Restart) and action.delay_seconds == 0.0
    assert after.cycles_without_progress == 0


def test_an_oom_restarts_with_a_smaller_microbatch_where_there_is_one():
    ended = AttemptEnd("out_of_memory", 5)
    policy = POLICY.with_(max_restarts=0)  # it is a setting of its own
    _, action = decide(History(), ended, policy, published_step=0, can_shrink_microbatch=True)
    assert isinstance(action, Restart) and action.has_smaller_microbatch
    assert decide(History(), ended, policy, published_step=0)[1] == End(4)
    assert decide(History(), AttemptEnd("lost_rank", 6), policy, published_step=0)[1] == End(4)


def test_causes_of_exit_statuses():
    found = {code: cause_of(code, is_stopping=False) for code in (0, 2, 3, 4, 5, 6, 70, 1, 130, -9, -11, -2)}
    assert found == {
        0: "done",
        2: "refused",
        3: "refused",
        4: "failed",
        5: "out_of_memory",
        6: "lost_rank",
        70: "error",
        1: "error",
        130: "stopped",
        -9: "killed",
        -11: "killed",
        -2: "stopped",
    }
    assert cause_of(-9, is_stopping=True) == "stopped"


# Llama 3 405B: 16,384 GPUs, 419 unexpected interruptions in 54 days.
LLAMA_3 = SimulatedRun(
    num_steps=54 * 86_400 // 10,
    step_seconds=10.0,
    checkpoint_every_steps=15,
    checkpoint_stall_seconds=1.0,
    mean_seconds_between_failures=54 * 86_400 / 419,
    detect_seconds=1.0,
    hang_seconds=60.0,
    hang_share=0.1,
    restart_seconds=120.0,
    policy=RestartSpec(max_restarts=1000),
)


def test_54_days_on_16384_gpus_need_no_hand_and_keep_their_goodput():
    accounts = [simulate(LLAMA_3, seed=seed) for seed in range(3)]
    assert all(account.end == End(0) for account in accounts)
    assert all(350 < account.restarts == account.failures < 500 for account in accounts)
    assert all(0.95 < account.goodput < 0.99 for account in accounts)
    assert all(account.useful == pytest.approx(54 * 86_400) for account in accounts)
    # On average half of an interval is lost per failure.
    assert all(5 < account.lost_steps / account.failures < 9 for account in accounts)


def test_a_step_that_no_attempt_gets_past_ends_after_three_cycles_and_not_after_a_thousand():
    run = LLAMA_3.__class__(**{**LLAMA_3.__dict__, "fails_after_step": 1000})
    account = simulate(run, seed=1)
    assert account.end is not None and account.end.code == 93
    assert account.restarts <= 6 + 10_000 / LLAMA_3.mean_seconds_between_failures


def test_a_restart_storm_is_slowed_down_and_ends():
    run = LLAMA_3.__class__(**{**LLAMA_3.__dict__, "mean_seconds_between_failures": 10.0})
    account = simulate(run, seed=1)
    assert account.end is not None and account.end.code == 93
    assert account.restarts == 2 and account.backoff == 3.0
