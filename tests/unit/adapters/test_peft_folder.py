"""What is said of a peft folder before any tensor is read: the same by `check` and by `train`."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.shrunk_families import shrunk_family

from meshwright.adapters.peft_config import CONFIG_FILE
from meshwright.adapters.peft_folder import WEIGHTS_FILE, PeftFolder, is_peft_folder
from meshwright.adapters.peft_write import write_peft
from meshwright.errors import CheckpointError
from meshwright.spec import AdapterSpec
from meshwright.spec.adapter import adapter_parameters

MODEL = shrunk_family("llama-3.1-8b")
LORA = AdapterSpec(rank=3, alpha=8)
SCALED = LORA.with_(ranks=[{"pattern": "down_proj", "rank": 5}])
ENDS = LORA.with_(targets=("q_proj", "embed_tokens"))
ENDS_SCALED = ENDS.with_(ranks=[{"pattern": "embed_tokens", "rank": 5}])


def written(folder: Path, adapter: AdapterSpec) -> Path:
    tensors = {one.name: torch.full(one.shape, 0.5) for one in adapter_parameters(MODEL, adapter)}
    write_peft(folder, MODEL, adapter, tensors, base=None)
    return folder


def refusal(folder: Path, adapter: AdapterSpec = LORA) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        PeftFolder(folder, MODEL, adapter)
    assert caught.value.where.startswith(str(folder))
    assert caught.value.hint
    return caught.value


@pytest.mark.parametrize("adapter", [SCALED, ENDS_SCALED])
def test_a_folder_with_padded_ranks_is_that_of_lower_ones(tmp_path: Path, adapter: AdapterSpec) -> None:
    found = PeftFolder(written(tmp_path / "adapter", adapter), MODEL, adapter)
    assert set(found.parts) == {one.name for one in adapter_parameters(MODEL, adapter)}
    assert {found.rank_there(one) for one, _ in found.parts.values()} == {5}


@pytest.mark.parametrize(("there", "here"), [(SCALED, LORA), (ENDS_SCALED, ENDS)])
def test_ranks_that_are_not_zero_are_no_padding(
    tmp_path: Path, there: AdapterSpec, here: AdapterSpec
) -> None:
    assert "has shape" in refusal(written(tmp_path / "adapter", there), here).fact


@pytest.mark.parametrize("num_bytes", [0, 4, 500, 20_000])
def test_a_truncated_file_is_refused(tmp_path: Path, num_bytes: int) -> None:
    file = written(tmp_path / "adapter", LORA) / WEIGHTS_FILE
    file.write_bytes(file.read_bytes()[:num_bytes])
    error = refusal(tmp_path / "adapter")
    assert error.fact.startswith("cannot read the file: ")
    assert "again" in error.hint


@pytest.mark.parametrize("header", ["[]", "{", '{"a": 1}', '{"a": {"shape": [2]}}', "[" * 100_000])
def test_a_damaged_header_is_refused(tmp_path: Path, header: str) -> None:
    file = written(tmp_path / "adapter", LORA) / WEIGHTS_FILE
    file.write_bytes(len(header).to_bytes(8, "little") + header.encode())
    assert refusal(tmp_path / "adapter").fact.startswith("cannot read the file: ")


def test_a_header_of_any_length_is_not_read(tmp_path: Path) -> None:
    file = written(tmp_path / "adapter", LORA) / WEIGHTS_FILE
    file.write_bytes((2**28).to_bytes(8, "little"))
    with file.open("r+b") as stream:
        stream.truncate(2**29)  # sparse: it takes no space
    assert "its header has 268435456 bytes" in refusal(tmp_path / "adapter").fact


def test_a_folder_without_one_of_its_files_is_refused(tmp_path: Path) -> None:
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        folder = written(tmp_path / name, LORA)
        (folder / name).unlink()
        assert is_peft_folder(folder)
        assert refusal(folder).where == str(folder / name)
    (tmp_path / WEIGHTS_FILE / "adapter_model.bin").write_bytes(b"")
    assert "has adapter_model.bin in its place" in refusal(tmp_path / WEIGHTS_FILE).fact


def test_a_file_that_may_not_be_read_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(_: Path) -> None:
        raise PermissionError(13, "Permission denied")

    folder = written(tmp_path / "adapter", LORA)
    monkeypatch.setattr("meshwright.spec.huggingface.tensor_file.regular_file", denied)
    error = refusal(folder)
    assert error.fact == "cannot read the file: Permission denied"
    assert "permissions" in error.hint


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_floating_dtypes_are_opened(tmp_path: Path, dtype: torch.dtype) -> None:
    file = written(tmp_path / "adapter", SCALED) / WEIGHTS_FILE
    save_file({name: value.to(dtype) for name, value in load_file(file).items()}, file)
    PeftFolder(tmp_path / "adapter", MODEL, SCALED)


@pytest.mark.parametrize("key", ["use_rslora", "use_dora", "ensure_weight_tying"])
def test_a_flag_that_is_no_truth_value_is_refused(tmp_path: Path, key: str) -> None:
    """The text "false" is true in Python, and would change the scale."""
    path = written(tmp_path / "adapter", LORA) / CONFIG_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: "false"}))
    assert f"damaged: {key} is 'false'" in refusal(tmp_path / "adapter").fact
