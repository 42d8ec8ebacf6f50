"""Runs as config files of other frameworks, and back."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshwright.configs.export import Exported
from meshwright.configs.export_accelerate import export_accelerate
from meshwright.configs.export_deepspeed import export_deepspeed
from meshwright.configs.read import imported_run, read_config
from meshwright.spec import RunSpec
from meshwright.spec.text import load_run
from meshwright.spec.yaml_text import dump_yaml

BASE = "llama-3.1-8b-8gpu"
LAUNCHERS = Path(sys.prefix) / "launchers"
ACCELERATE_RUNS = {
    "fsdp": ["memory.recompute=full"],
    "zero 2": ["parallel.zero=2", "memory.recompute=none"],
    "hybrid": ["parallel.dp_replicate=2", "parallel.dp_shard=4", "memory.recompute=full"],
    "tp and cp": [
        *("parallel.dp_shard=2", "parallel.tp=2", "parallel.cp=2", "parallel.cp_kind=ring"),
        "memory.recompute=none",
    ],
    "offload": ["memory.offload=optimizer,parameters", "memory.recompute=full"],
    "ddp": ["parallel.zero=0", "parallel.dp_shard=1", "parallel.dp_replicate=8", "memory.recompute=none"],
    "fp16": ["precision.compute=fp16", "precision.loss_scale={}", "memory.recompute=none"],
    "one device in fp32": [
        *("parallel.dp_shard=1", "parallel.zero=0", "precision.compute=fp32", "memory.recompute=none")
    ],
    "fp32 on the CPU": ["precision.compute=fp32", "device=cpu", "compile=false", "memory.recompute=none"],
}
DEEPSPEED_RUNS = {
    "zero 3": [],
    "zero 1": ["parallel.zero=1"],
    "zero 2 with offload": ["parallel.zero=2", "memory.offload=optimizer"],
    "zero 3 on the host": ["memory.offload=optimizer,parameters"],
    "linear": ["schedule.kind=linear", "schedule.min_lr_ratio=0"],
    "constant": ["schedule.kind=constant", "schedule.min_lr_ratio=0.1"],
    "replicas of shards": ["parallel.dp_replicate=2", "parallel.dp_shard=4"],
    "ulysses": ["parallel.cp=2", "parallel.cp_kind=ulysses", "parallel.dp_shard=4"],
    "tp": ["parallel.tp=2", "parallel.dp_shard=4"],
    "fp16": [
        "precision.compute=fp16",
        "precision.loss_scale={initial: 1024, growth_steps: 100, hysteresis: 2, minimum: 1}",
    ],
    "lamb, no clipping": ["optim.kind=lamb", "optim.max_grad_norm=null"],
    "bf16 gradients": ["precision.gradients=bf16", "precision.weights=bf16_exact"],
}


def blocking(exported: Exported) -> list[str]:
    return [entry.key for entry in exported.entries if entry.is_blocking]


def back(file: Path, run: RunSpec, tmp_path: Path) -> RunSpec:
    """The run that the file gives on top of the base without its layout."""
    base = tmp_path / "base.yaml"
    neutral = [
        *("memory.recompute=none", "precision.compute=bf16", "device=auto", "compile=false"),
        *("optim.lr=1e-5", "schedule.kind=inverse_sqrt", "data.batch_sequences=8"),
    ]
    base.write_text(dump_yaml({"recipe": BASE}))
    base_spec = load_run(base, neutral)
    base.write_text(dump_yaml({**base_spec.model_dump(mode="json"), "parallel": {"dp_shard": 8, "zero": 3}}))
    imported = read_config(file, base=load_run(base))
    assert not [entry for entry in imported.entries if entry.status == "refused"]
    return imported_run(imported, [], onto=str(base), place=file.name)


@pytest.mark.parametrize("overrides", ACCELERATE_RUNS.values(), ids=ACCELERATE_RUNS)
def test_accelerate_round_trip(overrides: list[str], tmp_path: Path):
    run = load_run(BASE, overrides)
    exported = export_accelerate(run, num_nodes=min(2, run.parallel.num_ranks))
    assert blocking(exported) == []
    file = tmp_path / "a.yaml"
    file.write_text(dump_yaml(exported.document))
    again = back(file, run, tmp_path)
    assert again.parallel == run.parallel
    assert again.memory == run.memory
    assert again.precision == run.precision
    assert again.compile == run.compile
    assert (again.device == "cpu") == (run.device == "cpu")


@pytest.mark.parametrize("overrides", DEEPSPEED_RUNS.values(), ids=DEEPSPEED_RUNS)
def test_deepspeed_round_trip(overrides: list[str], tmp_path: Path):
    run = load_run(BASE, ["memory.recompute=none", *overrides])
    exported = export_deepspeed(run)
    assert blocking(exported) == []
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(exported.document))
    again = back(file, run, tmp_path)
    assert again.parallel == run.parallel
    assert again.memory.offload == run.memory.offload
    assert again.precision == run.precision
    assert again.optim == run.optim
    assert again.data == run.data
    assert again.schedule.warmup_steps == run.schedule.warmup_steps
    assert again.schedule.kind == run.schedule.kind


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["parallel.pp=2", "parallel.dp_shard=4", "compile=false"], "parallel.pp"),
        (["parallel.zero=1"], "parallel.zero"),
        (["precision.fp8=blockwise"], "precision.fp8.recipe"),
        (["memory.offload=activations"], "memory.offload"),
        (["parallel.cp=2", "parallel.cp_kind=ulysses", "parallel.dp_shard=4"], "parallel.cp_kind"),
    ],
)
def test_what_accelerate_cannot_say_blocks(overrides: list[str], key: str):
    exported = export_accelerate(load_run(BASE, overrides))
    assert key in blocking(exported)


def test_what_deepspeed_cannot_say_blocks():
    run = load_run(BASE, ["parallel.cp=2", "parallel.dp_shard=4", "precision.fp8=current"])
    assert set(blocking(export_deepspeed(run))) == {"parallel.cp", "precision.fp8.recipe"}


def test_every_value_of_the_run_that_is_set_has_an_entry():
    run = load_run(BASE, ["seed=7", "optim.ema_decay=0.99", "data.holdout_sequences=4"])
    keys = {entry.key for entry in export_accelerate(run).entries}
    assert {"seed", "optim.ema_decay", "data.holdout_sequences", "model", "checkpoint.every_steps"} <= keys


READ_ACCELERATE = """
import os, sys
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_multi_gpu_env
for path in sys.argv[1:]:
    config = load_config_from_file(path)
    args = launch_command_parser().parse_args(["--config_file", path, "train.py"])
    args, _, _ = _validate_launch_command(args)
    assert args.num_processes == config.num_processes
    assert config.distributed_type is not False and config.mixed_precision is not False, "`no` in YAML 1.1"
    if config.fsdp_config:
        assert args.use_fsdp
        os.environ.update(prepare_multi_gpu_env(args))
        plugin = FullyShardedDataParallelPlugin()
        print(plugin.fsdp_version, plugin.reshard_after_forward, bool(plugin.activation_checkpointing))
"""
READ_DEEPSPEED = """
import json, sys
from deepspeed.runtime.config import DeepSpeedConfig
import deepspeed.runtime.config as config
for path in sys.argv[1:]:
    tree = json.load(open(path))
    each = tree["train_micro_batch_size_per_gpu"] * tree["gradient_accumulation_steps"]
    ranks = tree["train_batch_size"] // each
    world = ranks * tree.get("sequence_parallel_size", 1)
    config.dist.get_rank, config.dist.get_world_size = lambda: 0, lambda *a, world=world: world
    found = DeepSpeedConfig(tree)
    assert found.train_batch_size == tree["train_batch_size"]
    assert found.zero_config.stage == tree.get("zero_optimization", {}).get("stage", 0), path
"""


def read_with(package: str, code: str, files: list[Path]) -> str:
    """Run code that reads files with the real package, which is installed apart."""
    if not (LAUNCHERS / package).exists():
        pytest.skip(f"NOT CHECKED: {package} is not installed in {LAUNCHERS} (`make env` installs it)")
    environment = {**os.environ, "PYTHONPATH": str(LAUNCHERS), "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-W", "ignore", "-c", code, *map(str, files)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_accelerate_itself_accepts_the_files(tmp_path: Path):
    files = [tmp_path / f"{name}.yaml" for name in ("fsdp", "zero 2", "tp and cp", "ddp")]
    for file in files:
        document = export_accelerate(load_run(BASE, ACCELERATE_RUNS[file.stem])).document
        file.write_text(dump_yaml(document))
    out = read_with("accelerate", READ_ACCELERATE, files)
    assert out.splitlines() == ["2 True True", "2 False False", "2 True False"]


def test_deepspeed_itself_accepts_the_files(tmp_path: Path):
    files: list[Path] = []
    for name, overrides in DEEPSPEED_RUNS.items():
        files.append(tmp_path / f"{name.replace(' ', '_')}.json")
        document: dict[str, Any] = export_deepspeed(
            load_run(BASE, ["memory.recompute=none", *overrides])
        ).document
        if "tensor_parallel" not in document:  # without ranks DeepSpeed cannot build its tp group
            files[-1].write_text(json.dumps(document))
        else:
            files.pop()
    read_with("deepspeed", READ_DEEPSPEED, files)
