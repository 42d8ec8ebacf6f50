"""Fine-tuning from the command line: train, sample, evaluate, convert, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from tests.support.run_files import train_run_file

from meshwright.checkpoint.weights import open_weights
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
    for options in ([], ["--no-adapter"]):
        found = json.loads(sampled(tuned, capsys, "--json", *options))
        assert found["with_adapter"] is not bool(options)
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


def test_a_relative_base_is_found_from_another_folder(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(base.parent)
    options = ["checkpoint.start_from=huggingface", ADAPTER, "data.holdout_sequences=2"]
    trained = train_run_file(tmp_path, *options, name="relative")
    monkeypatch.chdir(tmp_path)
    assert run(["evaluate", str(trained)]) == 0
    assert run(["convert", str(trained), "merged"]) == 0
    capsys.readouterr()
    assert run(["evaluate", str(trained), "checkpoint.start_from=elsewhere"]) == 2
    assert "there is no folder 'elsewhere'" in capsys.readouterr().err


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


def test_check_and_train_say_what_is_trained(
    base: Path, tuned: Path, tmp_path: Path, capsys: Captured
) -> None:
    file = str(tuned / "run.yaml")
    assert run(["check", file]) == 0
    out = capsys.readouterr().out
    assert ": lora of rank 4 on all-linear\n" in out
    assert f"  base      fp32, from {base}\n" in out
    assert run(["check", file, "checkpoint.start_from=null"]) == 0
    assert "no weights yet: `train` needs checkpoint.start_from" in capsys.readouterr().out
    assert run(["check", file, "adapter=null", "train_only=[norm.weight]"]) == 0
    assert "% of the model: norm.weight\n" in capsys.readouterr().out
    train_run_file(tmp_path, f"checkpoint.start_from={base}", ADAPTER, name="again")
    assert " trained, cpu, one device" in capsys.readouterr().err


def test_check_reads_the_folder_of_the_first_adapters(
    tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """It need not be there; where it is, what `train` would refuse in it is refused."""
    monkeypatch.setenv("HOME", str(tmp_path))
    check = ["check", str(tuned / "run.yaml")]
    start = "adapter={rank: 4, alpha: 16, start_from: ~/peft}"
    assert run([*check, start]) == 0
    assert "from ~/peft, which is not there" in capsys.readouterr().out
    assert run(["convert", str(tuned), str(tmp_path / "peft"), "--to", "peft"]) == 0
    capsys.readouterr()
    assert run([*check, start]) == 0
    assert "from ~/peft\n" in capsys.readouterr().out
    assert run([*check, start, "adapter.kind=dora"]) == 2
    assert "the adapter is of kind lora" in capsys.readouterr().err
    assert run([*check, start, "adapter.rank=8"]) == 2
    assert "has shape 4 x 64, and 8 x 64 in this run" in capsys.readouterr().err
    assert run([*check, start, "adapter.targets=[query]"]) == 2
    assert "the adapter has also base_model.model.model.layers.0" in capsys.readouterr().err
    (tmp_path / "peft/adapter_config.json").write_text("{")
    assert run([*check, start]) == 2
    assert "damaged" in capsys.readouterr().err
    assert run([*check, start, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["violations"][0]["fact"].startswith("damaged")


def test_check_compares_the_base_with_the_run(
    base: Path, tuned: Path, tmp_path: Path, capsys: Captured
) -> None:
    check = ["check", str(tuned / "run.yaml")]
    assert run([*check, "model.width=32"]) == 2
    assert "model.width is 64 there and 32 here" in capsys.readouterr().err
    assert run([*check, "checkpoint.new_tokens=4", "adapter.tokens=[508,509,510,511]"]) == 2
    assert "the weights have all of these rows" in capsys.readouterr().err
    for other in (base, tmp_path, tuned / "run.yaml"):
        assert run([*check, f"adapter.start_from={other}"]) == 2
        assert "this folder has no adapters" in capsys.readouterr().err


def test_check_refuses_a_base_of_which_the_end_is_missing(
    base: Path, tuned: Path, tmp_path: Path, capsys: Captured
) -> None:
    shutil.copytree(base, tmp_path / "base")
    file = tmp_path / "base/model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    assert run(["check", str(tuned / "run.yaml"), f"checkpoint.start_from={tmp_path / 'base'}"]) == 2
    error = capsys.readouterr().err
    assert "the file ends at byte" in error
    assert "download or copy the file again" in error


def test_check_compares_a_run_that_the_adapters_come_from(
    base: Path, tuned: Path, tmp_path: Path, capsys: Captured
) -> None:
    check = ["check", str(tuned / "run.yaml"), f"adapter.start_from={tuned}"]
    assert run(check) == 0
    (newest,) = (tuned / "checkpoints").glob("step-*")
    assert run([*check, f"adapter.start_from={newest}"]) == 0
    assert run([*check, "adapter.alpha=8"]) == 2
    assert "adapter.alpha is 16.0 there and 8.0 in this run" in capsys.readouterr().err
    assert run(["convert", str(tuned), str(tmp_path / "other")]) == 0
    assert run([*check, f"checkpoint.start_from={tmp_path / 'other'}"]) == 2
    assert "the adapters were trained on other weights" in capsys.readouterr().err
    assert run(["convert", str(base), str(tmp_path / "checkpoint")]) == 0
    assert run([*check, f"adapter.start_from={tmp_path / 'checkpoint'}"]) == 2
    assert "this checkpoint has no adapters" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["check", "train"])
def test_a_run_of_unknown_settings_is_refused(
    tuned: Path, tmp_path: Path, capsys: Captured, verb: str
) -> None:
    shutil.copytree(tuned, tmp_path / "there")
    (manifest,) = (tmp_path / "there/checkpoints").glob("step-*/manifest.json")
    content = json.loads(manifest.read_text())
    content["run"]["adapter"]["rank"] = "four"
    manifest.write_text(json.dumps(content))
    directory = ["--dir", str(tmp_path / "new")] if verb == "train" else []
    command = [verb, str(tuned / "run.yaml"), f"adapter.start_from={tmp_path / 'there'}", *directory]
    assert run(command) == 2
    assert "the run in the manifest cannot be read" in capsys.readouterr().err


def test_check_compares_the_base_of_a_peft_folder(
    base: Path, tuned: Path, tmp_path: Path, capsys: Captured
) -> None:
    check = ["check", str(tuned / "run.yaml"), f"adapter.start_from={tmp_path / 'peft'}"]
    assert run(["convert", str(tuned), str(tmp_path / "peft"), "--to", "peft"]) == 0
    shutil.copytree(base, tmp_path / "moved")
    assert run([*check, f"checkpoint.start_from={tmp_path / 'moved'}"]) == 0
    assert run(["convert", str(tuned), str(tmp_path / "other")]) == 0
    assert run([*check, f"checkpoint.start_from={tmp_path / 'other'}"]) == 2
    assert "the adapters were trained on other weights" in capsys.readouterr().err


def test_sample_without_the_dataset_asks_for_a_tokenizer(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "text.txt").write_text("once upon a time there was a fox and a crow\n" * 40)
    assert run(["data", "pack", str(tmp_path / "text.txt"), "-o", str(tmp_path / "packed")]) == 0
    trained = train_run_file(tmp_path, f"data.path={tmp_path / 'packed'}", "data.synthetic=null")
    shutil.rmtree(tmp_path / "packed")
    capsys.readouterr()
    assert run(["sample", str(trained), "--prompt", "a"]) == 2
    error = capsys.readouterr().err
    assert "the tokenizer is that of the run's dataset: there is no dataset here" in error
    assert "name one with --tokenizer" in error
    assert run(["sample", str(trained), "--prompt", "a", "--tokens", "1", "--tokenizer", "bytes"]) == 0
    capsys.readouterr()
    assert run(["convert", str(trained), str(tmp_path / "exported")]) == 0
    error = capsys.readouterr().err
    assert "the tokenizer of the run's dataset is not known" in error
    assert "so the folder has no tokenizer" in error


def test_convert_says_which_weights_of_a_quantised_base_it_takes(
    base: Path, tuned: Path, tmp_path: Path, capsys: Captured
) -> None:
    options = [f"checkpoint.start_from={base}", "adapter={rank: 4, alpha: 16, base: nf4}"]
    quantised = str(train_run_file(tmp_path, *options, "precision.compute=bf16", name="quantised"))
    assert run(["convert", quantised, str(tmp_path / "trained")]) == 0
    assert "merged into the weights in nf4 that they were trained on" in capsys.readouterr().err
    assert run(["convert", quantised, str(tmp_path / "original"), "--onto-original"]) == 0
    assert "merged into the original weights, not into those in nf4" in capsys.readouterr().err
    assert run(["convert", quantised, str(tmp_path / "peft"), "--to", "peft"]) == 0
    assert "were trained on a base in nf4" in capsys.readouterr().err
    for source, *form in ((str(tuned),), (quantised, "--to", "peft")):
        assert run(["convert", source, str(tmp_path / "no"), "--onto-original", *form]) == 2
        assert "so it has no effect" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


def test_merged_weights_are_rounded_to_the_dtype_of_the_base_in_every_form(
    base: Path, tmp_path: Path, capsys: Captured
) -> None:
    assert run(["convert", str(base), str(tmp_path / "file.pt")]) == 0
    assert run(["convert", str(tmp_path / "file.pt"), str(tmp_path / "base"), "--dtype", "bf16"]) == 0
    tuned = train_run_file(tmp_path, f"checkpoint.start_from={tmp_path / 'base'}", ADAPTER, name="tuned")
    folder = tmp_path / "folder"
    assert run(["convert", str(tuned), str(folder)]) == 0
    for target, *form in ((tmp_path / "merged.pt",), (tmp_path / "checkpoint", "--to", "checkpoint")):
        capsys.readouterr()
        assert run(["convert", str(tuned), str(target), *form]) == 0
        assert "differ from the base in bfloat16" in capsys.readouterr().err
        expected, found = open_weights(folder).tensors, open_weights(target).tensors
        for name, tensor in expected.items():
            assert torch.equal(tensor.float(), found[name].float()), name
    assert {one.dtype for one in open_weights(tmp_path / "merged.pt").tensors.values()} == {torch.bfloat16}
