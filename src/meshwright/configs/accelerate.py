"""Accelerate YAML (`accelerate config`): what each key means in a run."""

import json
from pathlib import Path
from typing import Any, cast

from meshwright.configs.deepspeed import offload_settings, read_deepspeed
from meshwright.configs.rules import (
    Format,
    Outcome,
    Rule,
    Settings,
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
from meshwright.errors import SpecError, read_trouble

_LAUNCHER = "the launcher's: `meshwright launch` writes the lines for each node"
_NO_DEVICE = "ranks run on CUDA devices or on the CPU"
_UNITS = "each block is one FSDP unit; embedding and head are units of their own"
_PREFETCH = "the next block is always prefetched"


def _sharding(zero: int, *, is_hybrid: bool = False) -> Outcome:
    reason = "dp_shard inside a node, dp_replicate across nodes" if is_hybrid else ""
    facts = {"is_hybrid": True} if is_hybrid else {}
    return Outcome("mapped", {"parallel.zero": zero}, facts, reason)


_STRATEGIES = {
    "FULL_SHARD": _sharding(3),
    "SHARD_GRAD_OP": _sharding(2),
    "NO_SHARD": _sharding(0),
    "HYBRID_SHARD": _sharding(3, is_hybrid=True),
    "HYBRID_SHARD_ZERO2": _sharding(2, is_hybrid=True),
}
_NUMBERED = dict(zip(range(1, 6), _STRATEGIES.values(), strict=True))
_STRATEGY = choice({**_STRATEGIES, **_NUMBERED, **{str(k): v for k, v in _NUMBERED.items()}})
_FP16: Settings = {"precision.compute": "fp16", "precision.loss_scale": {}}
_OFF = Outcome("mapped")


def _reshard(value: Any) -> Outcome:
    """true: ZeRO-3, false: ZeRO-2; a strategy's name in files of FSDP 1."""
    if isinstance(value, bool) or str(value).lower() in ("true", "false"):
        return _sharding(3 if str(value).lower() == "true" else 2)
    return _STRATEGY(value)


def _offloaded(part: str, *, is_on: bool) -> Outcome:
    return Outcome(
        "mapped", facts={f"offload_{part}": is_on}, reason=f"memory.offload={part}" if is_on else ""
    )


def _offload_device(part: str) -> Rule:
    return choice(
        {"none": _offloaded(part, is_on=False), "cpu": _offloaded(part, is_on=True)},
        otherwise="there is no offload to NVMe; host memory (cpu) is supported",
    )


def _offload_flag(part: str) -> Rule:
    return choice({False: _offloaded(part, is_on=False), True: _offloaded(part, is_on=True)})


def _size_of(axis: str) -> Rule:
    return fact(axis, int, reason=f"parallel.{axis}")


_ONE_PROCESS = Outcome("mapped", {"parallel.zero": 0}, {"ranks": 1})
_TYPES = {
    "NO": _ONE_PROCESS,
    False: _ONE_PROCESS,  # how YAML 1.1 reads NO without quotes
    "MULTI_GPU": _sharding(0),
    "MULTI_CPU": Outcome("mapped", {"parallel.zero": 0, "device": "cpu"}),
    "FSDP": Outcome("mapped", reason="see fsdp_config"),
    "DEEPSPEED": Outcome("mapped", reason="see deepspeed_config"),
    "MEGATRON_LM": Outcome("mapped", {"parallel.zero": 0}, reason="see megatron_lm_config"),
}
_PRECISIONS = {
    "no": {"precision.compute": "fp32"},
    "fp16": _FP16,
    "bf16": {"precision.compute": "bf16"},
    "fp8": Outcome("mapped", {"precision.compute": "bf16"}, {"is_fp8": True}, "see fp8_config"),
}
_TOP: dict[str, Rule] = {
    "compute_environment": only(("LOCAL_MACHINE",), "SageMaker jobs are not started from here"),
    "distributed_type": choice(_TYPES, otherwise=_NO_DEVICE),
    "mixed_precision": choice({**_PRECISIONS, False: _PRECISIONS["no"], None: _PRECISIONS["no"]}),
    "use_cpu": choice({False: _OFF, True: {"device": "cpu"}}),
    "debug": off_or_changed("the watchdog reports mismatched collectives"),
    "num_processes": fact("ranks", int, reason="the mesh has this many ranks"),
    "num_machines": fact("nodes", int, reason="used where replicas are across nodes"),
    "machine_rank": no_setting(_LAUNCHER),
    "main_process_ip": no_setting(_LAUNCHER),
    "main_process_port": no_setting(_LAUNCHER),
    "rdzv_backend": no_setting(_LAUNCHER),
    "same_network": no_setting(_LAUNCHER),
    "main_training_function": no_setting("only notebooks and TPUs call a function"),
    "gpu_ids": only(("all", None), "choose devices with CUDA_VISIBLE_DEVICES", status="changed"),
    "enable_cpu_affinity": choice(
        {False: {"launch.bind": "none"}, None: {"launch.bind": "none"}, True: {"launch.bind": "numa"}}
    ),
    "mpirun_config.mpirun_hostfile": no_setting("`launch --via mpi --hostfile FILE`"),
    "mpirun_config.*": no_setting("`launch --via mpi`"),
    "downcast_bf16": only(("no", False), "only for TPUs"),
    "tpu_use_cluster": off_or_refuse(_NO_DEVICE),
    "tpu_use_sudo": off_or_refuse(_NO_DEVICE),
    **{key: off_or_refuse(_NO_DEVICE) for key in ("tpu_name", "tpu_zone", "tpu_vm")},
    "tpu_env": only(([], None), _NO_DEVICE),
    "command_file": off_or_refuse(_NO_DEVICE),
    "commands": off_or_refuse(_NO_DEVICE),
    "fp16": choice({False: _OFF, True: _FP16}),
}
_FSDP: dict[str, Rule] = {
    "fsdp_version": only((1, 2, "1", "2"), "FSDP has versions 1 and 2"),
    "fsdp_sharding_strategy": _STRATEGY,
    "fsdp_reshard_after_forward": _reshard,
    "fsdp_offload_params": _offload_flag("parameters"),
    "fsdp_auto_wrap_policy": only(("TRANSFORMER_BASED_WRAP",), _UNITS, status="changed"),
    "fsdp_transformer_layer_cls_to_wrap": no_setting(_UNITS),
    "fsdp_min_num_params": only((0, None), _UNITS, status="changed"),
    "fsdp_backward_prefetch": only(("BACKWARD_PRE",), _PREFETCH, status="changed"),
    "fsdp_forward_prefetch": only((True,), _PREFETCH, status="changed"),
    "fsdp_state_dict_type": only(
        ("SHARDED_STATE_DICT",), "checkpoints are sharded; `convert` writes full weights", status="changed"
    ),
    "fsdp_use_orig_params": only((True,), "parameters keep their names and shapes", status="changed"),
    "fsdp_cpu_ram_efficient_loading": no_setting("each rank reads its own shards only"),
    "fsdp_sync_module_states": no_setting("initial weights are the same on every rank by construction"),
    "fsdp_activation_checkpointing": choice(
        {False: {"memory.recompute": "none"}, True: {"memory.recompute": "full"}}
    ),
    "fsdp_activation_checkpointing_offload": _offload_flag("activations"),
    "fsdp_ignored_modules": off_or_refuse("every module is sharded"),
    "fsdp_limit_all_gathers": only((True,), "all-gathers are always limited", status="changed"),
}
_PARALLELISM: dict[str, Rule] = {
    "dp_replicate_size": _size_of("dp_replicate"),
    "dp_shard_size": _size_of("dp_shard"),
    "tp_size": same("parallel.tp", int),
    "cp_size": same("parallel.cp", int),
    "cp_backend": only(("torch",), "there is one implementation of context parallelism"),
    "cp_comm_strategy": choice(
        {"allgather": {"parallel.cp_kind": "gather"}, "alltoall": {"parallel.cp_kind": "ring"}}
    ),
    "sp_size": lambda value: (
        _OFF
        if int(value) == 1
        else Outcome("mapped", {"parallel.cp": int(value), "parallel.cp_kind": "ulysses"})
    ),
    "sp_backend": only(("deepspeed",), "Ulysses is built in", status="changed"),
    "sp_seq_length": same("data.sequence_length", int),
    "sp_seq_length_is_variable": off_or_changed("sequences are packed to data.sequence_length"),
    "sp_attn_implementation": no_setting("the fastest attention kernel of the device is used"),
}
_DEEPSPEED: dict[str, Rule] = {
    "zero_stage": same("parallel.zero", int),
    "offload_optimizer_device": _offload_device("optimizer"),
    "offload_param_device": _offload_device("parameters"),
    "offload_optimizer_nvme_path": off_or_refuse("there is no offload to NVMe"),
    "offload_param_nvme_path": off_or_refuse("there is no offload to NVMe"),
    "gradient_accumulation_steps": fact(
        "accumulation", int, reason="data.batch_sequences = micro-batch x accumulation x dp"
    ),
    "gradient_clipping": same("optim.max_grad_norm", float),
    "zero3_init_flag": no_setting("each rank allocates its own shards only"),
    "zero3_save_16bit_model": no_setting("`meshwright convert` writes unsharded weights"),
    "deepspeed_config_file": no_setting("its keys are listed below it"),
    "deepspeed_hostfile": no_setting("`launch --via mpi|torchrun --hostfile FILE`"),
    "deepspeed_multinode_launcher": no_setting(_LAUNCHER),
    "deepspeed_exclusion_filter": no_setting(_LAUNCHER),
    "deepspeed_inclusion_filter": no_setting(_LAUNCHER),
    "deepspeed_moe_layer_cls_names": no_setting(_UNITS),
}
_FP8: dict[str, Rule] = {
    "backend": choice(
        {"TE": {"precision.fp8.recipe": "delayed"}, "AO": {"precision.fp8.recipe": "current"}},
        otherwise="MS-AMP is not supported; TE and AO are mapped",
    ),
    "fp8_format": only(("HYBRID",), "gradients of outputs are E5M2, all else E4M3", status="changed"),
    "amax_history_len": same("precision.fp8.history_steps", int),
    "amax_compute_algo": only(("max",), "the maximum of the history is used", status="changed"),
    "margin": only((0,), "scales have no margin"),
    "interval": only((1,), "scales are updated every step"),
    "override_linear_precision": no_setting("all three matmuls of a layer run in fp8"),
    "use_mxfp8_block_scaling": off_or_refuse("set precision.fp8=mxfp8"),
    "use_autocast_during_eval": no_setting("evaluation uses the precision of training"),
    "enable_fsdp_float8_all_gather": off_or_changed("weights are gathered in the compute dtype"),
    "pad_inner_dim": off_or_changed("layers whose widths do not fit fp8 stay in bf16"),
}
_DYNAMO: dict[str, Rule] = {
    "dynamo_backend": choice({"INDUCTOR": {"compile": True}, "NO": {"compile": False}}),
    "dynamo_mode": only(("default", None), "compiled in the default mode", status="changed"),
    "dynamo_use_fullgraph": no_setting("each block is compiled as one graph where torch can"),
    "dynamo_use_dynamic": off_or_changed("shapes are fixed"),
    "dynamo_use_regional_compilation": only((True,), "each block is compiled", status="changed"),
}
_MEGATRON: dict[str, Rule] = {
    "tp_degree": same("parallel.tp", int),
    "pp_degree": same("parallel.pp", int),
    "num_micro_batches": fact("accumulation", int, reason="micro-batches of one step"),
    "sequence_parallelism": only((True,), "sequence parallelism comes with tp", status="changed"),
    "recompute_activations": choice(
        {True: {"memory.recompute": "selective"}, False: {"memory.recompute": "none"}}
    ),
    "use_distributed_optimizer": choice(
        {False: _OFF, True: Outcome("mapped", facts={"zero": 1}, reason="parallel.zero=1")}
    ),
    "gradient_clipping": same("optim.max_grad_norm", float),
    "expert_model_parallel_size": same("parallel.ep", int),
    "expert_tensor_parallel_size": same("parallel.etp", int),
    "context_parallel_size": same("parallel.cp", int),
    "recompute_granularity": choice(
        {"full": {"memory.recompute": "full"}, "selective": {"memory.recompute": "selective"}}
    ),
    "recompute_method": no_setting("memory.recompute_every chooses the layers"),
    "recompute_num_layers": no_setting("memory.recompute_every chooses the layers"),
    "attention_backend": no_setting("the fastest attention kernel of the device is used"),
    "calculate_per_token_loss": only((True,), "the loss is the mean over target tokens", status="changed"),
}
# Section -> prefix of its keys in files, and their rules.
_SECTIONS = {
    "fsdp_config": ("", _FSDP),
    "parallelism_config": ("parallelism_config_", _PARALLELISM),
    "deepspeed_config": ("", _DEEPSPEED),
    "fp8_config": ("", _FP8),
    "dynamo_config": ("", _DYNAMO),
    "megatron_lm_config": ("megatron_lm_", _MEGATRON),
}
_EMPTY = {section: only(({}, None), "this is not a mapping") for section in (*_SECTIONS, "mpirun_config")}
_OLD_SPELLINGS = {
    "dynamo_backend": "dynamo_config.dynamo_backend",
    "dynamo_config.backend": "dynamo_config.dynamo_backend",
    "fsdp_config.fsdp_backward_prefetch_policy": "fsdp_config.fsdp_backward_prefetch",
    "fp8_config.amax_history_length": "fp8_config.amax_history_len",
    "fp8_config.amax_compute_algorithm": "fp8_config.amax_compute_algo",
    "fp8_config.optimization_level": "fp8_config.opt_level",
}


def _section_rules() -> dict[str, Rule]:
    """The rules of the sections by their full keys."""
    return {
        f"{section}.{prefix}{key}": rule
        for section, (prefix, rules) in _SECTIONS.items()
        for key, rule in rules.items()
    }


def _bare_spellings() -> dict[str, str]:
    """Keys of `fsdp_config` may be written without their prefix."""
    return {f"fsdp_config.{key.removeprefix('fsdp_')}": f"fsdp_config.{key}" for key in _FSDP}


ACCELERATE = Format(
    title="Accelerate",
    rules={**_TOP, **_EMPTY, **_section_rules()},
    aliases={**_OLD_SPELLINGS, **_bare_spellings()},
)


def read_accelerate(tree: dict[str, Any], folder: Path) -> Translation:
    """An Accelerate configuration in the words of a run; a DeepSpeed file that it names is read too."""
    found = translate(tree, ACCELERATE)
    named = cast(dict[str, Any], tree.get("deepspeed_config") or {}).get("deepspeed_config_file")
    if isinstance(named, str):
        _add_deepspeed_file(found, folder / named)
    if found.facts.get("zero") is not None:
        found.settings["parallel.zero"] = found.facts["zero"]
    if found.facts.get("is_fp8") and "precision.fp8.recipe" not in found.settings:
        found.settings["precision.fp8.recipe"] = "delayed"
    if not found.facts.get("is_fp8"):
        found.settings = {k: v for k, v in found.settings.items() if not k.startswith("precision.fp8.")}
    found.settings.update(offload_settings(found.facts, found.settings))
    return found


def _add_deepspeed_file(found: Translation, path: Path) -> None:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SpecError(
            f"the DeepSpeed file cannot be read: {read_trouble(error)}",
            where=str(path),
            hint="deepspeed_config.deepspeed_config_file names it, relative to the Accelerate file",
        ) from None
    found.extend(read_deepspeed(tree))
