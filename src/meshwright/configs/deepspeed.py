"""DeepSpeed JSON: what each key means in a run."""

from typing import Any

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
    refuse,
    same,
    translate,
)
from meshwright.spec.memory import OFFLOAD_ORDER

_FROM_BLOCKS = "ZeRO-3 gathers one block, prefetches the next and frees it after use: nothing to tune"
_BUCKETS = "buckets of 25M elements: large enough for full bandwidth, small enough to overlap"
_NVME = "there is no offload to NVMe; host memory (cpu) is supported"
_NO_1BIT = "there is no 1-bit communication in torch; use adamw or lamb"
_IN_METRICS = "step time, tokens/s and MFU of each step are always in metrics.jsonl"


def _compute(dtype: str, settings: Settings) -> Rule:
    """The rule of `fp16.enabled` and `bf16.enabled`."""
    return choice({True: {"precision.compute": dtype, **settings}, False: Outcome("mapped")})


def _clip(value: Any) -> Outcome:
    norm = float(value)
    return Outcome("mapped", {"optim.max_grad_norm": norm if norm > 0 else None})


def _loss_scale(value: Any) -> Outcome:
    reason = "a fixed loss scale is not supported; 0 is dynamic loss scaling"
    return Outcome("mapped") if float(value) == 0 else Outcome("refused", reason=reason)


def _betas(value: Any) -> Outcome:
    beta1, beta2 = (float(each) for each in value)
    return Outcome("mapped", {"optim.beta1": beta1, "optim.beta2": beta2})


def _offload(part: str) -> Rule:
    on_host = Outcome("mapped", facts={f"offload_{part}": True}, reason=f"memory.offload={part}")
    on_device = Outcome("mapped", facts={f"offload_{part}": False})
    return choice({"none": on_device, "cpu": on_host}, otherwise=_NVME)


def _shard_size(value: Any, *, status: str, reason: str) -> Outcome:
    if int(value) <= 1:
        return Outcome("mapped")
    outcome = "changed" if status == "changed" else "mapped"
    return Outcome(outcome, facts={"dp_shard": int(value)}, reason=f"parallel.dp_shard={value}{reason}")


def _hpz(value: Any) -> Outcome:
    reason = " (HSDP): gradients and optimizer states are also sharded over that many ranks only"
    return _shard_size(value, status="changed", reason=reason)


def _mics(value: Any) -> Outcome:
    return _shard_size(value, status="mapped", reason=" and replicas across")


def _sequence_parallel(value: Any) -> Outcome:
    if int(value) == 1:
        return Outcome("mapped")
    return Outcome("mapped", {"parallel.cp": int(value), "parallel.cp_kind": "ulysses"})


def _gradient_dtype(value: Any) -> Outcome:
    if value in (None, "fp32"):
        return Outcome("mapped", {"precision.gradients": "fp32"} if value else {})
    if value == "bf16":
        return Outcome("mapped", {"precision.gradients": "bf16", "precision.weights": "bf16_exact"})
    return Outcome("refused", reason="gradients are kept in fp32 or bf16")


_OPTIMIZERS = {
    "Adam": Outcome("mapped", {"optim.kind": "adamw"}, reason="DeepSpeed's Adam decouples weight decay too"),
    "AdamW": {"optim.kind": "adamw"},
    "Lamb": {"optim.kind": "lamb"},
    "Muon": {"optim.kind": "muon"},
    "SGD": {"optim.kind": "sgd"},
    "OneBitAdam": Outcome("refused", reason=_NO_1BIT),
    "OneBitLamb": Outcome("refused", reason=_NO_1BIT),
    "ZeroOneAdam": Outcome("refused", reason=_NO_1BIT),
}
_SCHEDULERS = {
    "WarmupLR": {"schedule.kind": "constant"},
    "WarmupDecayLR": {"schedule.kind": "linear", "schedule.min_lr_ratio": 0.0},
    "WarmupCosineLR": {"schedule.kind": "cosine"},
}
_BATCH: dict[str, Rule] = {
    "train_batch_size": same("data.batch_sequences", int),
    "train_micro_batch_size_per_gpu": same("data.microbatch_sequences", int),
    "gradient_accumulation_steps": fact(
        "accumulation", int, reason="data.batch_sequences = micro-batch x accumulation x dp"
    ),
    "managed_gradient_accumulation": only((True,), "accumulation is always managed", status="changed"),
}
_OPTIM: dict[str, Rule] = {
    "optimizer.type": choice(
        _OPTIMIZERS, otherwise="no such optimizer; see optim.kind in `meshwright schema`"
    ),
    "optimizer.params.lr": same("optim.lr", float),
    "optimizer.params.betas": _betas,
    "optimizer.params.eps": same("optim.eps", float),
    "optimizer.params.weight_decay": same(
        "optim.weight_decay", float, reason="on matrices only; optim.weight_decay_on=all for all parameters"
    ),
    "optimizer.params.momentum": same("optim.beta1", float),
    "optimizer.params.bias_correction": only((True,), "the moments are always bias-corrected"),
    "optimizer.params.adam_w_mode": only((True,), "weight decay is decoupled (AdamW); L2 is not supported"),
    "optimizer.params.torch_adam": no_setting("the fused optimizer of torch or our own is chosen"),
    "optimizer.params.fused": no_setting("the fused optimizer is used where there is one"),
    "optimizer.legacy_fusion": no_setting("the fused optimizer is used where there is one"),
    "zero_allow_untested_optimizer": no_setting("every optimizer is tested with every ZeRO stage"),
    "zero_force_ds_cpu_optimizer": off_or_changed("offloaded states are updated by our own optimizer"),
    "gradient_clipping": _clip,
}
_SCHEDULE: dict[str, Rule] = {
    "scheduler.type": choice(
        _SCHEDULERS, otherwise="no such schedule; see schedule.kind in `meshwright schema`"
    ),
    "scheduler.params.warmup_num_steps": same("schedule.warmup_steps", int),
    "scheduler.params.total_num_steps": same("schedule.num_steps", int),
    "scheduler.params.warmup_max_lr": same("optim.lr", float),
    "scheduler.params.warmup_min_lr": only((0, 0.0), "the warm-up starts at zero"),
    "scheduler.params.warmup_min_ratio": only((0, 0.0), "the warm-up starts at zero"),
    "scheduler.params.cos_min_ratio": same("schedule.min_lr_ratio", float),
    "scheduler.params.warmup_type": only(("linear",), "the warm-up is linear", status="changed"),
    "scheduler.params.last_batch_iteration": only((-1,), "a run resumes from its own checkpoints"),
}
_PRECISION: dict[str, Rule] = {
    "fp16.enabled": _compute("fp16", {"precision.loss_scale": {}}),
    "fp16.auto_cast": off_or_changed("inputs are cast by the model"),
    "fp16.loss_scale": _loss_scale,
    "fp16.initial_scale_power": same("precision.loss_scale.initial", lambda power: 2.0 ** int(power)),
    "fp16.loss_scale_window": same("precision.loss_scale.growth_steps", int),
    "fp16.hysteresis": same("precision.loss_scale.hysteresis", int),
    "fp16.consecutive_hysteresis": off_or_refuse("overflows are counted anew only when the scale grows"),
    "fp16.min_loss_scale": same(
        "precision.loss_scale.minimum", float, reason="training goes on there; DeepSpeed raises an error"
    ),
    "fp16.fp16_master_weights_and_grads": off_or_refuse("weights of an fp16 run are kept in fp32"),
    "bf16.enabled": _compute("bf16", {}),
    "bf16.immediate_grad_update": no_setting("gradients are accumulated as they arrive"),
    "bf16.check_grad_overflow": off_or_changed("the gradient norm of each step is logged and checked"),
    "bf16.bf16_master_weights_and_grads": choice(
        {
            False: Outcome("mapped"),
            True: {"precision.weights": "bf16_stochastic", "precision.gradients": "bf16"},
        }
    ),
    "bf16.bf16_optimizer_states": choice({False: Outcome("mapped"), True: {"optim.state": "bf16"}}),
    "data_types.grad_accum_dtype": _gradient_dtype,
    "communication_data_type": only(
        (None, "fp32"), "gradients are reduced in the dtype of precision.gradients", status="changed"
    ),
    "seq_parallel_communication_data_type": no_setting("activations are exchanged in the compute dtype"),
    "torch_autocast.enabled": off_or_refuse("use bf16.enabled or fp16.enabled; layers are cast by the model"),
    "torch_autocast.*": no_setting("layers are cast by the model"),
    "amp.enabled": off_or_refuse("apex AMP is not supported; use bf16.enabled or fp16.enabled"),
    "amp.*": no_setting("apex AMP is not supported"),
    "prescale_gradients": off_or_refuse("gradients are divided once, by the number of target tokens"),
    "gradient_predivide_factor": only((1, 1.0), "gradients are divided once, by the number of target tokens"),
    "gradient_allreduce_op": only(("mean",), "the loss is the mean over all target tokens of the step"),
    "sparse_gradients": off_or_refuse("gradients of embeddings are dense"),
}
_ZERO: dict[str, Rule] = {
    "zero_optimization.stage": same("parallel.zero", int),
    "zero_optimization.offload_optimizer.device": _offload("optimizer"),
    "zero_optimization.offload_param.device": _offload("parameters"),
    "zero_optimization.offload_optimizer.pin_memory": only(
        (True,), "memory is always pinned", status="changed"
    ),
    "zero_optimization.offload_param.pin_memory": only((True,), "memory is always pinned", status="changed"),
    "zero_optimization.offload_optimizer.nvme_path": off_or_refuse(_NVME),
    "zero_optimization.offload_param.nvme_path": off_or_refuse(_NVME),
    "zero_optimization.offload_optimizer.ratio": only((1, 1.0), "all optimizer states are offloaded"),
    "zero_optimization.offload_optimizer.super_offload": off_or_refuse("there is no SuperOffload"),
    "zero_optimization.offload_optimizer.*": no_setting("offloaded states are double-buffered"),
    "zero_optimization.offload_param.*": no_setting("offloaded parameters are prefetched block by block"),
    "zero_optimization.cpu_offload": choice({False: Outcome("mapped"), True: _offload("optimizer")("cpu")}),
    "zero_optimization.reduce_bucket_size": no_setting(_BUCKETS),
    "zero_optimization.allgather_bucket_size": no_setting(_BUCKETS),
    "zero_optimization.overlap_comm": only((True,), "communication always overlaps", status="changed"),
    "zero_optimization.contiguous_gradients": only((True,), "buckets are contiguous", status="changed"),
    "zero_optimization.reduce_scatter": only((True,), "ZeRO uses reduce-scatter", status="changed"),
    "zero_optimization.allgather_partitions": only((True,), "ZeRO uses all-gather", status="changed"),
    "zero_optimization.round_robin_gradients": no_setting("each rank owns one slice of each bucket"),
    "zero_optimization.sub_group_size": no_setting("the update runs parameter by parameter"),
    "zero_optimization.stage3_max_live_parameters": no_setting(_FROM_BLOCKS),
    "zero_optimization.stage3_max_reuse_distance": no_setting(_FROM_BLOCKS),
    "zero_optimization.stage3_prefetch_bucket_size": no_setting(_FROM_BLOCKS),
    "zero_optimization.stage3_param_persistence_threshold": no_setting(_FROM_BLOCKS),
    "zero_optimization.stage3_model_persistence_threshold": no_setting(_FROM_BLOCKS),
    "zero_optimization.stage3_module_granularity_threshold": no_setting(_FROM_BLOCKS),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": no_setting(
        "`meshwright convert` writes unsharded weights from any checkpoint"
    ),
    "zero_optimization.zero_hpz_partition_size": _hpz,
    "zero_optimization.mics_shard_size": _mics,
    "zero_optimization.mics_hierarchical_params_gather": off_or_changed("NCCL chooses the algorithm"),
    "zero_optimization.zero_quantized_weights": off_or_refuse("weights are not quantized for all-gather"),
    "zero_optimization.zero_quantized_nontrainable_weights": off_or_refuse("weights are not quantized"),
    "zero_optimization.zero_quantized_gradients": off_or_refuse("gradients are not quantized for reduction"),
    "zero_optimization.zeropp_loco_param.*": refuse("gradients are not quantized for reduction"),
    "zero_optimization.zenflow.*": refuse("there is no ZenFlow"),
    "zero_optimization.*": no_setting("an implementation detail of DeepSpeed's engine"),
}
_PARALLEL: dict[str, Rule] = {
    "tensor_parallel.autotp_size": same("parallel.tp", lambda size: max(1, int(size))),
    "tensor_parallel.*": no_setting("tensor parallelism follows the placement table of the model"),
    "sequence_parallel_size": _sequence_parallel,
    "expert_parallel.enabled": choice({True: Outcome("mapped"), False: Outcome("mapped")}),
    "expert_parallel.autoep_size": same("parallel.ep", int),
    "expert_parallel.*": no_setting("experts are distributed by the placement table of the model"),
    "pipeline.stages": same("parallel.pp", int),
    "pipeline.*": no_setting("stages follow parallel.pp, schedule and virtual_stages"),
    "activation_checkpointing.cpu_checkpointing": choice(
        {
            False: Outcome("mapped"),
            True: Outcome("mapped", facts={"offload_activations": True}, reason="memory.offload=activations"),
        }
    ),
    "activation_checkpointing.partition_activations": off_or_changed(
        "sequence parallelism shards the saved activations over tp"
    ),
    "activation_checkpointing.number_checkpoints": no_setting(
        "recompute is set by memory.recompute and recompute_every"
    ),
    "activation_checkpointing.*": no_setting("recompute is set by memory.recompute"),
}
_OTHER: dict[str, Rule] = {
    "steps_per_print": same("observe.every_steps", int),
    "wall_clock_breakdown": off_or_changed(_IN_METRICS),
    "memory_breakdown": off_or_changed("peak memory of each step is always in metrics.jsonl"),
    "dump_state": off_or_changed("run.yaml in the run directory has every value"),
    "dataloader_drop_last": no_setting("a run takes full batches; data.max_epochs ends with a short one"),
    "disable_allgather": off_or_refuse("ZeRO needs the all-gather"),
    "tensorboard.enabled": same("observe.tensorboard", bool),
    "tensorboard.*": no_setting("event files are in the run directory"),
    "csv_monitor.*": no_setting("metrics.jsonl in the run directory has every step"),
    "wandb.enabled": choice({False: {}, True: {"observe.wandb": {}}}),
    "wandb.project": same("observe.wandb.project", str),
    "wandb.team": same("observe.wandb.entity", str),
    "wandb.*": no_setting("runs of one project are filtered by their settings"),
    "comet.enabled": off_or_refuse("there is no Comet logger; metrics.jsonl and TensorBoard"),
    "comet.*": no_setting("there is no Comet logger"),
    "flops_profiler.*": no_setting("`meshwright predict` counts FLOPs, metrics.jsonl has MFU"),
    "comms_logger.*": no_setting("`meshwright bench comm` measures collectives"),
    "autotuning.*": no_setting("`meshwright plan` chooses the layout without trial runs"),
    "aio.*": no_setting("only used with NVMe, which is refused"),
    "checkpoint.*": no_setting("every checkpoint loads on any mesh (DCP)"),
    "compile.deepcompile": off_or_changed("compile=true compiles each block"),
    "compile.*": no_setting("compile=true compiles each block"),
    "elasticity.enabled": off_or_refuse("the batch does not change with the number of ranks"),
    "elasticity.*": no_setting("the batch does not change with the number of ranks"),
    "curriculum_learning.enabled": off_or_refuse("there is no curriculum over sequence lengths"),
    "curriculum_learning.*": no_setting("there is no curriculum over sequence lengths"),
    "data_efficiency.enabled": off_or_refuse("there is no data-efficiency sampler"),
    "data_efficiency.*": no_setting("there is no data-efficiency sampler"),
    "hybrid_engine.enabled": off_or_refuse("there is no engine for generation"),
    "hybrid_engine.*": no_setting("there is no engine for generation"),
    "compression_training.*": refuse("there is no compression training"),
}
_SWITCHED = (
    *("fp16", "bf16", "amp", "torch_autocast", "tensorboard", "wandb", "comet", "csv_monitor"),
    *("flops_profiler", "comms_logger", "autotuning", "elasticity", "curriculum_learning"),
    *("data_efficiency", "hybrid_engine", "expert_parallel"),
)
_NO_STAGE = "zero_optimization.offload_optimizer", "zero_optimization.offload_param"
DEEPSPEED = Format(
    title="DeepSpeed",
    rules={**_BATCH, **_OPTIM, **_SCHEDULE, **_PRECISION, **_ZERO, **_PARALLEL, **_OTHER},
    switches={**dict.fromkeys(_SWITCHED, "enabled"), **dict.fromkeys(_NO_STAGE, "device")},
    aliases={
        "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
            "zero_optimization.stage3_gather_16bit_weights_on_model_save"
        ),
        "bfloat16.enabled": "bf16.enabled",
        "train_micro_batch_size": "train_micro_batch_size_per_gpu",
    },
)


def read_deepspeed(tree: dict[str, Any]) -> Translation:
    """A DeepSpeed configuration in the words of a run."""
    found = translate(tree, DEEPSPEED)
    found.settings.update(offload_settings(found.facts, found.settings))
    params = tree.get("scheduler", {}).get("params", {})
    if tree.get("scheduler") and "warmup_type" not in params:
        reason = "DeepSpeed's default; the warm-up is linear here"
        found.add("scheduler.params.warmup_type", "log (default)", Outcome("changed", reason=reason))
    return found


def offload_settings(facts: Settings, settings: Settings) -> Settings:
    """`memory.offload` from the parts that a file offloads; nothing where it does not mention any.

    ZeRO-3 shards on the host are updated there, so optimizer states are offloaded with them.
    """
    if not any(name.startswith("offload_") for name in facts):
        return {}
    on_host = {part for part in OFFLOAD_ORDER if facts.get(f"offload_{part}")}
    if "parameters" in on_host and settings.get("parallel.zero") == 3:
        on_host.add("optimizer")
    return {"memory.offload": [part for part in OFFLOAD_ORDER if part in on_host]}
