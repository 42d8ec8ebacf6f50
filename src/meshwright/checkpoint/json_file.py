"""JSON files that may be damaged or hostile: bounded in size and depth, one clear error."""

import json
import os
import stat
from pathlib import Path
from typing import Any

from meshwright.errors import CheckpointError


def read_json(path: Path, *, max_bytes: int) -> dict[str, Any]:
    """The object in a JSON file. Refuses what is no regular file, too large, too deep, or no object."""
    hint = "use an older checkpoint"
    try:
        # O_NONBLOCK: a FIFO in the place of the file must not block.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as stream:
            status = os.fstat(stream.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ValueError("this is no regular file")
            if status.st_size > max_bytes:
                raise ValueError(f"it has {status.st_size} bytes, and at most {max_bytes} are expected")
            found = json.loads(stream.read())
        if not isinstance(found, dict):
            raise ValueError("it holds no JSON object")
        return found
    except OSError as error:
        raise CheckpointError(
            f"{path.name} cannot be read: {error.strerror}", where=str(path), hint=hint
        ) from None
    except RecursionError:
        raise CheckpointError(f"{path.name} is nested too deeply", where=str(path), hint=hint) from None
    except ValueError as error:  # of json or of unicode
        raise CheckpointError(f"{path.name} is damaged: {error}", where=str(path), hint=hint) from None
