"""JSON files that may be damaged or hostile: bounded in size and depth, one clear error."""

from pathlib import Path
from typing import Any

from meshwright.errors import CheckpointError
from meshwright.files import read_json_file


def read_json(path: Path, *, max_bytes: int) -> dict[str, Any]:
    """The object in a JSON file. Refuses what is no regular file, too large, too deep, or no object."""
    hint = "use an older checkpoint"
    try:
        found = read_json_file(path, max_bytes=max_bytes)
        if not isinstance(found, dict):
            raise ValueError("it holds no JSON object")
        return found
    except OSError as error:
        raise CheckpointError(
            f"{path.name} cannot be read: {error.strerror}", where=str(path), hint=hint
        ) from None
    except ValueError as error:  # of json or of unicode
        raise CheckpointError(f"{path.name} is damaged: {error}", where=str(path), hint=hint) from None
