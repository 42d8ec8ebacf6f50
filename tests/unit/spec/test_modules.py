"""Rules for modules that are not ours, each broken and kept; settings by keyword."""

import pytest

from meshwright.errors import SpecErrors
from meshwright.spec.modules import FitSpec, LoopSpec
from meshwright.spec.rules_modules import check_module
from meshwright.spec.settings import read_settings, with_data_parallel

FIT = {"num_steps": 4, "batch_samples": 8}
BROKEN = {
    "tp and compile": ({"tp": 2, "compile": True}, "compile"),
    "tp and regather": ({"tp": 2, "regather_tp_inputs": True}, "memory.regather_tp_inputs"),
    "cp and pp": ({"cp": 2, "pp": 2, "microbatch_samples": 4}, "parallel.cp"),
    "cp and compile": ({"cp": 2, "compile": True}, "compile"),
    "ep": ({"parallel": {"ep": 2, "dp_shard": 2, "zero": 1}}, "parallel.ep"),
    "bf16 weights": ({"weights": "bf16_exact", "compute": "bf16"}, "precision.weights"),
    "bf16 gradients": ({"gradients": "bf16"}, "precision.gradients"),
    "fp8": ({"fp8": "current", "compute": "bf16"}, "precision.fp8"),
    "recompute_every": ({"recompute_every": 2}, "memory.recompute_every"),
    "a schedule without pp": ({"parallel": {"schedule": "gpipe"}}, "parallel.schedule"),
    "trust without lars": ({"trust_coefficient": 0.5}, "optim.trust_coefficient"),
    "regather": ({"regather_tp_inputs": True}, "memory.regather_tp_inputs"),
    "reduce": ({"parallel": {"grad_reduce": "last_microbatch"}}, "parallel.grad_reduce"),
    "start_from": ({"start_from": "x"}, "checkpoint.start_from"),
    "restart": ({"resilience": {"restart": {"max_restarts": 1}}}, "resilience.restart"),
    "uneven": ({"microbatch_samples": 3}, "data.batch_samples"),
    "few micro-batches": ({"pp": 2}, "data.batch_samples"),
    "noise scale": ({"observe": {"noise_scale": {"every_steps": 2}}}, "observe.noise_scale"),
    "histograms": ({"observe": {"histograms": {"every_steps": 2}}}, "observe.histograms"),
    "zero alone": ({"zero": 1}, "parallel.zero"),
    "shard without zero": ({"dp_shard": 2}, "parallel.dp_shard"),
    "split backward": (
        {
            "pp": 2,
            "virtual_stages": 2,
            "parallel": {"schedule": "zbv"},
            "recompute": "full",
            "microbatch_samples": 1,
        },
        "memory.recompute",
    ),
    "warm-up": ({"warmup_steps": 9}, "schedule.warmup_steps"),
    "best without saves": ({"keep_best": 1}, "checkpoint.keep_best"),
    "kept steps": ({"checkpoint": {"every_steps": 2, "keep_every_steps": 3}}, "checkpoint.keep_every_steps"),
    "best without evaluation": ({"checkpoint": {"every_steps": 2, "keep_best": 1}}, "checkpoint.keep_best"),
}
KEPT = [
    {},
    {"zero": 3, "dp_shard": 4, "recompute": "selective", "recompute_every": 2},
    {"pp": 2, "microbatch_samples": 4},
    {"tp": 2},
    {"cp": 2, "parallel": {"cp_kind": "ring"}},
    {"compute": "fp16", "loss_scale": {}},
]


def _spec(settings: dict) -> FitSpec:
    return read_settings(FitSpec, None, {**FIT, **settings})


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_rule_is_an_error(case):
    settings, where = BROKEN[case]
    found = check_module(_spec(settings))
    assert where in [violation.where for violation in found]
    assert all(violation.hint for violation in found)
    assert len({violation.where for violation in found}) == len(found)  # nothing is reported twice


@pytest.mark.parametrize("settings", KEPT, ids=str)
def test_what_is_allowed(settings):
    assert check_module(_spec(settings)) == []


def test_a_loop_has_rules_of_its_own():
    found = check_module(read_settings(LoopSpec, None, {"pp": 2, "max_grad_norm": 1.0}))
    assert [violation.where for violation in found] == ["parallel.pp"]
    limits = LoopSpec(optim={"lr": 0.1}, max_grad_norm=1.0, ema_decay=0.5)
    assert [violation.where for violation in check_module(limits)] == ["max_grad_norm", "ema_decay"]


def test_a_keyword_is_a_field_or_the_only_field_of_that_name():
    spec = _spec({"zero": 2, "parallel": {"dp_shard": 2}, "recompute": "full", "lr": 0.5})
    assert (spec.parallel.zero, spec.parallel.dp_shard) == (2, 2)
    assert (spec.memory.recompute, spec.optim.lr, spec.schedule.num_steps) == ("full", 0.5, 4)


def test_all_errors_are_reported_at_once():
    with pytest.raises(SpecErrors) as caught:
        _spec({"zeroo": 1, "kind": "sgd", "num_steps": "many"})
    text = str(caught.value)
    assert "did you mean 'zero'?" in text
    assert "kind could be optim.kind and schedule.kind" in text
    assert "schedule.num_steps" in text


def test_a_file_below_keywords(tmp_path):
    file = tmp_path / "fit.yaml"
    file.write_text("schedule: {num_steps: 9}\ndata: {batch_samples: 4}\noptim: {lr: 0.25}\n")
    spec = read_settings(FitSpec, file, {"num_steps": 3})
    assert (spec.schedule.num_steps, spec.optim.lr) == (3, 0.25)
    file.write_text("optim: {rate: 1}\n")
    with pytest.raises(SpecErrors, match=r"fit\.yaml:1 optim\.rate"):
        read_settings(FitSpec, file, FIT)


def test_ranks_that_no_axis_takes_are_data_parallel():
    assert with_data_parallel(_spec({}), 4).parallel.dp_replicate == 4
    assert with_data_parallel(_spec({"zero": 3}), 4).parallel.dp_shard == 4
    assert with_data_parallel(_spec({"pp": 2, "microbatch_samples": 1}), 4).parallel.dp_replicate == 2
    assert with_data_parallel(_spec({"tp": 2, "cp": 2}), 8).parallel.dp_replicate == 2
    assert with_data_parallel(_spec({"zero": 3}), 1).parallel.zero == 0
    assert (
        with_data_parallel(_spec({"dp_replicate": 2}), 4).parallel.dp == 2
    )  # the mesh then reports what is missing


def test_the_course_is_what_decides_the_numbers():
    spec = _spec({})
    same = [{"zero": 1, "dp_shard": 2}, {"microbatch_samples": 2}, {"recompute": "full"}, {"num_workers": 2}]
    for changes in same:
        assert _spec(changes).trajectory_fingerprint() == spec.trajectory_fingerprint(), changes
    for changes in [{"lr": 1.0}, {"seed": 1}, {"batch_samples": 4}, {"sync_batch_norm": True}]:
        assert _spec(changes).trajectory_fingerprint() != spec.trajectory_fingerprint(), changes
