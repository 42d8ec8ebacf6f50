"""Weights of Megatron core's plain rank files (`--ckpt-format torch`), joined over tp and pp ranks.

    latest_checkpointed_iteration.txt
    iter_0000100/mp_rank_00/model_optim_rng.pt        one file for each tp rank
    iter_0000100/mp_rank_00_001/model_optim_rng.pt    one for each tp and pp rank

Files are opened with `weights_only=True`. They also hold arguments and states of a run, of classes that are
not installed here: these become empty objects, and no code of theirs is executed.
"""

import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.errors import CheckpointError

_LATEST = "latest_checkpointed_iteration.txt"
_RANK_FOLDER = re.compile(r"mp_rank_(\d+)(?:_(\d+))?(?:_(\d+))?")
_FILE = "model_optim_rng.pt"
_MODEL_KEY = re.compile(r"model(\d*)")
_LAYER = re.compile(r"(.*decoder\.layers\.)(\d+)(\..+)")
_ROWS = re.compile(r"(word_embeddings\.weight|output_layer\.weight|linear_qkv\.(weight|bias))$")
_COLUMNS = re.compile(r"(linear_proj|linear_fc2)\.weight$")
_GATED = re.compile(r"linear_fc1\.(weight|bias)$")
_HINT = "dense GPT models of Megatron core with tp and pp are read; convert others with Megatron's own tools"


class _Empty:
    """Stands for an object of a class that is not installed here; what is said of it is dropped."""

    def __new__(cls, *_: Any, **__: Any) -> "_Empty":
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def rank_files_folder(path: Path) -> Path | None:
    """The folder with the rank files at a path: itself or its newest iteration; None where it has none."""
    candidates = [path]
    if (path / _LATEST).is_file():
        text = (path / _LATEST).read_text()[:100].strip()
        candidates.append(path / (f"iter_{int(text):07d}" if text.isdecimal() else "release"))
    return next((folder for folder in candidates if any(folder.glob(f"mp_rank_*/{_FILE}"))), None)


class MegatronRankTensors(Mapping[str, Tensor]):
    """The tensors of all ranks under the names of an unsharded model; joined when they are accessed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._parts: dict[str, list[Tensor]] = {}
        """The memory-mapped parts of the tp ranks, by name."""
        stages = _stages(folder)
        contents = [[_model_parts(path) for path in stage] for stage in stages]
        num_chunks = {len(chunks) for stage in contents for chunks in stage}
        if len(num_chunks) != 1:
            raise _refused(f"its files have {sorted(num_chunks)} model chunks", folder)
        first_layer = 0
        for chunk in range(
            num_chunks.pop()
        ):  # virtual pipeline stages: the chunks of a stage are not adjacent
            for stage in contents:
                first_layer += self._add([ranks[chunk] for ranks in stage], first_layer)

    def __getitem__(self, name: str) -> Tensor:
        parts = self._parts[name]
        if len(parts) == 1:
            return parts[0]
        if _ROWS.search(name):
            return torch.cat(parts)
        if _COLUMNS.search(name):
            return torch.cat(parts, dim=1)
        if _GATED.search(name):  # every rank has its part of the gate, then its part of the up projection
            halves = [part.chunk(2) for part in parts]
            return torch.cat([gate for gate, _ in halves] + [up for _, up in halves])
        if not all(torch.equal(part, parts[0]) for part in parts[1:]):
            raise _refused(
                f"{name} differs between tp ranks and it is not known how it is sharded", self._folder
            )
        return parts[0]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def _add(self, ranks: Sequence[Mapping[str, Tensor]], first_layer: int) -> int:
        """Add the tensors of a stage, whose layers are numbered from 0; returns the number of its layers."""
        names = set(ranks[0])
        if any(set(rank) != names for rank in ranks):
            raise _refused("the files of tp ranks have different tensors", self._folder)
        layers = {int(found[2]) for name in names if (found := _LAYER.fullmatch(name))}
        for name in ranks[0]:
            found = _LAYER.fullmatch(name)
            unsharded = f"{found[1]}{int(found[2]) + first_layer}{found[3]}" if found else name
            # The last stage has the embedding once more where the head is tied to it.
            self._parts.setdefault(unsharded, [rank[name] for rank in ranks])
        return len(layers)


def _stages(folder: Path) -> list[list[Path]]:
    """The files of each pipeline stage, by tp rank."""
    found: dict[tuple[int, int], Path] = {}
    for path in folder.glob(f"mp_rank_*/{_FILE}"):
        match = _RANK_FOLDER.fullmatch(path.parent.name)
        if match is None or match[3] is not None:
            raise _refused(f"{path.parent.name} is not a folder of a tp and pp rank", folder)
        found[int(match[2] or 0), int(match[1])] = path
    num_stages, num_tp = (1 + max(key[axis] for key in found) for axis in (0, 1))
    missing = [key for key in ((p, t) for p in range(num_stages) for t in range(num_tp)) if key not in found]
    if missing:
        stage, rank = missing[0]
        raise _refused(f"the file of tp rank {rank} and pp rank {stage} is missing", folder)
    return [[found[stage, rank] for rank in range(num_tp)] for stage in range(num_stages)]


def _model_parts(path: Path) -> list[dict[str, Tensor]]:
    """The tensors of each model chunk of a rank file."""
    try:
        unknown = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        stand_ins: list[Any] = [(type("Empty", (_Empty,), {}), name) for name in unknown]
        with torch.serialization.safe_globals(stand_ins):
            content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        keys = [key for key in content if isinstance(key, str) and _MODEL_KEY.fullmatch(key)]
        chunks = [content[key] for key in sorted(keys, key=lambda key: int(key[5:] or 0))]
        found = [{k: v for k, v in chunk.items() if isinstance(v, Tensor)} for chunk in chunks]
    except pickle.UnpicklingError:
        raise _refused("the file has more in it than tensors and plain values", path) from None
    except (OSError, RuntimeError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise _refused(f"the file cannot be read as tensors: {str(error).splitlines()[0]}", path) from None
    except (AttributeError, TypeError, KeyError) as error:
        raise _refused(f"the file is not one of Megatron: {error}", path) from None
    if not found:
        raise _refused("the file has no `model`", path)
    return found


def _refused(fact: str, where: Path) -> CheckpointError:
    return CheckpointError(fact, where=str(where), hint=_HINT)
