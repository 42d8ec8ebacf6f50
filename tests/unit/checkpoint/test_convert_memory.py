"""Converting never has the model in host memory: one file at a time, out of and into sharded checkpoints."""

import gc
import threading
from collections.abc import Callable
from pathlib import Path

import torch
from tests.support.runs import MODELS

from meshwright.checkpoint.convert import convert_weights
from meshwright.checkpoint.save import save_in_groups
from meshwright.checkpoint.weights import open_weights
from meshwright.spec import MlpSpec
from meshwright.spec.huggingface.names import state_shapes

WIDTH = 512
MODEL = MODELS["gqa"].with_(num_layers=20, width=WIDTH, mlp=MlpSpec(width=4 * WIDTH))
MB = 10**6
SHARD_BYTES = 12 * MB


def peak_bytes(action: Callable[[], None]) -> int:
    """The most memory that this process had during an action, beyond what it had before.

    Pages of mapped files are not counted: they are the page cache, which the kernel takes back.
    """
    gc.collect()
    before, found, ended = anonymous_bytes(), [0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.002):
            found.append(anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        action()
    finally:
        ended.set()
        watcher.join()
    return max(found) - before


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


def test_one_file_is_in_memory_at_a_time(tmp_path: Path) -> None:
    shapes = state_shapes(MODEL)
    model_bytes = sum(4 * torch.Size(shape).numel() for shape in shapes.values())
    assert model_bytes > 250 * MB
    groups = ({f"model.{name}": torch.full(shape, 0.5)} for name, shape in shapes.items())
    facts = {"model": MODEL.model_dump(mode="json")}
    saved = save_in_groups(tmp_path / "checkpoints", step=1, groups=groups, facts=facts)

    def there() -> None:
        convert_weights(open_weights(saved), tmp_path / "hf", "huggingface", max_shard_bytes=SHARD_BYTES)

    def back() -> None:
        convert_weights(
            open_weights(tmp_path / "hf"), tmp_path / "back", "checkpoint", max_shard_bytes=SHARD_BYTES
        )

    there_peak, back_peak = peak_bytes(there), peak_bytes(back)
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 20
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 20
    found = f"out {there_peak / MB:.0f} MB, in {back_peak / MB:.0f} MB, model {model_bytes / MB:.0f} MB"
    print(found)
    assert max(there_peak, back_peak) < 0.4 * model_bytes, found
    again = open_weights(tmp_path / "back").tensors
    assert all(bool((again[name] == 0.5).all()) for name in shapes)
