"""A run as an Accelerate YAML file: FSDP 2, DDP or one device, with tp and cp."""

from typing import Any

from meshwright.configs.entries import Entry
from meshwright.configs.export import (
    Exported,
    Target,
    Writer,
    Written,
    cannot,
    differs,
    export_run,
    unless,
    write_as,
)
from meshwright.spec.run import RunSpec

_SCRIPT = "your script says it: an Accelerate file has no such key"
_REASONS = {
    **dict.fromkeys(("model", "data", "optim", "schedule", "checkpoint", "observe", "seed"), _SCRIPT),
    **dict.fromkeys(("adapter", "train_only"), _SCRIPT),
    "resilience": "Accelerate leaves it to the launcher",
    "launch": "variables of the environment, which an Accelerate file does not have",
    "deterministic": _SCRIPT,
}
_STRATEGY = {3: True, 2: False}


def _zero(value: Any, run: RunSpec) -> Written:
    if value == 0:
        return Written(reason="distributed_type")
    if value == 1:
        reason = "Accelerate has no ZeRO-1 of torch; export to deepspeed, or use zero=2"
        return Written("refused", reason=reason)
    return Written(values={"fsdp_config.fsdp_reshard_after_forward": _STRATEGY[value]})


def _degree(name: str) -> Writer:
    """The degree of an axis; only FSDP files have a parallelism_config."""
    return lambda value, run: (
        Written(values={f"parallelism_config.parallelism_config_{name}_size": value})
        if uses_parallelism(run)
        else Written(reason="num_processes")
    )


def _cp_kind(value: Any, run: RunSpec) -> Written:
    if run.parallel.cp == 1:
        return Written()
    kinds = {"gather": "allgather", "ring": "alltoall"}
    if value not in kinds:
        return Written("refused", reason="Accelerate has cp by all-gather and by ring")
    return Written(values={"parallelism_config.parallelism_config_cp_comm_strategy": kinds[value]})


def _compute(value: Any, run: RunSpec) -> Written:
    words = {"bf16": "bf16", "fp16": "fp16", "fp32": "no"}
    if value not in words:
        return Written("refused", reason="Accelerate has no such mixed precision")
    return Written(values={"mixed_precision": "fp8" if run.precision.fp8 else words[value]})


def _fp8(value: Any, run: RunSpec) -> Written:
    backends = {"delayed": "TE", "current": "AO"}
    if value not in backends:
        return Written("refused", reason="Accelerate has delayed (TE) and current (AO) scaling")
    return Written(values={"fp8_config.backend": backends[value]})


def _offload(value: Any, run: RunSpec) -> Written:
    if not value:
        return Written()
    expected = ["optimizer", "parameters"] if run.parallel.zero == 3 else ["parameters"]
    if value != expected or run.parallel.zero < 2:
        return Written(
            "refused", reason="Accelerate offloads the parameters of FSDP, with their optimizer states"
        )
    return Written(values={"fsdp_config.fsdp_offload_params": True})


def _recompute(value: Any, run: RunSpec) -> Written:
    if value == "none":
        return Written()
    if run.parallel.zero < 2:
        return Written(
            "changed", reason="without FSDP the script enables it: gradient_checkpointing_enable()"
        )
    reason = "Accelerate recomputes whole blocks" if value == "selective" else ""
    status = "changed" if value == "selective" else "mapped"
    return Written(status, {"fsdp_config.fsdp_activation_checkpointing": True}, reason)


def _compile(value: Any, run: RunSpec) -> Written:
    if not value:
        return Written()
    values = {
        "dynamo_config.dynamo_backend": "INDUCTOR",
        "dynamo_config.dynamo_use_regional_compilation": True,
    }
    return Written(values=values)


def _device(value: Any, run: RunSpec) -> Written:
    return Written(values={"use_cpu": value == "cpu"})


ACCELERATE_FILE = Target(
    title="Accelerate",
    writers={
        "device": _device,
        "launch.bind": write_as("enable_cpu_affinity", lambda value: value == "numa"),
        "compile": _compile,
        "parallel.zero": _zero,
        "parallel.dp_replicate": _degree("dp_replicate"),
        "parallel.dp_shard": _degree("dp_shard"),
        "parallel.tp": unless(1, _degree("tp")),
        "parallel.cp": unless(1, _degree("cp")),
        "parallel.cp_kind": _cp_kind,
        "parallel.cp_inner": cannot(1, "Accelerate has no hierarchical cp"),
        "parallel.cp_stripes": cannot(1, "Accelerate shards a sequence in one zig-zag"),
        "parallel.pp": cannot(1, "Accelerate has no pipeline of torch"),
        "parallel.ep": cannot(1, "Accelerate has no expert parallelism"),
        "parallel.etp": cannot(1, "Accelerate has no expert parallelism"),
        "parallel.ep_overlap": cannot("none", "Accelerate has no expert parallelism"),
        "parallel.grad_reduce": differs("each_microbatch", "use `accelerator.no_sync` in the script"),
        "precision.compute": _compute,
        "precision.weights": cannot("fp32", "FSDP keeps fp32 weights; load the model in bf16 in the script"),
        "precision.gradients": cannot("fp32", "FSDP reduces in fp32 here; the script sets another dtype"),
        "precision.fp8.recipe": unless(None, _fp8),
        "precision.fp8.history_steps": unless(None, write_as("fp8_config.amax_history_len")),
        "precision.loss_scale.initial": differs(None, "GradScalerKwargs in the script"),
        "memory.offload": _offload,
        "memory.recompute": _recompute,
        "memory.recompute_every": differs(1, "Accelerate recomputes every block"),
        "memory.on_oom": differs("stop", "find_executable_batch_size in the script"),
        "memory.regather_tp_inputs": differs(False, "transformers saves the gathered inputs"),
        "optim.max_grad_norm": differs(None, "accelerator.clip_grad_norm_ in the script"),
    },
    reasons=_REASONS,
)


def uses_parallelism(run: RunSpec) -> bool:
    """Whether the file has a parallelism_config: with FSDP 2 and more than one axis."""
    parallel = run.parallel
    return parallel.zero >= 2 and (parallel.dp_replicate > 1 or parallel.tp > 1 or parallel.cp > 1)


def export_accelerate(run: RunSpec, *, num_nodes: int = 1) -> Exported:
    """The Accelerate file of a run; `num_nodes` is what the launcher starts it on."""
    exported = export_run(run, ACCELERATE_FILE)
    parallel = run.parallel
    entries = exported.entries
    if parallel.zero < 2 and (parallel.tp > 1 or parallel.cp > 1):
        reason = "Accelerate needs FSDP 2 for tp and cp: use zero=2 or 3"
        entries = (*entries, Entry("parallel.tp, parallel.cp", None, "refused", "", reason, is_blocking=True))
    document: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": _distributed_type(run),
        "machine_rank": 0,
        "num_machines": num_nodes,
        "num_processes": parallel.num_ranks,
        "rdzv_backend": "static",
        "same_network": True,
        "main_training_function": "main",
        "enable_cpu_affinity": run.launch.bind == "numa",
        **exported.document,
    }
    if parallel.zero >= 2:
        document["fsdp_config"] = {**_FSDP, **document.get("fsdp_config", {})}
    return Exported(document, entries)


_FSDP: dict[str, Any] = {
    "fsdp_version": 2,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_offload_params": False,
    "fsdp_activation_checkpointing": False,
}


def _distributed_type(run: RunSpec) -> str:
    if run.parallel.zero >= 2:
        return "FSDP"
    if run.parallel.num_ranks == 1:
        return "NO"
    return "MULTI_CPU" if run.device == "cpu" else "MULTI_GPU"
