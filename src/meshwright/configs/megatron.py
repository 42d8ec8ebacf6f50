"""Megatron-LM arguments (a shell script, or the arguments alone): what each one means in a run."""

import shlex
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
    off_or_refuse,
    only,
    refuse,
    same,
    translate,
)
from meshwright.errors import SpecError

_OFF = Outcome("mapped")
_KERNELS = "the fastest kernel of the device is used"
_OVERLAP = "communication always overlaps"
_DATA = "name a packed dataset with data.path (`data pack`)"
_RUN_DIR = "the run directory has checkpoints, metrics and events (`train --dir`)"
_LAUNCHER = "`meshwright launch` writes the lines of the launcher"
_FLAG_ON = (True, "true")


def _schedule(name: str) -> Outcome:
    return Outcome("mapped", {"schedule.kind": name})


_MODEL: dict[str, Rule] = {
    "num-layers": same("model.num_layers", int),
    "hidden-size": same("model.width", int),
    "ffn-hidden-size": same("model.mlp.width", int),
    "num-attention-heads": same("model.attention.num_heads", int),
    "num-query-groups": same("model.attention.num_kv_heads", int),
    "group-query-attention": only(_FLAG_ON, "num-query-groups says how many"),
    "kv-channels": same("model.attention.head_width", int),
    "max-position-embeddings": same("model.max_positions", int),
    "vocab-size": same("model.vocab_size", int),
    "padded-vocab-size": same("model.vocab_size", int),
    "make-vocab-size-divisible-by": no_setting("model.vocab_size is the padded size"),
    "position-embedding-type": choice(
        {"rope": {"model.positions": "rope"}, "learned_absolute": {"model.positions": "learned"}}
    ),
    "use-rotary-position-embeddings": same("model.positions", lambda _: "rope"),
    "rotary-base": same("model.rope.theta", float),
    "rotary-percent": only(("1.0", "1"), "rope turns whole heads"),
    "no-position-embedding": same("model.positions", lambda _: "rope"),
    "normalization": choice({"RMSNorm": {"model.norm": "rms"}, "LayerNorm": {"model.norm": "layer"}}),
    "norm-epsilon": same("model.norm_eps", float),
    "swiglu": same("model.mlp.kind", lambda _: "swiglu"),
    "disable-bias-linear": same("model.mlp.bias", lambda _: False),
    "add-qkv-bias": same("model.attention.qkv_bias", lambda _: True),
    "qk-layernorm": same("model.attention.qk_norm", lambda _: True),
    "untie-embeddings-and-output-weights": same("model.tied_head", lambda _: False),
    "attention-dropout": same("model.attention.dropout", float),
    "hidden-dropout": same("model.dropout", float),
    "init-method-std": same("model.init_std", float),
    "num-experts": same("model.moe.num_experts", int),
    "moe-router-topk": same("model.moe.top_k", int),
    "moe-ffn-hidden-size": same("model.moe.width", int),
    "moe-shared-expert-intermediate-size": same("model.moe.shared_width", int),
    "moe-aux-loss-coeff": same("model.moe.aux_loss", float),
    "moe-expert-capacity-factor": same("model.moe.capacity_factor", float),
    "moe-router-load-balancing-type": only(
        ("aux_loss", "seq_aux_loss", "none"), "mapped are aux_loss, seq_aux_loss and none"
    ),
    "moe-grouped-gemm": no_setting(_KERNELS),
    "moe-token-dispatcher-type": no_setting("experts are reached by all-to-all"),
    "moe-permute-fusion": no_setting(_KERNELS),
    "window-size": refuse("set model.attention.window"),
}
_PARALLEL: dict[str, Rule] = {
    "tensor-model-parallel-size": same("parallel.tp", int),
    "pipeline-model-parallel-size": same("parallel.pp", int),
    "context-parallel-size": same("parallel.cp", int),
    "cp-comm-type": choice(
        {
            "p2p": {"parallel.cp_kind": "ring"},
            "all_gather": {"parallel.cp_kind": "gather"},
            "a2a": {"parallel.cp_kind": "ulysses"},
            "a2a+p2p": {"parallel.cp_kind": "hierarchical"},
        }
    ),
    "expert-model-parallel-size": same("parallel.ep", int),
    "expert-tensor-parallel-size": same("parallel.etp", int),
    "sequence-parallel": only(_FLAG_ON, "sequence parallelism comes with tp"),
    "num-layers-per-virtual-pipeline-stage": fact(
        "layers_per_stage", int, reason="parallel.virtual_stages = layers / (pp x this)"
    ),
    "num-virtual-stages-per-pipeline-rank": fact("virtual", int, reason="parallel.virtual_stages"),
    "use-distributed-optimizer": fact("zero", lambda _: 1, reason="parallel.zero=1"),
    "use-torch-fsdp2": fact("zero", lambda _: 3, reason="parallel.zero=3"),
    "use-megatron-fsdp": fact("zero", lambda _: 3, reason="parallel.zero=3"),
    "data-parallel-sharding-strategy": choice(
        {
            "no_shard": Outcome("mapped", facts={"zero": 0}),
            "optim": Outcome("mapped", facts={"zero": 1}),
            "optim_grads": Outcome("mapped", facts={"zero": 2}),
            "optim_grads_params": Outcome("mapped", facts={"zero": 3}),
        }
    ),
    **{
        key: no_setting(_OVERLAP)
        for key in (
            "overlap-grad-reduce",
            "overlap-param-gather",
            "tp-comm-overlap",
            "overlap-p2p-communication",
        )
    },
    "distributed-backend": no_setting("NCCL on CUDA devices, gloo on the CPU"),
    "distributed-timeout-minutes": no_setting("timeouts are set by the runtime"),
    "use-tp-pp-dp-mapping": refuse("the mesh order is pp, dp, cp, tp from outer to inner"),
    "num-gpus": fact("ranks", int, reason="number of ranks"),
    "world-size": fact("ranks", int, reason="number of ranks"),
}
_TRAINING: dict[str, Rule] = {
    "micro-batch-size": same("data.microbatch_sequences", int),
    "global-batch-size": same("data.batch_sequences", int),
    "rampup-batch-size": refuse("set data.batch_ramp"),
    "seq-length": same("data.sequence_length", int),
    "train-iters": same("schedule.num_steps", int),
    "train-samples": fact("samples", int, reason="schedule.num_steps = samples / batch"),
    "lr": same("optim.lr", float),
    "min-lr": fact("min_lr", float, reason="schedule.min_lr_ratio = min-lr / lr"),
    "lr-decay-style": choice(
        {
            "constant": _schedule("constant"),
            "linear": _schedule("linear"),
            "cosine": _schedule("cosine"),
            "inverse-square-root": _schedule("inverse_sqrt"),
            "wsd": _schedule("wsd"),
        }
    ),
    "lr-warmup-iters": same("schedule.warmup_steps", int),
    "lr-warmup-fraction": fact("warmup_fraction", float, reason="schedule.warmup_steps"),
    "lr-warmup-samples": fact("warmup_samples", int, reason="schedule.warmup_steps"),
    "lr-decay-iters": fact("decay_iters", int, reason="must be train-iters"),
    "lr-decay-samples": fact("decay_samples", int, reason="must be train-samples"),
    "lr-wsd-decay-iters": same("schedule.decay_steps", int),
    "optimizer": choice(
        {"adam": {"optim.kind": "adamw"}, "sgd": {"optim.kind": "sgd"}, "muon": {"optim.kind": "muon"}}
    ),
    "adam-beta1": same("optim.beta1", float),
    "adam-beta2": same("optim.beta2", float),
    "adam-eps": same("optim.eps", float),
    "weight-decay": same("optim.weight_decay", float),
    "clip-grad": same("optim.max_grad_norm", float),
    "seed": same("seed", int),
    "deterministic-mode": same("deterministic", lambda _: True),
    "bf16": same("precision.compute", lambda _: "bf16"),
    "fp16": lambda _: Outcome("mapped", {"precision.compute": "fp16", "precision.loss_scale": {}}),
    "initial-loss-scale": same("precision.loss_scale.initial", float),
    "min-loss-scale": same("precision.loss_scale.minimum", float),
    "loss-scale-window": same("precision.loss_scale.growth_steps", lambda text: int(float(text))),
    "hysteresis": same("precision.loss_scale.hysteresis", int),
    "loss-scale": refuse("a fixed loss scale is not supported"),
    "fp8-format": choice({"hybrid": {"precision.fp8.recipe": "delayed"}}, otherwise="only hybrid is mapped"),
    "fp8-recipe": fact("fp8", str, reason="precision.fp8.recipe"),
    "fp8-amax-history-len": same("precision.fp8.history_steps", int),
    "fp8-amax-compute-algo": only(("max",), "the maximum of the history is used"),
    "fp8-param-gather": off_or_refuse("weights are gathered in bf16"),
    "attention-softmax-in-fp32": no_setting("softmax is computed in fp32"),
    "accumulate-allreduce-grads-in-fp32": same("precision.gradients", lambda _: "fp32"),
    "recompute-activations": same("memory.recompute", lambda _: "selective"),
    "recompute-granularity": choice(
        {"full": {"memory.recompute": "full"}, "selective": {"memory.recompute": "selective"}}
    ),
    "recompute-method": no_setting("memory.recompute_every chooses the layers"),
    "recompute-num-layers": no_setting("memory.recompute_every chooses the layers"),
    "optimizer-cpu-offload": fact("offload_optimizer", lambda _: True, reason="memory.offload=optimizer"),
}
_OTHER: dict[str, Rule] = {
    "save-interval": same("checkpoint.every_steps", int),
    "log-interval": same("observe.every_steps", int),
    "eval-interval": same("observe.evaluate.every_steps", int),
    "eval-iters": no_setting("data.holdout_sequences are kept for evaluation"),
    **{key: no_setting(_RUN_DIR) for key in ("save", "load", "tensorboard-dir", "ckpt-format", "async-save")},
    **{
        key: no_setting(_DATA)
        for key in (
            *("data-path", "split", "vocab-file", "merge-file", "tokenizer-type", "tokenizer-model"),
            *("data-cache-path", "mock-data", "num-workers", "no-create-attention-mask-in-dataloader"),
        )
    },
    **{
        key: no_setting(_KERNELS)
        for key in (
            *(
                "use-flash-attn",
                "attention-backend",
                "transformer-impl",
                "use-mcore-models",
                "cross-entropy-loss-fusion",
            ),
            *("no-gradient-accumulation-fusion", "no-masked-softmax-fusion", "no-bias-gelu-fusion"),
            *("no-bias-dropout-fusion", "no-rope-fusion", "cross-entropy-fusion-impl", "manual-gc"),
        )
    },
    "nproc_per_node": fact("per_node", int, reason="ranks = nproc_per_node x nnodes"),
    "nnodes": fact("nodes", int, reason="ranks = nproc_per_node x nnodes"),
    **{key: no_setting(_LAUNCHER) for key in ("node_rank", "master_addr", "master_port", "rdzv_id")},
    **{key: no_setting(_LAUNCHER) for key in ("rdzv_backend", "rdzv_endpoint", "node-rank")},
    **{key: no_setting(_LAUNCHER) for key in ("master-addr", "master-port")},
    "log-throughput": no_setting("metrics.jsonl has tokens/s and MFU of each step"),
    "wandb-project": same("observe.wandb.project", str),
    "no-async-tensor-model-parallel-allreduce": no_setting(_OVERLAP),
}
MEGATRON = Format(
    title="Megatron-LM",
    rules={**_MODEL, **_PARALLEL, **_TRAINING, **_OTHER},
    aliases={"nproc-per-node": "nproc_per_node"},
)
_FP8_RECIPES = {"delayed": "delayed", "tensorwise": "current", "blockwise": "blockwise", "mxfp8": "mxfp8"}


def parse_arguments(text: str, *, place: str) -> dict[str, Any]:
    """`--key value` pairs of a script; a flag without a value is True."""
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise SpecError(f"this is not a list of arguments: {error}", where=place) from None
    words = [word.strip("()") for word in words]
    found: dict[str, Any] = {}
    for index, word in enumerate(words):
        if not word.startswith("--") or len(word) == 2:
            continue
        key, equals, value = word[2:].partition("=")
        following = words[index + 1] if index + 1 < len(words) else "--"
        found[key] = value if equals else True if _is_no_value(following) else following
    if not found:
        raise SpecError(
            "there are no --arguments in this file", where=place, hint="see --from for other formats"
        )
    return found


def _is_no_value(word: str) -> bool:
    return not word or word.startswith(("--", "${")) or word in (";", "&&", "|")


def read_megatron(arguments: dict[str, Any]) -> Translation:
    """Megatron-LM arguments in the words of a run; what is left out has Megatron's default."""
    found = translate(arguments, MEGATRON)
    settings, facts = found.settings, found.facts
    if "per_node" in facts and "nodes" in facts:
        facts.setdefault("ranks", facts["per_node"] * facts["nodes"])
    settings.setdefault("precision.compute", "fp32")
    settings["parallel.zero"] = facts.get("zero", 0)
    settings.update(_model_defaults(settings), **_schedule_settings(settings, facts))
    settings.update(_stage_settings(settings, facts))
    if "fp8" in facts and facts["fp8"] in _FP8_RECIPES:
        settings["precision.fp8.recipe"] = _FP8_RECIPES[facts["fp8"]]
    if facts.get("offload_optimizer"):
        settings["memory.offload"] = ["optimizer"]
    return found


def _model_defaults(settings: Settings) -> Settings:
    """Fields of a GPT that Megatron derives from others; nothing where the file has no model."""
    width, heads = settings.get("model.width"), settings.get("model.attention.num_heads")
    if width is None or heads is None:
        return {}
    bias = settings.get("model.mlp.bias", True)
    kind = settings.get("model.mlp.kind", "gelu")
    inner = 4 * width if kind != "swiglu" else int(4 * width * 2 / 3) // 64 * 64
    positions = settings.get("model.positions", "learned")
    defaults: Settings = {
        "model.attention.num_kv_heads": heads,
        "model.attention.head_width": width // heads,
        "model.attention.qkv_bias": bias or settings.get("model.attention.qkv_bias", False),
        "model.attention.output_bias": bias,
        "model.mlp.width": inner,
        "model.mlp.kind": kind,
        "model.mlp.bias": bias,
        "model.norm": "layer",
        "model.positions": positions,
        "model.tied_head": True,
        "model.attention.dropout": 0.1,
        "model.dropout": 0.1,
    }
    if positions == "rope":
        defaults["model.rope.theta"] = 10_000.0
    return {key: value for key, value in defaults.items() if key not in settings or key.endswith("_bias")}


def _schedule_settings(settings: Settings, facts: Settings) -> Settings:
    result: Settings = {}
    batch = settings.get("data.batch_sequences")
    if "samples" in facts and batch:
        result["schedule.num_steps"] = facts["samples"] // batch
    steps = settings.get("schedule.num_steps", result.get("schedule.num_steps"))
    if "min_lr" in facts and "optim.lr" in settings:
        result["schedule.min_lr_ratio"] = facts["min_lr"] / settings["optim.lr"]
    if "warmup_fraction" in facts and steps:
        result["schedule.warmup_steps"] = round(facts["warmup_fraction"] * steps)
    if "warmup_samples" in facts and batch:
        result["schedule.warmup_steps"] = facts["warmup_samples"] // batch
    return result


def _stage_settings(settings: Settings, facts: Settings) -> Settings:
    """Interleaved 1F1B where a rank holds several stages."""
    virtual = facts.get("virtual", 1)
    if "layers_per_stage" in facts and "model.num_layers" in settings:
        stages = settings["model.num_layers"] // facts["layers_per_stage"]
        virtual = max(1, stages // settings.get("parallel.pp", 1))
    if virtual == 1:
        return {}
    return {"parallel.schedule": "interleaved_1f1b", "parallel.virtual_stages": virtual}
