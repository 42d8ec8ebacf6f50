"""The files of a Hugging Face folder beside its weights: configs, tokenizer, chat template.

A run that starts from such a folder keeps a copy of them in its directory, and so does a checkpoint that
`convert` makes from one. An exported folder then has everything that came in.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from meshwright.checkpoint.locate import CONFIG, locate_weights
from meshwright.errors import CheckpointError, MeshwrightError

SOURCE_FOLDER = "hugging_face"
"""The copy, in a run directory or in a converted checkpoint."""
GENERATION, TOKENIZER_CONFIG = "generation_config.json", "tokenizer_config.json"
CHAT_TEMPLATE, CHAT_TEMPLATE_JSON = "chat_template.jinja", "chat_template.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    CHAT_TEMPLATE,
    CHAT_TEMPLATE_JSON,
)
_KEPT = (CONFIG, GENERATION, *TOKENIZER_FILES)
_MAX_FILE_BYTES = 2**27


def source_folder(origin: Path) -> Path | None:
    """The folder with the files that came in with the weights at `origin`; None where none are kept."""
    if not origin.is_dir():
        return None
    folders = [origin, origin / SOURCE_FOLDER]
    folders += [origin.parents[1] / SOURCE_FOLDER] if origin.parent.name == "checkpoints" else []
    return next((folder for folder in folders if (folder / CONFIG).is_file()), None)


def keep_source_files(origin: Path, target: Path) -> None:
    """Copy the files that came in with the weights at `origin` into `target`, once; one rank calls it."""
    source, folder = source_folder(origin), target / SOURCE_FOLDER
    if source is None or folder.exists():
        return
    draft = target / f".{SOURCE_FOLDER}-{os.getpid()}"
    draft.mkdir()
    try:
        for name, content in read_source_files(source).items():
            (draft / name).write_bytes(content)
        draft.rename(folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def keep_start_files(start_from: str | None, run_dir: Path) -> None:
    """Copy the files of `checkpoint.start_from` into a run directory; one rank calls it."""
    if start_from is not None:
        keep_source_files(locate_weights(start_from, where="checkpoint.start_from"), run_dir)


def read_source_files(folder: Path) -> dict[str, bytes]:
    """Name -> content of the files that are kept; no code and no weights are among them."""
    return {name: _read(folder / name) for name in _KEPT if (folder / name).is_file()}


def source_config(folder: Path | None) -> dict[str, Any] | None:
    """The config.json of the folder; None where it cannot be read as an object."""
    try:
        found = json.loads(_read(folder / CONFIG)) if folder is not None else None
    except (OSError, ValueError, RecursionError, MeshwrightError):
        return None
    return found if isinstance(found, dict) else None


def _read(path: Path) -> bytes:
    size = path.stat().st_size
    if size > _MAX_FILE_BYTES:
        raise CheckpointError(
            f"{path.name} has {size} bytes, and at most {_MAX_FILE_BYTES} are expected",
            where=str(path),
            hint="is this a Hugging Face folder?",
        )
    return path.read_bytes()
