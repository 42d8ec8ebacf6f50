"""Finds the folder that `checkpoint.start_from`, or an argument of sample and convert, names."""

from pathlib import Path

from meshwright.checkpoint.load import complete_checkpoints
from meshwright.checkpoint.save import MANIFEST, step_folder
from meshwright.errors import CheckpointError

CONFIG = "config.json"
_HINT = "name a Hugging Face folder, a checkpoint (step-<n>), or a run directory"


def is_checkpoint(folder: Path) -> bool:
    """Whether this folder is a complete checkpoint of this package."""
    return (folder / MANIFEST).is_file()


def locate_weights(text: str | Path, *, where: str, step: int | None = None, hint: str = _HINT) -> Path:
    """The checkpoint or Hugging Face folder at a path; a run directory means its newest checkpoint."""
    folder = Path(text).expanduser()
    if not folder.exists():
        raise CheckpointError(f"there is no folder {str(text)!r}", where=where, hint=hint)
    if is_checkpoint(folder):
        return folder
    for root in (folder / "checkpoints", folder):
        found = complete_checkpoints(root)
        if found:
            return _checkpoint_of_step(root, found, step)
    if (folder / CONFIG).is_file():
        return folder
    place = where if where == str(folder) else f"{where}: {folder}"
    raise CheckpointError(_missing_weights(folder), where=place, hint=hint)


def _checkpoint_of_step(root: Path, found: list[Path], step: int | None) -> Path:
    if step is None:
        return found[-1]
    folder = step_folder(root, step)
    if folder not in found:
        steps = ", ".join(str(int(path.name.removeprefix("step-"))) for path in found)
        raise CheckpointError(
            f"there is no checkpoint of step {step}", where=str(root), hint=f"there are {steps}"
        )
    return folder


def _missing_weights(folder: Path) -> str:
    if folder.is_file():
        return "this is a file, not a folder with weights"
    if (folder / "checkpoints").is_dir() or (folder / "run.yaml").is_file():
        return "this run has no complete checkpoint yet"
    if (folder / ".metadata").is_file():
        return "this is a torch distributed checkpoint (DCP): `meshwright convert` makes a checkpoint of it"
    if (folder / "adapter_config.json").is_file():
        return "this is a peft folder: it has adapters without their base"
    return f"this folder has neither a checkpoint nor a {CONFIG}"
