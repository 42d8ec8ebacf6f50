"""A type checker knows the public functions: right calls pass, wrong ones are errors on their lines."""

import json
import re
import subprocess
import sys
from pathlib import Path

import meshwright

SCRIPT = """
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import assert_type

import meshwright
from meshwright.modules.own_loop import OwnLoop, StepReport
from meshwright.train.loop import Outcome

model = nn.Linear(2, 2)
samples = TensorDataset(Tensor(4, 2), Tensor(4))


def loss(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
    return model(batch[0]).sum(), len(batch[1])


def mean_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return model(batch[0]).mean()


assert_type(meshwright.fit(model, samples, loss, num_steps=3, batch_samples=4, zero=3), Outcome)
meshwright.fit(model, samples, loss, schedule={"num_steps": 3}, data={"batch_samples": 4}, lr=1)
meshwright.fit(model, samples, loss, offload="activations", fp8="current", evaluate={"every_steps": 2})
meshwright.fit(model, [1, 2, 3], lambda model, batch: (model(batch).sum(), 3), groups=[{"pattern": "*"}])
meshwright.fit(meshwright.Chain(model, ["table", "blocks.*"]), samples, loss, pp=2, directory="runs/x")
run = meshwright.prepare(model, optim.SGD(model.parameters()), DataLoader(samples), zero=2, accumulation=2)
assert_type(run, OwnLoop)
assert_type(run.step(), StepReport | None)
assert_type(meshwright.load_weights(model, "runs/x", step=3), nn.Linear)

meshwright.fit(model, samples, loss, num_stepz=3)  # error: No parameter named "num_stepz"
meshwright.fit(model, samples, loss, num_steps="three")  # error: "num_steps" of type "int"
meshwright.fit(model, samples, loss, recompute="ful")  # error: "recompute" of type "Recompute"
meshwright.fit(model, samples, loss, parallel={"zeero": 3})  # error: "parallel" of type
meshwright.fit(model, samples, loss, groups=[{"lr_factor": 3}])  # error: "groups" of type
meshwright.fit(model, 3, loss)  # error: "dataset" of type "TrainingInput"
meshwright.fit(model, samples, mean_loss)  # error: "loss" of type "Loss"
meshwright.fit(model, samples, loss, accumulation=2)  # error: No parameter named "accumulation"
meshwright.prepare(model, None, [1], optim={"kind": "adam"})  # error: "optim" of type
meshwright.prepare(model, None)  # error: Argument missing for parameter "loader"
meshwright.Chain(model, 3)  # error: "order" of type "Sequence[str] | None"
meshwright.load_weights(model, "runs/x", steps=3)  # error: No parameter named "steps"
meshwright.fitted(model)  # error: "fitted" is not a known attribute
"""


def _errors(folder: Path) -> dict[int, str]:
    """What basedpyright says about the script, by line."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--level", "error"]
    command += ["--pythonpath", sys.executable, "--project", str(folder), str(script)]
    (folder / "pyrightconfig.json").write_text('{"typeCheckingMode": "standard"}')
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)["generalDiagnostics"]
    return {one["range"]["start"]["line"]: one["message"] for one in found}


def test_a_script_of_a_user(tmp_path: Path):
    errors = _errors(tmp_path)
    expected = {
        number: match[1]
        for number, line in enumerate(SCRIPT.splitlines())
        if (match := re.search(r"  # error: (.*)$", line))
    }
    assert set(errors) == set(expected), errors
    assert [text for number, text in expected.items() if text not in errors[number]] == []


def test_the_package_is_typed_and_says_what_is_public():
    assert Path(meshwright.__file__).with_name("py.typed").is_file()
    from_python = {"check", "plan", "predict", "train"}
    own_models = {"Chain", "RecordDataset", "fit", "load_weights", "open_loader", "prepare"}
    assert meshwright.__all__ == sorted({"__version__", *from_python, *own_models})
    assert all(getattr(meshwright, name) for name in meshwright.__all__)
