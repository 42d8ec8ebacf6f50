"""Fine-tuning from the command line: train, sample, evaluate, convert, and what is refused."""

from pathlib import Path

import pytest
from tests.support.run_files import train_run_file

from meshwright.cli.main import run

Captured = pytest.CaptureFixture[str]
ADAPTER = "adapter={rank: 4, alpha: 16}"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    trained = train_run_file(folder)
    assert run(["convert", str(trained), str(folder / "huggingface"), "--ema"]) == 0
    return folder / "huggingface"


@pytest.fixture(scope="module")
def tuned(base: Path) -> Path:
    options = [f"checkpoint.start_from={base}", ADAPTER, "optim.lr=0.1", "data.holdout_sequences=2"]
    return train_run_file(base.parent, *options, name="tuned")


def sampled(directory: Path, capsys: Captured, *options: str) -> str:
    command = ["sample", str(directory), "--prompt", "It was", "--tokens", "12", "--tokenizer", "bytes"]
    assert run([*command, "--temperature", "0", *options]) == 0
    return capsys.readouterr().out


def test_the_adapter_on_and_off(tuned: Path, base: Path, capsys: Captured) -> None:
    without = sampled(tuned, capsys, "--no-adapter")
    assert without == sampled(base, capsys)
    assert without != sampled(tuned, capsys)
    assert run(["sample", str(base), "--prompt", "a", "--no-adapter"]) == 2
    assert "these weights have no adapters" in capsys.readouterr().err


def test_merged_and_peft_folders(tuned: Path, tmp_path: Path, capsys: Captured) -> None:
    assert run(["convert", str(tuned), str(tmp_path / "merged")]) == 0
    assert "of the adapted weights differ from the base in float32" in capsys.readouterr().err
    assert sampled(tmp_path / "merged", capsys) == sampled(tuned, capsys)
    assert run(["convert", str(tuned), str(tmp_path / "peft"), "--to", "peft"]) == 0
    names = {path.name for path in (tmp_path / "peft").iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors"}
    assert run(["convert", str(tuned), str(tmp_path / "peft"), "--to", "peft"]) == 2
    assert "this already exists" in capsys.readouterr().err


def test_evaluate_loads_the_base_and_the_adapter(tuned: Path, capsys: Captured) -> None:
    assert run(["evaluate", str(tuned)]) == 0
    assert "loss" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (["adapter={rank: 0, alpha: 8}"], "adapter.rank is 0"),
        (["adapter={rank: 4, alpha: 8, targets: [q_porj]}"], "did you mean 'q_proj'?"),
        (["adapter={rank: 4, alpha: 8}", "checkpoint.start_from=null"], "adapters need a trained base"),
        (["adapter={rank: 4, alpha: 8, start_from: nowhere}"], "there is no folder 'nowhere'"),
    ],
)
def test_what_is_refused(
    base: Path, tmp_path: Path, capsys: Captured, settings: list[str], text: str
) -> None:
    with pytest.raises(AssertionError):
        train_run_file(tmp_path, f"checkpoint.start_from={base}", *settings)
    assert text in capsys.readouterr().err
