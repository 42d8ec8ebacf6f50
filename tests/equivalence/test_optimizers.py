"""Optimizers that read full parameters give the same result on any mesh."""

import pytest
from tests.support.equivalence import RTOL, assert_same_training, run_cases, worst_errors
from tests.support.oracle import reference
from tests.support.run_directories import attempt, last_checkpoint, read_tensors
from tests.support.runs import MODELS, MORE_OPTIMIZERS, OPTIMIZERS, few_microbatches, tiny_run
from tests.support.soak import soak

from meshwright.spec import GroupSpec, ParallelSpec

LAYOUTS = {
    "single": ParallelSpec(),
    "zero_1": ParallelSpec(dp_shard=2, zero=1),
    "zero_3": ParallelSpec(dp_shard=2, zero=3),
    "tp": ParallelSpec(tp=2),
    "zero_3_tp": ParallelSpec(dp_shard=2, zero=3, tp=2),
    "zero_1_tp": ParallelSpec(dp_shard=2, zero=1, tp=2),
    "pp": ParallelSpec(pp=2),
}


def prove_all(ranks, model, parallel):
    """One job for all rules: they share the mesh."""
    run = tiny_run(model, parallel=parallel, microbatch_sequences=few_microbatches(parallel))
    runs = [run.with_(optim=optim) for optim in MORE_OPTIMIZERS.values()]
    for run, results in zip(runs, run_cases(ranks, runs), strict=True):
        assert_same_training(results, reference(run))


# What these layouts shard, the others shard too.
WIDE = ("zero_3", "tp", "zero_1_tp")


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.soak if name in WIDE else ()) for name in LAYOUTS]
)
def test_every_rule_equals_one_device(ranks, layout):
    prove_all(ranks, MODELS["tied"], LAYOUTS[layout])


@pytest.mark.parametrize(
    "parallel",
    [
        ParallelSpec(dp_shard=2, zero=1, ep=2),
        pytest.param(ParallelSpec(tp=2, dp_shard=2, zero=3, ep=2, etp=2), marks=pytest.mark.soak),
    ],
    ids=("ep", "ep_etp_zero_3"),
)
def test_stacked_experts(ranks, parallel):
    prove_all(ranks, MODELS["moe"], parallel)


@pytest.mark.parametrize("stage", (pytest.param(1, marks=pytest.mark.soak), 3))
def test_rows_that_do_not_divide(ranks, stage):
    """Matrices of 15 rows over 4 ranks, and 3 experts, which leave one of them with nothing."""
    moe = MODELS["moe"].moe.model_dump() | {"num_experts": 3}
    model = MODELS["moe"].with_(vocab_size=67, width=15, moe=moe)
    prove_all(ranks, model, ParallelSpec(dp_shard=4, zero=stage))


GROUPS = (
    GroupSpec(pattern="*norm*", lr_factor=3.0, weight_decay=0.3),
    GroupSpec(pattern="blocks.0.*", lr_factor=0.25),
    GroupSpec(pattern="*.attention.key.*", weight_decay=0.0),
)


@pytest.mark.parametrize("layout", ("zero_1", pytest.param("zero_3_tp", marks=pytest.mark.soak)))
def test_groups_by_pattern(ranks, layout):
    """The norms of block 0 match twice: the later group takes them, and leaves them without decay."""
    kinds = {**OPTIMIZERS, "lamb": MORE_OPTIMIZERS["lamb"]}
    parallel = LAYOUTS[layout]
    run = tiny_run("gqa", parallel=parallel, microbatch_sequences=few_microbatches(parallel))
    runs = [run.with_(optim=one.with_(groups=GROUPS)) for one in kinds.values()]
    for run, results in zip(runs, run_cases(ranks, runs), strict=True):
        assert_same_training(results, reference(run))
        plain = reference(run.with_(optim=run.optim.with_(groups=())))
        name = "blocks.0.mlp.up.weight"
        assert worst_errors({name: plain.weights[name]}, {name: results[0].weights[name]})[name] > 1e-4


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        ("adafactor", LAYOUTS["zero_3_tp"], LAYOUTS["pp"]),
        soak("lars", LAYOUTS["zero_3"], LAYOUTS["tp"]),
        soak("lamb", LAYOUTS["zero_1_tp"], LAYOUTS["pp"]),
        soak("adamw_8bit", LAYOUTS["tp"], LAYOUTS["zero_1"]),
        ("adamw_8bit", LAYOUTS["zero_3"], LAYOUTS["zero_1_tp"]),
        ("muon", LAYOUTS["zero_1"], LAYOUTS["single"]),
    ],
    ids=("adafactor", "lars", "lamb", "adamw_8bit", "adamw_8bit_zero_3", "muon"),
)
def test_resumes_on_another_mesh(ranks, tmp_path, kind, before, after):
    """Rows, columns, codes and scales are sharded differently there; the result is that of one device."""
    run = tiny_run("gqa", optim=kind, microbatch_sequences=2)
    attempt(ranks, run.with_(parallel=before), tmp_path, stop_after=2)
    attempt(ranks, run.with_(parallel=after), tmp_path)
    expected = reference(run, num_steps=run.schedule.num_steps)
    tensors = read_tensors(last_checkpoint(tmp_path))
    for part, known in (("model.", expected.weights), ("optim.", expected.optimizer)):
        found = {name.removeprefix(part): value for name, value in tensors.items() if name.startswith(part)}
        errors = worst_errors(found, known)
        assert max(errors.values()) <= RTOL, max(errors, key=lambda name: errors[name])
