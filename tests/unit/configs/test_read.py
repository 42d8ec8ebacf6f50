"""Config files of other frameworks read into runs: every key has an entry and the right meaning."""

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.configs.accelerate import read_accelerate
from meshwright.configs.deepspeed import DEEPSPEED, read_deepspeed
from meshwright.configs.megatron import parse_arguments, read_megatron
from meshwright.configs.read import base_run, imported_run, read_config, settings_tree
from meshwright.configs.rules import Format, Outcome, choice, no_setting, only, same, translate
from meshwright.configs.torchtitan import read_torchtitan
from meshwright.errors import SpecError, SpecErrors
from meshwright.spec import RunSpec
from meshwright.spec.yaml_text import walk

FILES = Path(__file__).parents[2] / "data/configs"
BASE = "llama-3.1-8b-8gpu"


def run_of(name: str, *overrides: str, onto: str | None = BASE, **options: Any) -> RunSpec:
    imported = read_config(FILES / name, base=base_run(onto), **options)
    return imported_run(imported, list(overrides), onto=onto, place=name)


def statuses(entries: Any) -> dict[str, str]:
    return {entry.key: entry.status for entry in entries}


@pytest.mark.parametrize(
    "file", sorted(FILES.glob("*.yaml")) + sorted(FILES.glob("*.json")), ids=lambda f: f.name
)
def test_every_key_of_a_file_has_an_entry(file: Path):
    import yaml

    tree = yaml.safe_load(file.read_text())
    keys = {".".join(map(str, path)) for path, _ in walk(tree)}
    entries = read_config(file, base=base_run(BASE)).entries
    assert keys <= {entry.key for entry in entries}
    assert all(entry.reason for entry in entries if entry.status != "mapped")


@pytest.mark.parametrize(
    ("file", "axes"),
    [
        ("fsdp_leonardo.yaml", {"zero": 3, "dp_shard": 8, "dp_replicate": 1}),
        ("fsdp_hybrid.yaml", {"zero": 3, "dp_shard": 4, "dp_replicate": 2}),
        ("fsdp2.yaml", {"zero": 3, "dp_shard": 4, "dp_replicate": 1}),
        (
            "fsdp2_parallelism.yaml",
            {"zero": 2, "dp_shard": 2, "dp_replicate": 2, "tp": 2, "cp": 2, "cp_kind": "ring"},
        ),
        ("multi_gpu.yaml", {"zero": 0, "dp_shard": 1, "dp_replicate": 4}),
        ("deepspeed_zero2.yaml", {"zero": 2, "dp_shard": 8, "dp_replicate": 1}),
        ("deepspeed_file.yaml", {"zero": 3, "dp_shard": 8, "dp_replicate": 1}),
        ("zero3_fp16.json", {"zero": 3, "dp_shard": 8, "dp_replicate": 1}),
        ("zero2_auto.json", {"zero": 2, "dp_shard": 8, "dp_replicate": 1}),
    ],
)
def test_the_mesh_of_a_file(file: str, axes: dict[str, Any]):
    parallel = run_of(file).parallel
    assert {axis: getattr(parallel, axis) for axis in axes} == axes


def test_offload_recompute_and_precision_of_fsdp():
    run = run_of("fsdp2.yaml")
    assert run.memory.offload == ("optimizer", "parameters")
    assert run.memory.recompute == "full"
    assert run.precision.compute == "bf16"


def test_deepspeed_loss_scale_optimizer_schedule_and_batch():
    run = run_of("zero3_fp16.json")
    scale = run.precision.loss_scale
    assert scale is not None
    assert (scale.initial, scale.growth_steps, scale.hysteresis, scale.minimum) == (65536.0, 1000, 2, 1.0)
    assert (run.optim.lr, run.optim.beta2, run.optim.weight_decay) == (3e-5, 0.999, 0.01)
    assert (run.schedule.kind, run.schedule.num_steps, run.schedule.warmup_steps) == ("linear", 2000, 100)
    assert (run.data.batch_sequences, run.data.microbatch_sequences, run.accumulation) == (64, 2, 4)


def test_the_mesh_follows_from_the_three_batch_sizes():
    imported = read_config(FILES / "zero3_fp16.json")
    assert imported.settings["parallel.dp_shard"] == 8


def test_accumulation_of_accelerate_gives_the_batch():
    run = run_of("deepspeed_zero2.yaml")
    assert run.data.batch_sequences == 8 * 4 * run.data.microbatch_sequences
    assert run.memory.offload == ("optimizer",)


def test_unsupported_parts_are_refused_with_their_reasons():
    entries = read_config(FILES / "refused.json", base=base_run(BASE)).entries
    refused = {entry.key: entry.reason for entry in entries if entry.status == "refused"}
    assert "1-bit" in refused["optimizer.type"]
    assert "zero_optimization.stage" in refused["zero_optimisation.stage"]
    assert "not quantized" in refused["zero_optimization.zero_quantized_weights"]
    assert "NVMe" in refused["zero_optimization.offload_param.device"]
    assert all(entry.is_blocking for entry in entries if entry.status == "refused")


def test_a_section_that_is_off_has_no_effect():
    found = read_deepspeed({"fp16": {"enabled": False, "loss_scale": 128}, "wandb": {"enabled": False}})
    assert statuses(found.entries) == {
        "fp16.enabled": "mapped",
        "fp16.loss_scale": "mapped",
        "wandb.enabled": "mapped",
    }
    assert found.settings == {}


def test_a_wandb_section_becomes_the_tracker_of_the_run():
    found = read_deepspeed({"wandb": {"enabled": True, "project": "x", "team": "t", "group": "g"}})
    assert settings_tree(found.settings) == {"observe": {"wandb": {"project": "x", "entity": "t"}}}
    assert statuses(found.entries)["wandb.group"] == "changed"


def test_two_keys_that_contradict_each_other_are_refused():
    found = read_deepspeed(
        {"optimizer": {"params": {"lr": 1e-4}}, "scheduler": {"params": {"warmup_max_lr": 2e-4}}}
    )
    assert statuses(found.entries)["scheduler.params.warmup_max_lr"] == "refused"
    assert found.settings["optim.lr"] == 1e-4


@pytest.mark.parametrize(
    ("tree", "settings"),
    [
        ({"zero_optimization": {"mics_shard_size": 4, "stage": 3}}, {"parallel.zero": 3}),
        ({"sequence_parallel_size": 2}, {"parallel.cp": 2, "parallel.cp_kind": "ulysses"}),
        ({"tensor_parallel": {"autotp_size": 2}}, {"parallel.tp": 2}),
        (
            {"data_types": {"grad_accum_dtype": "bf16"}},
            {"precision.gradients": "bf16", "precision.weights": "bf16_exact"},
        ),
        ({"gradient_clipping": 0}, {"optim.max_grad_norm": None}),
    ],
)
def test_keys_of_deepspeed(tree: dict[str, Any], settings: dict[str, Any]):
    found = read_deepspeed(tree)
    assert found.settings == settings
    assert set(statuses(found.entries).values()) == {"mapped"}


def test_mics_shards_are_replicated_across():
    imported = read_config_of({"zero_optimization": {"mics_shard_size": 4, "stage": 3}}, num_ranks=8)
    assert imported.settings["parallel.dp_shard"] == 4
    assert imported.settings["parallel.dp_replicate"] == 2


def read_config_of(tree: dict[str, Any], **options: Any) -> Any:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "ds.json"
        file.write_text(json.dumps(tree))
        return read_config(file, **options)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"fsdp_sharding_strategy": 2}, {"parallel.zero": 2}),
        ({"sharding_strategy": "SHARD_GRAD_OP"}, {"parallel.zero": 2}),
        ({"fsdp_reshard_after_forward": False}, {"parallel.zero": 2}),
        ({"reshard_after_forward": "FULL_SHARD"}, {"parallel.zero": 3}),
    ],
)
def test_spellings_of_fsdp_keys(config: dict[str, Any], expected: dict[str, Any]):
    assert read_accelerate({"fsdp_config": config}, Path()).settings == expected


def test_fp8_of_accelerate():
    tree = {"mixed_precision": "fp8", "fp8_config": {"backend": "TE", "amax_history_length": 32}}
    found = read_accelerate(tree, Path())
    assert found.settings["precision.fp8.recipe"] == "delayed"
    assert found.settings["precision.fp8.history_steps"] == 32
    refused = read_accelerate({"fp8_config": {"backend": "MSAMP"}}, Path()).entries
    assert statuses(refused) == {"fp8_config.backend": "refused"}


def test_torchtitan():
    run = run_of("llama3_8b.toml", "data.path=data/train", onto=None, num_ranks=8)
    assert (run.parallel.tp, run.parallel.dp_shard, run.parallel.zero) == (2, 4, 3)
    assert run.model.family == "llama-3.1-8b"
    assert (run.data.batch_sequences, run.data.sequence_length) == (4, 8192)
    assert (run.schedule.kind, run.schedule.min_lr_ratio) == ("linear", 0.0)
    assert (run.memory.recompute, run.compile) == ("selective", True)


def test_torchtitan_pipeline_and_every_second_layer():
    found = read_torchtitan(
        {
            "parallelism": {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "ZBVZeroBubble"},
            "training": {"local_batch_size": 8},
            "activation_checkpoint": {"mode": "selective", "selective_ac_option": "2"},
        }
    )
    assert found.settings["parallel.schedule"] == "zbv"
    assert found.settings["data.microbatch_sequences"] == 1
    assert found.facts["accumulation"] == 8
    assert (found.settings["memory.recompute"], found.settings["memory.recompute_every"]) == ("full", 2)


def test_megatron():
    run = run_of("megatron_gpt.sh", "data.path=data/train", onto=None)
    parallel = run.parallel
    assert (parallel.tp, parallel.pp, parallel.dp_shard, parallel.zero) == (4, 2, 16, 1)
    assert parallel.num_ranks == 128
    assert (run.model.num_layers, run.model.width, run.model.mlp.width) == (36, 4096, 16384)
    assert run.model.tied_head
    assert (run.schedule.warmup_steps, run.schedule.min_lr_ratio) == (50, pytest.approx(0.1))
    assert run.precision.loss_scale is not None
    assert run.precision.loss_scale.hysteresis == 2


def test_megatron_interleaved_stages():
    found = read_megatron(
        parse_arguments(
            "--num-layers 48 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 6",
            place="x",
        )
    )
    assert found.settings["parallel.virtual_stages"] == 2
    assert found.settings["parallel.schedule"] == "interleaved_1f1b"


def test_megatron_shell_variables_are_refused():
    found = read_megatron(parse_arguments("--num-layers $LAYERS --bf16", place="x"))
    assert statuses(found.entries) == {"num-layers": "refused", "bf16": "mapped"}
    assert "shell variable" in found.entries[0].reason


def test_what_a_file_does_not_say_is_named():
    with pytest.raises(SpecErrors) as caught:
        run_of("fsdp2.yaml", onto=None)
    assert {each.fact for each in caught.value.violations} >= {"model is missing", "data is missing"}
    assert all("--onto RUN" in each.hint for each in caught.value.violations)


@pytest.mark.parametrize(
    ("name", "text", "fact"),
    [
        ("x.json", "{", "not JSON"),
        ("x.yaml", "a: [", "not YAML"),
        ("x.toml", "a = ", "not TOML"),
        ("x.sh", "echo hello", "no --arguments"),
        ("x.sh", "--a 'b", "not a list of arguments"),
        ("x.yaml", "[1, 2]", "not a mapping"),
        ("x.cfg", "a", "not known by its ending"),
        ("x.json", json.dumps({"zero_optimization": {"stage": 7}}), None),
    ],
)
def test_wrong_files(tmp_path: Path, name: str, text: str, fact: str | None):
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(SpecError) as caught:
        imported_run(read_config(file, base=base_run(BASE)), [], onto=BASE, place=name)
    assert fact is None or fact in caught.value.fact


def test_a_missing_deepspeed_file(tmp_path: Path):
    file = tmp_path / "a.yaml"
    file.write_text("distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: none.json}\n")
    with pytest.raises(SpecError, match="DeepSpeed file cannot be read"):
        read_config(file)


def test_ranks_that_the_axes_do_not_divide():
    with pytest.raises(SpecError, match="6 ranks cannot be divided by tp x pp x cp = 4"):
        read_config(FILES / "fsdp2_parallelism.yaml", num_ranks=6)


def test_rules():
    table = Format(
        "test",
        {
            "a": same("x.a", int),
            "b": choice({"One": {"x.b": 1}}),
            "c": only((True,), "always on", status="changed"),
            "d.*": no_setting("nothing"),
        },
    )
    tree = {"a": "3", "b": "one", "c": False, "d": {"e": 1}, "f": 1, "g": "auto"}
    found = translate(tree, table)
    assert found.settings == {"x.a": 3, "x.b": 1}
    assert statuses(found.entries) == {
        "a": "mapped",
        "b": "mapped",
        "c": "changed",
        "d.e": "changed",
        "f": "refused",
        "g": "changed",
    }
    assert translate({"a": "no number"}, table).entries[0].status == "refused"
    assert isinstance(table.rules["b"]("two"), Outcome)


def test_no_rule_of_deepspeed_fails_on_odd_values():
    for value in (None, True, [], {}, "text", -1, 10**30):
        for key in DEEPSPEED.rules:
            *parents, name = key.replace("*", "any").split(".")
            tree: Any = {name: value}
            for parent in reversed(parents):
                tree = {parent: tree}
            assert translate(tree, DEEPSPEED).entries
