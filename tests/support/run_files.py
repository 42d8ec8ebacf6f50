"""Run files: texts that tests of the spec change, and a small one that the command line trains."""

from pathlib import Path
from typing import Any

import yaml

from meshwright.cli.main import run as run_command

DENSE = """\
name: tiny
model:
  vocab_size: 512
  num_layers: 8
  width: 64
  max_positions: 256
  attention: {num_heads: 8, num_kv_heads: 4, head_width: 8}
  mlp: {width: 128}
  rope: {theta: 10000}
schedule:
  num_steps: 100
data:
  synthetic: {}
  sequence_length: 128
  batch_sequences: 16
"""

MOE = DENSE.replace(
    "  rope:",
    "  moe: {num_experts: 8, top_k: 2, width: 96, shared_width: 64, first_dense_layers: 1}\n  rope:",
)

LATENT = DENSE.replace(
    "{num_heads: 8, num_kv_heads: 4, head_width: 8}",
    "{num_heads: 8, num_kv_heads: 8, head_width: 12,\n"
    "    latent: {kv_rank: 16, nope_width: 8, rope_width: 4, value_width: 8}}",
)

VALID = {"dense": DENSE, "moe": MOE, "latent": LATENT}

_DENSE: dict[str, Any] = yaml.safe_load(DENSE)
TRAINABLE: dict[str, Any] = _DENSE | {
    "device": "cpu",
    "model": _DENSE["model"] | {"num_layers": 2},
    "optim": {"lr": 1e-2, "ema_decay": 0.5},
    "schedule": {"num_steps": 4},
    "data": {"synthetic": {"num_documents": 4}, "sequence_length": 32, "batch_sequences": 4},
}
"""The dense run, so short that one process trains it in a second."""


def write_run_file(path: Path, **changes: object) -> str:
    """Write the trainable run with some top-level keys replaced; returns the file's name."""
    path.write_text(yaml.safe_dump({**TRAINABLE, **changes}))
    return str(path)


def train_run_file(folder: Path, *overrides: str, name: str = "run") -> Path:
    """Train the trainable run in this process; returns its run directory."""
    file = write_run_file(folder / f"{name}.yaml")
    directory = folder / name
    assert run_command(["train", file, *overrides, "--dir", str(directory)]) == 0
    return directory
