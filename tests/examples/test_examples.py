"""The examples run on two ranks and learn; those that promise few lines keep their promise."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from meshwright.observe.metrics import read_metrics

EXAMPLES = Path(__file__).parents[2] / "examples"


def _load(name: str) -> ModuleType:
    found = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[module.__name__] = module
    found.loader.exec_module(module)
    return module


def _run(name: str, *arguments: str) -> None:
    """As a script would, in the ranks of the pool."""
    _load(name).main(*arguments)


def test_own_loop_under_torchrun():
    """With the launcher that the page names; the first rank speaks, and only that."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, EXAMPLES / "own_loop.py"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", done.stdout)]
    assert len(losses) == 4 and losses[-1] < 0.3  # guessing costs log 2


@pytest.mark.parametrize(("name", "limit"), [("own_model", 2.5), ("vision", 0.6)])
def test_handed_to_the_trainer(ranks, tmp_path, name, limit):
    """`limit` lies well below what guessing costs (log 16 and log 3)."""
    ranks.run(_run, 2, name, str(tmp_path))
    assert read_metrics(tmp_path)[-1]["loss"] < limit
    assert list((tmp_path / "checkpoints").glob("step-*"))


def test_hugging_face_folder(tmp_path):
    done = subprocess.run(
        [sys.executable, EXAMPLES / "hf_model.py", tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [row["loss"] for row in read_metrics(tmp_path / "run")]
    assert losses[-1] < losses[0] - 0.5
    assert (tmp_path / "trained" / "model.safetensors").is_file()


def test_plan_in_python(tmp_path):
    done = subprocess.run(
        [sys.executable, EXAMPLES / "plan_in_python.py", tmp_path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "fits: True" in done.stdout and "after 20 steps" in done.stdout


@pytest.mark.parametrize(("name", "most"), [("own_loop", 5), ("own_model", 10)])
def test_added_lines(name, most):
    lines = [line for line in (EXAMPLES / f"{name}.py").read_text().splitlines() if "  # +" in line]
    assert 0 < len(lines) <= most
    calls = [line for line in (EXAMPLES / f"{name}.py").read_text().splitlines() if "meshwright." in line]
    assert all("# +" in line or '"""' in line or line.startswith(("    python", "The run")) for line in calls)


def test_chats_and_pairs(tmp_path):
    """From a file of chats to an adapter and a merged folder, and on to preferences; each of it learns."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / "finetune_chats.py", tmp_path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "<|im_start|>assistant\n  | ⟦It is 0.<|im_end|>⟧" in done.stdout
    losses = [row["loss"] for row in read_metrics(tmp_path / "run-chats")]
    assert losses[0] > 5 and losses[-1] < 1
    assert "It is " in done.stdout.split("⟧")[-1]  # the answer with the adapter
    assert "the base of" in done.stderr and "of the adapted weights differ from the base" in done.stderr
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    assert (tmp_path / "merged" / "chat_template.jinja").is_file()
    pairs = read_metrics(tmp_path / "run-pairs")
    assert pairs[0]["loss"] == pytest.approx(0.6931, abs=1e-3)  # the reference is the model itself: log 2
    assert pairs[0]["reward_margin"] == pytest.approx(0, abs=1e-3)
    assert pairs[-1]["loss"] < pairs[0]["loss"]
    assert pairs[-1]["reward_accuracy"] > 0.9
