"""`meshwright convert`: round trips, transformers reads the result, nothing is overwritten."""

from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from tests.support.run_files import train_run_file
from tests.support.shrunk_families import shrunk_family

from meshwright.checkpoint.weights import build_model, open_weights
from meshwright.cli.main import run
from meshwright.models.decoder import build_decoder
from meshwright.models.hf_weights import save_folder
from meshwright.models.initialise import initialise

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_run_file(tmp_path_factory.mktemp("trained"))


def convert(source: Path, target: Path, *options: str) -> Path:
    assert run(["convert", str(source), str(target), *options]) == 0
    return target


def assert_same_weights(a: Path, b: Path) -> None:
    ours, theirs = open_weights(a), open_weights(b)
    assert ours.tensors.keys() == theirs.tensors.keys()
    for name in ours.tensors:
        assert torch.equal(ours.tensors[name].float(), theirs.tensors[name].float()), name


def test_every_form_and_back(trained: Path, tmp_path: Path):
    folder = convert(trained, tmp_path / "hf")
    checkpoint = convert(folder, tmp_path / "checkpoint")
    file = convert(checkpoint, tmp_path / "weights.pt")
    again = convert(file, tmp_path / "again")
    other = convert(file, tmp_path / "other", "--to", "checkpoint")
    for target in (folder, checkpoint, file, again, other):
        assert_same_weights(trained, target)
    assert (folder / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["hf", "checkpoint", "weights.pt", "again", "other"]
    ), "no draft is left"


def test_transformers_reads_the_folder(trained: Path, tmp_path: Path):
    from transformers import AutoModelForCausalLM

    folder = convert(trained, tmp_path / "hf")
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    tokens_BS = torch.arange(20)[None] + 65
    positions_BS = torch.arange(20)[None]
    with torch.no_grad():
        expected = theirs(tokens_BS).logits
        ours = build_model(open_weights(trained))(tokens_BS, positions_BS=positions_BS)
    assert torch.allclose(ours, expected, atol=1e-5), "fp32 sums in another order"


def test_a_converted_checkpoint_starts_a_run(trained: Path, tmp_path: Path):
    checkpoint = convert(convert(trained, tmp_path / "hf"), tmp_path / "checkpoint")
    directories = [
        train_run_file(tmp_path, f"checkpoint.start_from={start}", "schedule.num_steps=2", name=name)
        for name, start in (("a", trained), ("b", checkpoint), ("c", tmp_path / "hf"))
    ]
    for other in directories[1:]:
        assert run(["compare", str(directories[0]), str(other), "--assert-equal"]) == 0


def test_dtype_and_average(trained: Path, tmp_path: Path):
    narrow = open_weights(convert(trained, tmp_path / "hf", "--dtype", "bf16", "--ema"))
    average = open_weights(trained, averaged=True)
    for name, tensor in narrow.tensors.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, average.tensors[name].bfloat16()), name


def test_experts_and_their_bias_survive(tmp_path: Path):
    model = shrunk_family("deepseek-v3")
    decoder = build_decoder(model)
    initialise(decoder, 3)
    state = {name: tensor.detach() for name, tensor in decoder.state_dict().items()}
    for name, tensor in state.items():
        if name.endswith("balance_bias"):
            tensor.copy_(torch.arange(len(tensor)))
    save_folder(state, model, tmp_path / "hf", max_shard_bytes=50_000)
    checkpoint = convert(tmp_path / "hf", tmp_path / "checkpoint")
    assert_same_weights(tmp_path / "hf", checkpoint)
    assert_same_weights(tmp_path / "hf", convert(checkpoint, tmp_path / "again"))


def test_a_bare_state_dict_needs_a_model(trained: Path, tmp_path: Path, capsys: Captured):
    tensors = open_weights(trained).tensors
    torch.save({name: tensors[name].clone() for name in tensors}, tmp_path / "bare.pt")
    assert run(["convert", str(tmp_path / "bare.pt"), str(tmp_path / "hf")]) == 2
    assert "does not record its model" in capsys.readouterr().err
    folder = convert(trained, tmp_path / "named")
    convert(tmp_path / "bare.pt", tmp_path / "hf", "--model", str(folder / "config.json"))
    assert_same_weights(trained, tmp_path / "hf")


@pytest.mark.parametrize("name", ["folder", "weights.pt"])
def test_nothing_is_overwritten(trained: Path, tmp_path: Path, capsys: Captured, name: str):
    (tmp_path / name).write_text("precious")
    assert run(["convert", str(trained), str(tmp_path / name)]) == 2
    assert "this already exists" in capsys.readouterr().err
    assert (tmp_path / name).read_text() == "precious" and len(list(tmp_path.iterdir())) == 1


def test_bad_input_is_refused(trained: Path, tmp_path: Path, capsys: Captured):
    (tmp_path / "damaged.pt").write_bytes(b"not a torch file")
    (tmp_path / "notes.txt").write_text("nothing")
    cases = {
        "there is no folder": [str(tmp_path / "none"), "out"],
        "cannot be read as tensors": [str(tmp_path / "damaged.pt"), "out"],
        "is of no known kind of weights": [str(tmp_path / "notes.txt"), "out"],
        "is none of fp32, bf16 and fp16": [str(trained), "out", "--dtype", "int8"],
        "is none of huggingface, checkpoint, torch and peft": [str(trained), "out", "--to", "onnx"],
        "no model family is called 'lama'": [str(trained), "out", "--model", "lama"],
        "--model has no effect": [str(trained), "out", "--model", "gpt2-124m"],
        "cannot be written": [str(trained), str(tmp_path / "notes.txt" / "out")],
    }
    for fact, arguments in cases.items():
        assert run(["convert", *arguments]) == 2, fact
        error = capsys.readouterr().err
        assert fact in error and error.startswith("error: "), error
    assert not Path("out").exists()


@pytest.mark.parametrize("target", ["folder", "file.pt"])
def test_a_full_disk_is_an_error_and_leaves_nothing(target, trained, tmp_path, monkeypatch, capsys):
    def full(*_: object, **__: object) -> None:
        if target == "folder":
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")

    monkeypatch.setattr("meshwright.models.hf_weights.save_file", full)
    monkeypatch.setattr("torch.save", full)
    assert run(["convert", str(trained), str(tmp_path / target)]) == 2
    assert "error: cannot be written: " in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
