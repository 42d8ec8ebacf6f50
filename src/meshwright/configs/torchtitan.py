"""torchtitan TOML (`job_config`): what each key means in a run."""

from dataclasses import replace
from typing import Any

from meshwright.configs.entries import Entry
from meshwright.configs.rules import (
    Format,
    Outcome,
    Rule,
    Translation,
    choice,
    fact,
    no_setting,
    off_or_changed,
    off_or_refuse,
    only,
    same,
    translate,
)

_FAMILIES = {
    ("llama3", "8b"): "llama-3.1-8b",
    ("llama3", "70b"): "llama-3.1-70b",
    ("llama3", "405b"): "llama-3.1-405b",
    ("deepseek_v3", "16b"): "deepseek-v2-lite",
    ("deepseek_v3", "671b"): "deepseek-v3",
    **{("qwen3", size): f"qwen3-{size}" for size in ("0.6b", "1.7b", "4b", "8b", "14b", "32b", "30b-a3b")},
}
_SCHEDULES = {
    "GPipe": {"parallel.schedule": "gpipe"},
    "1F1B": {"parallel.schedule": "1f1b"},
    "Interleaved1F1B": {"parallel.schedule": "interleaved_1f1b", "parallel.virtual_stages": 2},
    "LoopedBFS": {"parallel.schedule": "looped_bfs", "parallel.virtual_stages": 2},
    "InterleavedZeroBubble": {
        "parallel.schedule": "interleaved_zero_bubble",
        "parallel.virtual_stages": 2,
    },
    "ZBVZeroBubble": {"parallel.schedule": "zbv", "parallel.virtual_stages": 2},
    "DualPipeV": {"parallel.schedule": "dualpipev", "parallel.virtual_stages": 2},
}
_OFF = Outcome("mapped")
_OWN_STAGES = "stages have equal numbers of layers; parallel.virtual_stages sets how many per rank"


def _batch(value: Any) -> Outcome:
    if int(value) < 0:
        return Outcome("mapped", facts={"accumulation": 1}, reason="micro-batch x dp")
    return Outcome("mapped", {"data.batch_sequences": int(value)})


def _shard(value: Any) -> Outcome:
    if int(value) < 0:
        return Outcome("mapped", reason="all remaining ranks; name their number with --ranks")
    return Outcome("mapped", facts={"dp_shard": int(value)}, reason="parallel.dp_shard")


def _converters(value: Any) -> Outcome:
    names = value.split(",") if isinstance(value, str) else list(value)
    if not names:
        return _OFF
    recipes = {"float8": "current", "quantize.linear.float8": "current", "mx": "mxfp8"}
    if len(names) == 1 and names[0] in recipes:
        return Outcome("mapped", {"precision.fp8.recipe": recipes[names[0]]})
    return Outcome("refused", reason="mapped are only float8 and mx")


def _selective(value: Any) -> Outcome:
    if str(value) == "op":
        return Outcome("mapped", facts={"every": None})
    return Outcome("mapped", facts={"every": int(value)}, reason="full recompute of every k-th layer")


_MODEL: dict[str, Rule] = {
    "model.name": fact("name", str, reason="together with the flavor"),
    "model.flavor": fact("flavor", str, reason="together with the name"),
    "model.converters": _converters,
    **{
        f"model.{key}": no_setting("a packed dataset has its tokenizer (`data pack`)")
        for key in ("tokenizer_path", "hf_assets_path")
    },
    "model.print_after_conversion": off_or_changed("`meshwright show` draws the model"),
    "optimizer.name": choice({"AdamW": {"optim.kind": "adamw"}, "Muon": {"optim.kind": "muon"}}),
    "optimizer.implementation": no_setting("the fused optimizer is used where there is one"),
    "optimizer.early_step_in_backward": off_or_refuse("the update needs the norm of all gradients"),
    **{f"optimizer.{key}": same(f"optim.{key}", float) for key in ("lr", "beta1", "beta2", "eps")},
    "optimizer.weight_decay": same(
        "optim.weight_decay", float, reason="on matrices only; optim.weight_decay_on=all for all parameters"
    ),
    "lr_scheduler.warmup_steps": same("schedule.warmup_steps", int),
    "lr_scheduler.total_steps": off_or_changed("the schedule ends with schedule.num_steps"),
    "lr_scheduler.decay_ratio": fact("decay_ratio", float, reason="schedule.kind=wsd"),
    "lr_scheduler.decay_type": choice(
        {"linear": {"schedule.kind": "linear"}, "cosine": {"schedule.kind": "cosine"}}
    ),
    "lr_scheduler.lr_min": same("schedule.min_lr_ratio", float),
    "lr_scheduler.min_lr_factor": same("schedule.min_lr_ratio", float),
}
_TRAINING: dict[str, Rule] = {
    "training.local_batch_size": same("data.microbatch_sequences", int),
    "training.global_batch_size": _batch,
    "training.seq_len": same("data.sequence_length", int),
    "training.max_norm": same("optim.max_grad_norm", float),
    "training.steps": same("schedule.num_steps", int),
    "training.seed": same("seed", int),
    "training.deterministic": same("deterministic", bool),
    "training.compile": same("compile", bool),
    "training.dtype": only(("float32",), "set precision.weights=bf16_stochastic"),
    "training.mixed_precision_param": choice(
        {"bfloat16": {"precision.compute": "bf16"}, "float32": {"precision.compute": "fp32"}}
    ),
    "training.mixed_precision_reduce": choice(
        {
            "float32": {"precision.gradients": "fp32"},
            "bfloat16": {"precision.gradients": "bf16", "precision.weights": "bf16_exact"},
        }
    ),
    "training.enable_cpu_offload": choice(
        {False: {"memory.offload": []}, True: {"memory.offload": ["optimizer", "parameters"]}}
    ),
    "training.dataset": no_setting("name a packed dataset with data.path (`data pack`)"),
    "training.dataset_path": no_setting("name a packed dataset with data.path (`data pack`)"),
    "training.gc_freq": no_setting("garbage is collected between steps"),
    "training.gc_debug": off_or_changed("garbage is collected between steps"),
    "parallelism.data_parallel_replicate_degree": fact("dp_replicate", int, reason="parallel.dp_replicate"),
    "parallelism.data_parallel_shard_degree": _shard,
    "parallelism.fsdp_reshard_after_forward": choice(
        {
            "default": {"parallel.zero": 3},
            "always": {"parallel.zero": 3},
            "never": {"parallel.zero": 2},
        }
    ),
    "parallelism.tensor_parallel_degree": same("parallel.tp", int),
    "parallelism.pipeline_parallel_degree": same("parallel.pp", int),
    "parallelism.context_parallel_degree": same("parallel.cp", int),
    "parallelism.expert_parallel_degree": same("parallel.ep", int),
    "parallelism.expert_tensor_parallel_degree": same("parallel.etp", int),
    "parallelism.pipeline_parallel_schedule": choice(_SCHEDULES),
    "parallelism.pipeline_parallel_microbatch_size": fact(
        "microbatch", int, reason="data.microbatch_sequences with pp"
    ),
    "parallelism.context_parallel_rotate_method": choice(
        {"allgather": {"parallel.cp_kind": "gather"}, "alltoall": {"parallel.cp_kind": "ring"}}
    ),
    "parallelism.enable_async_tensor_parallel": off_or_changed("tp communication is not split into pieces"),
    "parallelism.disable_loss_parallel": off_or_changed("the loss is always computed on sharded logits"),
    "parallelism.enable_compiled_autograd": off_or_changed("compile=true compiles each block"),
    **{
        f"parallelism.pipeline_parallel_{key}": only(([], None, ""), _OWN_STAGES, status="changed")
        for key in ("split_points", "layers_per_stage", "schedule_csv")
    },
    "parallelism.module_fqns_per_model_part": only(([], None), _OWN_STAGES, status="changed"),
}
_OTHER: dict[str, Rule] = {
    "activation_checkpoint.mode": fact("recompute", str, reason="memory.recompute"),
    "activation_checkpoint.selective_ac_option": _selective,
    "activation_checkpoint.*": no_setting("selective recompute saves matmul and attention outputs"),
    "compile.enable": same("compile", bool),
    "compile.components": no_setting("each block is compiled; the loss is fused"),
    "compile.*": no_setting("compile=true compiles each block"),
    "checkpoint.enable_checkpoint": no_setting("a run always saves its final state"),
    "checkpoint.enable": no_setting("a run always saves its final state"),
    "checkpoint.interval": same("checkpoint.every_steps", int),
    "checkpoint.keep_latest_k": choice(
        {
            0: Outcome("refused", reason="all checkpoints cannot be kept; set checkpoint.keep_last"),
            **{count: {"checkpoint.keep_last": count} for count in range(1, 1001)},
        }
    ),
    "checkpoint.initial_load_path": same("checkpoint.start_from", str),
    "checkpoint.initial_load_model_only": only((True,), "only weights are taken from another run"),
    "checkpoint.load_step": only((-1,), "a run resumes from its newest checkpoint"),
    "checkpoint.folder": no_setting("checkpoints are in the run directory (`train --dir`)"),
    "checkpoint.*": no_setting("every checkpoint is complete and sharded; `convert` writes other forms"),
    "metrics.log_freq": same("observe.every_steps", int),
    "metrics.enable_tensorboard": same("observe.tensorboard", bool),
    "metrics.enable_wandb": choice({False: {}, True: {"observe.wandb": {}}}),
    "metrics.*": no_setting("metrics.jsonl and event files are in the run directory"),
    "profiling.*": no_setting("`meshwright bench step` measures a step"),
    "comm.*": no_setting("timeouts of collectives are set by the runtime"),
    "job.description": no_setting("set name"),
    "job.*": no_setting("the run directory is named with `train --dir`"),
    "float8.recipe_name": only(
        ("tensorwise", None), "scaled per tensor; rows have no scales of their own", status="changed"
    ),
    "float8.*": no_setting("scales and casts follow precision.fp8"),
    "quantize.linear.float8.*": no_setting("scales and casts follow precision.fp8"),
    "quantize.linear.mx.*": no_setting("scales and casts follow precision.fp8"),
    "mx.*": no_setting("scales and casts follow precision.fp8"),
    "memory_estimation.*": no_setting("`meshwright predict` and `rehearse` say the memory of a rank"),
    "fault_tolerance.enable": off_or_refuse("there is no torchft; a run restarts from its checkpoints"),
    "fault_tolerance.*": no_setting("there is no torchft; a run restarts from its checkpoints"),
    "experimental.custom_import": off_or_refuse(
        "other modules are not imported; see docs/guides/own_model.md"
    ),
    "experimental.*": off_or_refuse("experimental keys have no counterpart"),
    "validation.freq": same("observe.evaluate.every_steps", int),
    "validation.*": no_setting("data.holdout_sequences are kept for evaluation"),
}
TORCHTITAN = Format(
    title="torchtitan",
    rules={**_MODEL, **_TRAINING, **_OTHER},
    switches={
        **dict.fromkeys(("validation", "memory_estimation"), "enabled"),
        **dict.fromkeys(("fault_tolerance",), "enable"),
    },
    aliases={
        "training.batch_size": "training.local_batch_size",
        "validation.enable": "validation.enabled",
        "training.data_parallel_shard_degree": "parallelism.data_parallel_shard_degree",
        "training.tensor_parallel_degree": "parallelism.tensor_parallel_degree",
        "experimental.pipeline_parallel_degree": "parallelism.pipeline_parallel_degree",
        "experimental.context_parallel_degree": "parallelism.context_parallel_degree",
    },
)


def read_torchtitan(tree: dict[str, Any]) -> Translation:
    """A torchtitan configuration in the words of a run; what a file leaves out is as in torchtitan."""
    found = translate(_with_defaults(tree), TORCHTITAN)
    found.entries = [_marked(entry, tree) for entry in found.entries]
    settings, facts = found.settings, found.facts
    _set_model(found)
    _set_recompute(found)
    if facts.get("decay_ratio") is not None:
        settings["schedule.kind"] = "wsd"
        steps = settings.get("schedule.num_steps", 10_000)
        settings["schedule.decay_steps"] = round(facts["decay_ratio"] * steps)
    if settings.get("parallel.pp", 1) > 1:
        local = settings.get("data.microbatch_sequences", 1)
        micro = facts.get("microbatch", 1)
        settings["data.microbatch_sequences"] = micro
        facts["accumulation"] = facts.get("accumulation", 1) * max(1, local // micro)
    elif "data.batch_sequences" not in settings:
        facts.setdefault("accumulation", 1)
    return found


# What torchtitan does where a file has a section and leaves the key out, and this program would not.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "optimizer": {"lr": 8e-4, "beta2": 0.95, "weight_decay": 0.1},
    "lr_scheduler": {"warmup_steps": 200, "decay_type": "linear"},
    "training": {"mixed_precision_param": "bfloat16"},
    "parallelism": {"fsdp_reshard_after_forward": "default"},
}


def _with_defaults(tree: dict[str, Any]) -> dict[str, Any]:
    filled = {section: {**defaults, **tree.get(section, {})} for section, defaults in _DEFAULTS.items()}
    scheduler = filled["lr_scheduler"]
    if not {"lr_min", "min_lr_factor"} & scheduler.keys():
        scheduler["min_lr_factor"] = 0.0
    return {**tree, **filled}


def _marked(entry: Entry, tree: dict[str, Any]) -> Entry:
    """The entry, with a note where its value is a default of torchtitan."""
    section, _, key = entry.key.partition(".")
    is_default = section in _DEFAULTS and key not in tree.get(section, {})
    is_alias = key == "local_batch_size"
    return replace(entry, key=f"{entry.key} (default)") if is_default and not is_alias else entry


def _set_model(found: Translation) -> None:
    name, flavor = found.facts.get("name"), found.facts.get("flavor")
    if name is None and flavor is None:
        return
    family = _FAMILIES.get((str(name).lower(), str(flavor).lower()))
    if family is None:
        reason = "no model family of this name and flavor; name one with model=FAMILY or --onto RUN"
        found.add("model (name + flavor)", f"{name} {flavor}", Outcome("changed", reason=reason))
    else:
        found.settings["model"] = family


def _set_recompute(found: Translation) -> None:
    """selective with a number is full recompute of every k-th layer."""
    mode, every = found.facts.get("recompute"), found.facts.get("every")
    if mode is None:
        return
    found.settings["memory.recompute"] = "full" if mode == "selective" and every else mode
    if mode == "selective" and every:
        found.settings["memory.recompute_every"] = every
