"""The tags under which trackers show the figures of a step."""

from dataclasses import asdict

from meshwright.observe.metrics import StepMetrics

_TAGS = {
    "loss": "loss/train",
    "eval_loss": "loss/eval",
    "aux_loss": "loss/aux",
    "grad_norm": "optimizer/grad_norm",
    "lr": "optimizer/lr",
    "loss_scale": "optimizer/loss_scale",
    "skipped": "optimizer/skipped",
    "noise_scale_tokens": "optimizer/noise_scale_tokens",
    "tokens": "speed/tokens",
    "step_seconds": "speed/step_seconds",
    "data_wait_seconds": "speed/data_wait_seconds",
    "reduce_wait_seconds": "speed/reduce_wait_seconds",
    "tokens_per_second": "speed/tokens_per_second",
    "tflops_per_gpu": "speed/tflops_per_gpu",
    "mfu": "speed/mfu",
    "peak_bytes": "memory/peak_bytes",
    "expert_load_max": "experts/load_max",
    "expert_load_min": "experts/load_min",
    "reward_margin": "preference/reward_margin",
    "reward_accuracy": "preference/reward_accuracy",
}


def tagged_scalars(metrics: StepMetrics) -> dict[str, float]:
    """The figures of a step that are not None, by tag."""
    values = asdict(metrics)
    return {tag: float(values[name]) for name, tag in _TAGS.items() if values[name] is not None}
