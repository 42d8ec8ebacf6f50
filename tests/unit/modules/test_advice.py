"""Notes on users' modules: each with a run it leaves alone and a run it speaks about."""

import pytest
import torch
from torch import nn

from meshwright.modules.advice import MODULE_ADVISORS, ModuleRun, advise_module, print_advice
from meshwright.modules.dataset import LoaderOptions
from meshwright.spec.modules import FitSpec, LoopSpec

FAST = LoaderOptions(None, 4, pin_memory=True)


def vision(channels: int = 64, *, is_last: bool = True) -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, channels, 3), nn.Conv2d(channels, 128, 3), nn.Flatten())
    return model.to(memory_format=torch.channels_last) if is_last else model


def fit_spec(compute: str = "bf16", **changes: object) -> FitSpec:
    document = {"schedule": {"num_steps": 4}, "data": {"batch_samples": 4}, "precision": {"compute": compute}}
    return FitSpec.model_validate({**document, **changes})


# advisor -> (run it speaks about, words of the note)
CASES = {
    "convolutions_are_channels_last": (ModuleRun(vision(is_last=False), fit_spec(), FAST), "channels_last"),
    "channels_fill_tensor_cores": (ModuleRun(vision(60), fit_spec(), FAST), "channels of 0 and 1 more"),
    "matmuls_use_tensor_cores": (ModuleRun(vision(), fit_spec("fp32"), FAST), "TF32 is off"),
    "kernels_are_chosen_by_time": (ModuleRun(vision(), fit_spec(deterministic=True), FAST), "cuDNN"),
    "samples_are_prefetched": (
        ModuleRun(vision(), fit_spec(), LoaderOptions(None, 0, pin_memory=True)),
        "num_workers=0",
    ),
    "batches_are_pinned": (
        ModuleRun(vision(), fit_spec(), LoaderOptions(None, 4, pin_memory=False)),
        "pin_memory=False",
    ),
}
BY_NAME = {advisor.__name__: advisor for advisor in MODULE_ADVISORS}


def test_every_advisor_has_a_case() -> None:
    assert list(CASES) == list(BY_NAME)


@pytest.mark.parametrize("name", CASES)
def test_it_speaks_exactly_when_it_should(name: str) -> None:
    run, words = CASES[name]
    assert list(BY_NAME[name](ModuleRun(vision(), fit_spec(), FAST))) == []
    (note,) = BY_NAME[name](run)
    assert words in f"{note.fact} {note.hint}" and note.cost is None
    assert "not measured" in note.fact
    assert advise_module(run) == [note]


def test_samples_on_the_device_need_no_workers() -> None:
    spec = fit_spec(data={"batch_samples": 4, "on_device": True})
    assert advise_module(ModuleRun(vision(), spec, LoaderOptions(None, 0, pin_memory=True))) == []


def test_a_loop_of_the_user_is_not_asked_for_its_loader() -> None:
    spec = LoopSpec.model_validate({"precision": {"compute": "bf16"}})
    assert advise_module(ModuleRun(vision(), spec)) == []


def test_notes_are_for_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    run = ModuleRun(vision(is_last=False), fit_spec("fp32"))
    print_advice(run, torch.device("cpu"))
    assert capsys.readouterr().err == ""
    print_advice(run, torch.device("cuda"))
    assert "note: 2 convolutions are in NCHW" in capsys.readouterr().err
