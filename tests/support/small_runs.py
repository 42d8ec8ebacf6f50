"""A run that trains in a moment on one process, and run directories made with it."""

from pathlib import Path

import yaml

from meshwright.cli.main import run as run_command

SMALL: dict[str, object] = {
    "name": "small",
    "device": "cpu",
    "model": {
        "vocab_size": 257,
        "num_layers": 2,
        "width": 32,
        "max_positions": 64,
        "attention": {"num_heads": 4, "num_kv_heads": 2, "head_width": 8},
        "mlp": {"width": 48},
        "rope": {"theta": 10000},
    },
    "optim": {"lr": 1e-2, "ema_decay": 0.5},
    "schedule": {"num_steps": 4},
    "data": {"synthetic": {"num_documents": 4}, "sequence_length": 32, "batch_sequences": 4},
}


def write_run_file(path: Path, **changes: object) -> str:
    """The small run with changes, as a file; returns its name."""
    path.write_text(yaml.safe_dump({**SMALL, **changes}))
    return str(path)


def train_small(folder: Path, *overrides: str, name: str = "run") -> Path:
    """The directory of a small run that was trained just now, in this process."""
    file = write_run_file(folder / f"{name}.yaml")
    directory = folder / name
    assert run_command(["train", file, *overrides, "--dir", str(directory)]) == 0
    return directory
