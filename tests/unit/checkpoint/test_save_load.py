"""Checkpoints: written to a hidden folder, published atomically, verified, deleted beyond `keep_last`."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from meshwright import __version__
from meshwright.checkpoint.load import complete_checkpoints, load_tensors, read_manifest, verify_files
from meshwright.checkpoint.retain import delete_old
from meshwright.checkpoint.save import MANIFEST, save_checkpoint, step_folder
from meshwright.errors import CheckpointError
from meshwright.spec import CheckpointSpec


def _save_and_load(root: Path) -> dict[str, object]:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(4)}
    folder = save_checkpoint(root, step=7, tensors=tensors, facts={"note": "seven"})
    empty = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    manifest = read_manifest(folder)
    verify_files(folder, manifest)
    load_tensors(folder, empty)
    return {"folder": folder.name, "manifest": manifest, "tensors": empty}


@pytest.mark.parametrize("num_ranks", (1, 2))
def test_round_trip(ranks, tmp_path, num_ranks):
    for result in ranks.run(_save_and_load, num_ranks, tmp_path):
        assert result["folder"] == "step-00000007"
        assert (result["manifest"]["step"], result["manifest"]["note"]) == (7, "seven")
        assert torch.equal(result["tensors"]["a"], torch.arange(6.0).view(2, 3))
        assert result["tensors"]["b"] == 4
    hidden = [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert hidden == []
    listed = set(result["manifest"]["files"])
    assert listed == {path.name for path in (tmp_path / "step-00000007").iterdir()} - {MANIFEST}


def _save_twice(root: Path) -> float:
    for value in (1.0, 2.0):
        folder = save_checkpoint(root, step=3, tensors={"a": torch.tensor([value])}, facts={})
    found = {"a": torch.zeros(1)}
    load_tensors(folder, found)
    return float(found["a"])


def test_the_same_step_again_replaces_it(ranks, tmp_path):
    (tmp_path / ".partial-00000003").mkdir()  # left by a save that was killed
    (tmp_path / ".partial-00000003" / "junk").write_text("x")
    assert ranks.run(_save_twice, 2, tmp_path) == [2.0, 2.0]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


def _fail_on_last_rank(root: Path) -> str:
    """Publishing is refused where a file stands in the way."""
    if dist.get_rank() == 0:
        root.write_text("not a folder")
    dist.barrier()
    with pytest.raises(CheckpointError) as caught:
        save_checkpoint(root / "checkpoints", step=1, tensors={"a": torch.zeros(1)}, facts={})
    return caught.value.fact


def test_a_failure_of_one_rank_is_raised_on_all(ranks, tmp_path):
    facts = ranks.run(_fail_on_last_rank, 2, tmp_path / "file")
    assert facts[0] == facts[1]
    assert facts[0].startswith("rank 0: NotADirectoryError")


def _load_facts(root: Path) -> list[str]:
    folder = save_checkpoint(root, step=1, tensors={"a": torch.zeros(2, 3)}, facts={})
    facts = []
    for wanted in ({"a": torch.zeros(2, 3), "b": torch.zeros(1)}, {"a": torch.zeros(3, 2)}):
        with pytest.raises(CheckpointError) as caught:
            load_tensors(folder, wanted)
        facts.append(caught.value.fact)
    return facts


def test_another_model_is_refused(ranks, tmp_path):
    missing, reshaped = ranks.run(_load_facts, 1, tmp_path)[0]
    assert missing == "1 tensor(s) are not in the checkpoint, first b"
    assert reshaped == "a has shape (2, 3) there and (3, 2) in this run"


def published(root: Path, step: int) -> Path:
    folder = step_folder(root, step)
    folder.mkdir(parents=True)
    (folder / MANIFEST).write_text(json.dumps({"version": 1, "files": {}}))
    return folder


def test_only_published_ones_count_in_order(tmp_path):
    for step in (10, 9, 100):
        published(tmp_path, step)
    step_folder(tmp_path, 200).mkdir()
    (tmp_path / ".partial-00000300").mkdir()
    assert [path.name for path in complete_checkpoints(tmp_path)] == [
        "step-00000009",
        "step-00000010",
        "step-00000100",
    ]
    assert complete_checkpoints(tmp_path / "nowhere") == []


def test_the_newest_are_kept(tmp_path):
    for step in range(1, 6):
        published(tmp_path, step)
    deleted = delete_old(tmp_path, CheckpointSpec(keep_last=2))
    assert [path.name for path in deleted] == [f"step-0000000{step}" for step in (1, 2, 3)]
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step-00000004", "step-00000005"]
    assert delete_old(tmp_path, CheckpointSpec(keep_last=2)) == []


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        (None, "there is no complete checkpoint here"),
        ("{", "manifest.json is damaged"),
        ('{"version": 9}', "this checkpoint has format version 9, written by meshwright (unknown version); "),
    ],
)
def test_a_bad_manifest_is_refused(tmp_path, text, fact):
    if text is not None:
        (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(CheckpointError) as caught:
        read_manifest(tmp_path)
    assert caught.value.fact.startswith(fact)


def test_an_older_format_is_refused_with_what_to_do(tmp_path):
    (tmp_path / MANIFEST).write_text('{"version": 1, "versions": {"meshwright": "0.0.9"}}')
    with pytest.raises(CheckpointError) as caught:
        read_manifest(tmp_path)
    assert caught.value.fact == (
        "this checkpoint has format version 1, written by meshwright 0.0.9; "
        f"meshwright {__version__} reads format versions 2 to 3"
    )
    assert caught.value.where == str(tmp_path / MANIFEST)
    assert "`meshwright convert`" in caught.value.hint and "checkpoint.start_from" in caught.value.hint
