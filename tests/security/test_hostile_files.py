"""Files that someone else made: Hugging Face folders, tokenizers, run directories. One clear error each."""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.run_files import train_run_file

from meshwright.checkpoint.convert import convert_weights
from meshwright.checkpoint.weights import open_weights
from meshwright.cli.main import run
from meshwright.models.hf_weights import INDEX_FILE, SINGLE_FILE

Captured = pytest.CaptureFixture[str]
ALIAS_BOMB = "a: &a [x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 8)}]\n"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_run_file(tmp_path_factory.mktemp("trained"))


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    """An intact Hugging Face folder of a small model."""
    convert_weights(open_weights(trained), tmp_path / "hf", "huggingface")
    return tmp_path / "hf"


def change_config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))

    return change


def write_index(place: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        names = load_file(folder / SINGLE_FILE)
        (folder / INDEX_FILE).write_text(json.dumps({"weight_map": dict.fromkeys(names, place)}))

    return change


def change_tensors(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        tensors = load_file(folder / SINGLE_FILE)
        change(tensors)
        save_file(tensors, folder / SINGLE_FILE)

    return rewrite


def _first_to_int8(tensors: dict[str, torch.Tensor]) -> None:
    name = next(iter(tensors))
    tensors[name] = tensors[name].to(torch.int8)


def _add_odd_name(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.x.self_attn.q_proj.weight"] = torch.zeros(2)


def _index_without_file(folder: Path) -> None:
    """The index names a file that has other tensors."""
    names = load_file(folder / SINGLE_FILE)
    save_file({"other": torch.zeros(1)}, folder / "other.safetensors")
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": dict.fromkeys(names, "other.safetensors")}))


def as_fifo(name: str) -> Callable[[Path], None]:
    def replace(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return replace


HOSTILE: dict[str, tuple[Callable[[Path], None], str]] = {
    "parent": (write_index("../model.safetensors"), "outside this folder"),
    "absolute": (write_index("/etc/passwd"), "outside this folder"),
    "not a name": (write_index(""), "outside this folder"),
    "index is a list": (lambda folder: (folder / INDEX_FILE).write_text('{"weight_map": []}'), "no mapping"),
    "deep index": (lambda folder: (folder / INDEX_FILE).write_text("[" * 100_000), "nested too deeply"),
    "index lies": (_index_without_file, "which the index names"),
    "missing tensor": (change_tensors(lambda tensors: tensors.pop(next(iter(tensors)))), "1 missing tensor"),
    "odd name": (change_tensors(_add_odd_name), "unexpected tensor"),
    "integers": (change_tensors(_first_to_int8), "has dtype I8"),
    "rope_theta 0": (
        change_config(rope_theta=0, rope_parameters=None),
        "theta: Input should be",
    ),
    "a billion layers": (change_config(num_hidden_layers=10**9), "num_layers"),
    "10,000 layers": (change_config(num_hidden_layers=10_000), "only"),
    "vast width": (change_config(hidden_size=10**12), "width"),
    "deep config": (
        lambda folder: (folder / "config.json").write_text('{"a":' * 100_000),
        "nested too deeply",
    ),
    "config is a pipe": (as_fifo("config.json"), "neither a checkpoint nor a config.json"),
    "weights are a pipe": (as_fifo(SINGLE_FILE), "no regular file"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_folder_is_one_error_at_once(
    folder: Path, tmp_path: Path, capsys: Captured, case: str
) -> None:
    change, expected = HOSTILE[case]
    change(folder)
    for arguments in (
        ["convert", str(folder), str(tmp_path / "out")],
        ["sample", str(folder), "--prompt", "a", "--tokenizer", "bytes"],
    ):
        assert run(arguments) == 2
        printed = capsys.readouterr().err
        assert printed.startswith("error: ") and expected in printed, printed
    assert not (tmp_path / "out").exists()


def test_an_intact_folder_converts(folder: Path, tmp_path: Path) -> None:
    assert run(["convert", str(folder), str(tmp_path / "out")]) == 0


def test_weights_of_nan_give_no_sample(folder: Path, capsys: Captured) -> None:
    change_tensors(lambda tensors: [tensor.fill_(torch.nan) for tensor in tensors.values()])(folder)
    assert run(["sample", str(folder), "--prompt", "a", "--tokenizer", "bytes"]) == 2
    assert "not finite" in capsys.readouterr().err


def test_conversion_touches_nothing_that_is_not_its_own(folder: Path, tmp_path: Path) -> None:
    """Folders of a user with the names that a draft might have, and a symbolic link in such a place."""
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    for name in ("out.partial", ".out.partial"):
        (tmp_path / name).symlink_to(precious)
    (tmp_path / ".out.pt.partial").mkdir()
    for target in ("out", "out.pt"):
        assert run(["convert", str(folder), str(tmp_path / target)]) == 0
    assert (precious / "thesis.txt").read_text() == "years of work"
    assert sorted(path.name for path in precious.iterdir()) == ["thesis.txt"]
    assert (tmp_path / ".out.pt.partial").is_dir()
    assert not list(tmp_path.glob(".out*.partial-*"))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    (tmp_path / "run" / "run.yaml").write_text("name: x\n")
    return tmp_path / "run"


@pytest.mark.parametrize("verb", ("report", "compare"))
def test_a_run_file_of_aliases_needs_no_memory(run_dir: Path, verb: str) -> None:
    (run_dir / "run.yaml").write_text(ALIAS_BOMB)
    arguments = [verb, str(run_dir), *([str(run_dir)] if verb == "compare" else [])]

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))

    done = subprocess.run(
        [sys.executable, "-m", "meshwright", *arguments, *(["--no-weights"] if verb == "compare" else [])],
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=limit,
    )
    assert done.returncode == 0, done.stderr


def test_strange_metrics_are_no_crash(run_dir: Path, capsys: Captured) -> None:
    lines = (
        '{"step": 1, "loss": 3.0, "tokens": %s}' % ("9" * 400),
        '{"step": %s, "loss": 3.0}' % ("9" * 40),
        '{"step": 2, "loss": [1, 2], "peak_bytes": "many"}',
        '{"step": 3, "loss": "NaN", "grad_norm": 1e400}',
        "[" * 100_000,
        "\x00" * 1000,
        '{"step": 4, "loss": 1.5}',
    )
    (run_dir / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (run_dir / "summary.json").write_text('{"wall_seconds": %s, "num_parameters": []}' % ("9" * 400))
    assert run(["report", str(run_dir), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["final_step"] == 4 and figures["final_loss"] == 1.5


@pytest.mark.parametrize(
    "name", ("metrics.jsonl", "run.yaml", "summary.json", "events-0.jsonl", "sample.txt")
)
def test_a_pipe_in_a_run_directory_does_not_block(run_dir: Path, name: str) -> None:
    (run_dir / name).unlink(missing_ok=True)
    os.mkfifo(run_dir / name)
    assert run(["report", str(run_dir)]) in (0, 2)


@pytest.mark.parametrize(
    "arguments",
    (
        ["check", "/dev/zero"],
        ["plan", "/dev/zero", "--on", "h100:8"],
        ["plan", "llama-3.2-1b", "--on", "/dev/zero"],
        ["data", "pack", "/dev/zero", "-o", "out"],
        ["train", "demo", "--dir", ""],
        ["demo", "--dir", "."],
        ["demo", "--dir", ""],
        ["plan", "llama-3.2-1b", "--on", "h100:8", "--set", "model.num_layers=1000000000"],
    ),
)
def test_devices_and_empty_paths_are_refused(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    assert run(arguments) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_a_fifo_of_text_is_refused(tmp_path: Path, capsys: Captured) -> None:
    os.mkfifo(tmp_path / "a.txt")
    assert run(["data", "pack", str(tmp_path / "a.txt"), "-o", str(tmp_path / "out")]) == 2
    assert "no regular file" in capsys.readouterr().err
