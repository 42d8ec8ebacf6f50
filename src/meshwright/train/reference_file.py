"""Reference log-probs on disk: a table with two sums for each pair, and the facts that they depend on.

A run keeps those of its start in its directory. `meshwright data logprobs` stores them with the dataset.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.adapters.peft_config import CONFIG_FILE
from meshwright.adapters.peft_folder import is_peft_folder
from meshwright.checkpoint.adapters import base_digest
from meshwright.checkpoint.locate import locate_weights
from meshwright.data.sources import TokenSource
from meshwright.data.stream import tokenizer_hash
from meshwright.errors import CheckpointError, DataError
from meshwright.files import read_json_file
from meshwright.spec import RunSpec

REFERENCE_FILE, FACTS_FILE = "reference.npy", "reference.json"
STORED_FILE, STORED_FACTS = "reference_logprobs.npy", "reference_logprobs.json"
"""Beside the tokens of a dataset."""
_MAX_FACTS_BYTES = 2**20
Table = NDArray[np.float64]
Facts = Mapping[str, object]
TITLES = {
    "dataset": "another dataset",
    "pairs": "another number of pairs",
    "tokenizer": "another tokenizer",
    "model": "another model",
    "weights": "other weights",
    "formats": "other number formats",
}


def dataset_facts(source: TokenSource, num_pairs: int) -> dict[str, object]:
    """What a run compares when it reads its own reference again."""
    return {"dataset": source.fingerprint, "pairs": num_pairs}


def stored_facts(run: RunSpec, source: TokenSource, num_pairs: int) -> dict[str, object]:
    """What stored log-probs depend on: dataset, tokenizer, model, its weights at the start, and formats."""
    model = hashlib.sha256(run.model.model_dump_json().encode()).hexdigest()[:32]
    base = "" if run.adapter is None else f", base {run.adapter.base}"
    fp8 = "" if run.precision.fp8 is None else ", fp8"
    return {
        **dataset_facts(source, num_pairs),
        "tokenizer": tokenizer_hash(source),
        "model": model,
        "weights": _weights_digest(run),
        "formats": f"{run.precision.compute}{base}{fp8}",
    }


def _weights_digest(run: RunSpec) -> str:
    """A digest of the weights at the start of a run, adapters that it starts from included."""
    start = run.checkpoint.start_from
    if start is None:
        return f"random weights of seed {run.seed}"
    digest = base_digest(locate_weights(start, where="checkpoint.start_from"))
    adapters = None if run.adapter is None else run.adapter.start_from
    return digest if adapters is None else f"{digest} {_adapters_digest(Path(adapters).expanduser())}"


def _adapters_digest(folder: Path) -> str:
    if not is_peft_folder(folder):
        return base_digest(locate_weights(folder, where="adapter.start_from"))
    files = [folder / CONFIG_FILE, *sorted(folder.glob("*.safetensors"))]  # the config has the scale
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:32]


def write_table(folder: Path, names: tuple[str, str], table: Table, facts: Facts) -> None:
    """Write table and facts; each file appears when it is complete, the facts last.

    Facts of an earlier table go before it does: a kill in between must not leave them beside the new one.
    """
    drafts = [folder / f".{name}" for name in names]
    for draft, content in zip(drafts, (table, facts), strict=True):
        with draft.open("wb") as file:
            if isinstance(content, np.ndarray):
                np.save(file, content)
            else:
                file.write((json.dumps(content) + "\n").encode())
            file.flush()
            os.fsync(file.fileno())
    (folder / names[1]).unlink(missing_ok=True)
    for draft, name in zip(drafts, names, strict=True):
        draft.replace(folder / name)


def read_run_table(run_dir: Path, facts: Facts) -> Table:
    """The reference that a run keeps in its directory."""
    path, hint = run_dir / REFERENCE_FILE, "put the file back, or start over in another directory (--dir)"
    try:
        found, table = read_table(run_dir, (REFERENCE_FILE, FACTS_FILE))
    except FileNotFoundError as error:
        fact = (
            "this run has no reference log-probs: they are lost, or it began with a loss "
            "that has no reference"
        )
        raise CheckpointError(fact, where=str(path), hint=hint) from error
    except (OSError, ValueError) as error:
        fact = f"the reference log-probs of this run cannot be read: {error}"
        raise CheckpointError(fact, where=str(path), hint=hint) from error
    if found != facts or table.shape != (facts["pairs"], 2):
        raise CheckpointError("the reference log-probs are of another dataset", where=str(path), hint=hint)
    return np.array(table)


def read_table(folder: Path, names: tuple[str, str]) -> tuple[dict[str, Any], Table]:
    """Facts and memory-mapped table of two files; OSError or ValueError where they are absent or damaged."""
    facts = read_json_file(folder / names[1], max_bytes=_MAX_FACTS_BYTES)
    if not isinstance(facts, dict):
        raise ValueError(f"{names[1]} is no mapping")
    return facts, np.lib.format.open_memmap(folder / names[0], mode="r")


def read_stored(folder: Path, facts: Facts) -> Table:
    """The log-probs stored with a dataset; DataError where they are absent, or of something else."""
    path = folder / STORED_FILE
    found = stored_difference(folder, facts)
    if found is not None:
        hint = "compute them with `meshwright data logprobs RUN.yaml`, or set preference.reference=start"
        raise DataError(found, where=str(path), hint=hint)
    return np.load(path, allow_pickle=False)


def stored_difference(folder: Path, facts: Facts) -> str | None:
    """Why the log-probs stored with a dataset cannot be used; None where they can."""
    try:
        found, table = read_table(folder, (STORED_FILE, STORED_FACTS))
    except FileNotFoundError:
        return "the dataset has no reference log-probs"
    except (OSError, ValueError) as error:
        return f"the reference log-probs cannot be read: {error}"
    for name, title in TITLES.items():
        if found.get(name) != facts[name]:
            return f"the reference log-probs are of {title}: {found.get(name)}, and the run has {facts[name]}"
    is_whole = table.shape == (facts["pairs"], 2)
    return None if is_whole else f"the reference log-probs have shape {table.shape}"
