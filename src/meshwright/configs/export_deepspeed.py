"""A run as a DeepSpeed JSON file."""

import math
from typing import Any

from meshwright.configs.export import Exported, Target, Written, cannot, differs, export_run, unless, write_as
from meshwright.spec.run import RunSpec

_SCRIPT = "your script says it: a DeepSpeed file has no such key"
_OPTIMIZERS = {"adamw": "AdamW", "lamb": "Lamb", "sgd": "SGD", "muon": "Muon"}
_SCHEDULERS = {"constant": "WarmupLR", "linear": "WarmupDecayLR", "cosine": "WarmupCosineLR"}
_ZERO = "zero_optimization"


def _kind(value: Any, run: RunSpec) -> Written:
    if value not in _OPTIMIZERS:
        return Written("refused", reason="DeepSpeed has no such optimizer; build it in the script")
    return Written(values={"optimizer.type": _OPTIMIZERS[value]})


def _beta1(value: Any, run: RunSpec) -> Written:
    if run.optim.kind == "sgd":
        return Written(values={"optimizer.params.momentum": value})
    return Written(values={"optimizer.params.betas": [value, run.optim.beta2]})


def _clip(value: Any, run: RunSpec) -> Written:
    return Written(values={"gradient_clipping": value or 0.0})


def _schedule(value: Any, run: RunSpec) -> Written:
    schedule = run.schedule
    if value not in _SCHEDULERS or (value == "linear" and schedule.min_lr_ratio > 0):
        return Written("refused", reason="DeepSpeed has no such schedule; build it in the script")
    params: dict[str, Any] = {"warmup_num_steps": schedule.warmup_steps, "warmup_type": "linear"}
    if value == "cosine":
        params |= {"total_num_steps": schedule.num_steps, "cos_min_ratio": schedule.min_lr_ratio}
        params |= {"warmup_min_ratio": 0.0}
    else:
        params |= {"warmup_min_lr": 0.0, "warmup_max_lr": run.optim.lr}
    if value == "linear":
        params["total_num_steps"] = schedule.num_steps
    return Written(values={"scheduler.type": _SCHEDULERS[value], "scheduler.params": params})


def _compute(value: Any, run: RunSpec) -> Written:
    if value not in ("fp32", "bf16", "fp16"):
        return Written("refused", reason="DeepSpeed computes in fp32, bf16 or fp16")
    return Written(values={} if value == "fp32" else {f"{value}.enabled": True})


def _initial(value: Any, run: RunSpec) -> Written:
    if value is None:
        return Written()
    power = math.log2(value)
    exact = power == int(power)
    reason = "" if exact else "DeepSpeed starts at a power of two"
    return Written("mapped" if exact else "changed", {"fp16.initial_scale_power": round(power)}, reason)


def _weights(value: Any, run: RunSpec) -> Written:
    if value == "bf16_stochastic":
        return Written("refused", reason="DeepSpeed has no stochastic rounding of weights")
    reason = "DeepSpeed keeps bf16 or fp16 weights with an fp32 master copy, which has the same values"
    return Written(reason=reason if run.precision.compute != "fp32" else "")


def _gradients(value: Any, run: RunSpec) -> Written:
    return Written(values={} if run.precision.compute == "fp32" else {"data_types.grad_accum_dtype": value})


def _state(value: Any, run: RunSpec) -> Written:
    return Written(values={"bf16.bf16_optimizer_states": True}) if value == "bf16" else Written()


def _offload(value: Any, run: RunSpec) -> Written:
    values: dict[str, Any] = {}
    if "optimizer" in value or "parameters" in value:
        values[f"{_ZERO}.offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if "parameters" in value:
        values[f"{_ZERO}.offload_param"] = {"device": "cpu", "pin_memory": True}
    if "activations" in value:
        values["activation_checkpointing.cpu_checkpointing"] = True
    if "parameters" in value and run.parallel.zero < 3:
        return Written("refused", reason="DeepSpeed offloads parameters with stage 3 only")
    return Written(values=values)


def _shards(value: Any, run: RunSpec) -> Written:
    if run.parallel.dp_replicate == 1 or run.parallel.zero == 0:
        return Written(reason="train_batch_size / (micro-batch x accumulation)")
    if run.parallel.zero < 3:
        return Written("refused", reason="DeepSpeed has replicas of shards with stage 3 only")
    reason = "parameters are sharded inside, gradients and optimizer states over all ranks"
    return Written("changed", {f"{_ZERO}.zero_hpz_partition_size": value}, reason)


def _cp(value: Any, run: RunSpec) -> Written:
    if value == 1:
        return Written()
    if run.parallel.cp_kind != "ulysses":
        return Written("refused", reason="DeepSpeed has Ulysses only: parallel.cp_kind=ulysses")
    return Written(values={"sequence_parallel_size": value})


DEEPSPEED_FILE = Target(
    title="DeepSpeed",
    writers={
        "data.batch_sequences": write_as("train_batch_size"),
        "data.microbatch_sequences": write_as("train_micro_batch_size_per_gpu"),
        "optim.kind": _kind,
        "optim.lr": write_as("optimizer.params.lr"),
        "optim.beta1": _beta1,
        "optim.beta2": lambda value, run: Written(reason="optimizer.params.betas"),
        "optim.eps": write_as("optimizer.params.eps"),
        "optim.weight_decay": write_as("optimizer.params.weight_decay"),
        "optim.state": _state,
        "optim.max_grad_norm": _clip,
        "schedule.kind": _schedule,
        "schedule.num_steps": lambda value, run: Written(reason="scheduler.params, or the script"),
        "schedule.warmup_steps": lambda value, run: Written(reason="scheduler.params"),
        "schedule.min_lr_ratio": lambda value, run: Written(reason="scheduler.params"),
        "precision.compute": _compute,
        "precision.weights": _weights,
        "precision.gradients": _gradients,
        "precision.loss_scale.initial": _initial,
        "precision.loss_scale.growth_steps": unless(None, write_as("fp16.loss_scale_window")),
        "precision.loss_scale.hysteresis": unless(None, write_as("fp16.hysteresis")),
        "precision.loss_scale.minimum": unless(None, write_as("fp16.min_loss_scale")),
        "precision.loss_scale.growth_factor": differs(2.0, "DeepSpeed doubles the scale"),
        "precision.loss_scale.backoff_factor": differs(0.5, "DeepSpeed halves the scale"),
        "precision.fp8.recipe": cannot(None, "DeepSpeed has no fp8 matmuls"),
        "parallel.zero": write_as(f"{_ZERO}.stage"),
        "parallel.dp_shard": _shards,
        "parallel.dp_replicate": lambda value, run: Written(reason="the other data-parallel ranks"),
        "parallel.tp": unless(1, write_as("tensor_parallel.autotp_size")),
        "parallel.cp": _cp,
        "parallel.cp_kind": lambda value, run: Written(
            reason="sequence_parallel_size" if run.parallel.cp > 1 else ""
        ),
        "parallel.pp": cannot(1, "DeepSpeed needs a PipelineModule in the script"),
        "parallel.ep": cannot(1, "DeepSpeed needs its own MoE layers in the script"),
        "parallel.grad_reduce": differs("each_microbatch", "DeepSpeed decides when gradients are reduced"),
        "memory.offload": _offload,
        "memory.recompute": differs("none", "the script enables it: gradient_checkpointing_enable()"),
        "memory.recompute_every": differs(1, "the script chooses the layers"),
        "memory.on_oom": differs("stop", "DeepSpeed does not restart"),
        "memory.regather_tp_inputs": differs(False, "DeepSpeed saves the gathered inputs"),
        "observe.every_steps": write_as("steps_per_print"),
        "observe.tensorboard": unless(False, write_as("tensorboard.enabled")),
    },
    reasons={
        **dict.fromkeys(("model", "data", "optim", "schedule", "checkpoint", "seed", "device"), _SCRIPT),
        **dict.fromkeys(("adapter", "train_only"), _SCRIPT),
        **dict.fromkeys(("observe", "compile", "deterministic"), _SCRIPT),
        "resilience": "DeepSpeed leaves it to the launcher",
        "launch": "options of the deepspeed launcher and variables of the environment",
    },
)


def export_deepspeed(run: RunSpec) -> Exported:
    """The DeepSpeed file of a run."""
    exported = export_run(run, DEEPSPEED_FILE)
    document: dict[str, Any] = {
        "train_batch_size": run.data.batch_sequences,
        "train_micro_batch_size_per_gpu": run.data.microbatch_sequences,
        "gradient_accumulation_steps": run.accumulation,
        **exported.document,
    }
    if run.parallel.zero:
        document[_ZERO] |= {"overlap_comm": True, "contiguous_gradients": True}
    return Exported(document, exported.entries)
