"""Writes small tar shards for tests."""

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path


def write_tar(path: Path, files: Mapping[str, bytes], *, kind: int = tarfile.USTAR_FORMAT) -> Path:
    """A tar with these members, in order."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=kind) as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def write_shards(folder: Path, *, num_shards: int = 3, num_samples: int = 4) -> Path:
    """Shards of samples with the fields `bin` and `txt`; sample n has the key `n` with eight digits."""
    for shard in range(num_shards):
        files: dict[str, bytes] = {}
        for number in range(shard * num_samples, (shard + 1) * num_samples):
            files[f"{number:08d}.bin"] = bytes([number % 256]) * (100 + 37 * number)
            files[f"{number:08d}.txt"] = f"caption {number}".encode()
        write_tar(folder / f"shard-{shard:04d}.tar", files)
    return folder
