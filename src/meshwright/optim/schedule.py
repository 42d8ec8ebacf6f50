"""The learning rate as a pure function of the step."""

import math

from meshwright.spec import LrScalingSpec, OptimSpec, ScheduleSpec


def learning_rate(optim: OptimSpec, schedule: ScheduleSpec, step: int, *, batch_tokens: int) -> float:
    """The learning rate of update number `step` (from 0): scaled peak x warm-up x shape."""
    return peak_rate(optim, batch_tokens=batch_tokens) * rate_ratio(schedule, step)


def peak_rate(optim: OptimSpec, *, batch_tokens: int) -> float:
    """`optim.lr`, scaled with the batch size where a scaling rule is set."""
    return optim.lr * (batch_factor(optim.lr_scaling, batch_tokens) if optim.lr_scaling else 1.0)


def batch_factor(scaling: LrScalingSpec, batch_tokens: int) -> float:
    """Factor of the learning rate, above 1 for a batch larger than the reference."""
    ratio = batch_tokens / scaling.reference_batch_tokens
    return ratio if scaling.rule == "linear" else math.sqrt(ratio)


def rate_ratio(schedule: ScheduleSpec, step: int) -> float:
    """The learning rate of a step as a fraction of the peak, between 0 and 1."""
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    return _SHAPES[schedule.kind](schedule, step)


def _progress(schedule: ScheduleSpec, step: int) -> float:
    """0 at the end of the warm-up, 1 at the last step."""
    span = max(1, schedule.num_steps - 1 - schedule.warmup_steps)
    return min(1.0, (step - schedule.warmup_steps) / span)


def _cosine(schedule: ScheduleSpec, step: int) -> float:
    wave = 0.5 * (1.0 + math.cos(math.pi * _progress(schedule, step)))
    return schedule.min_lr_ratio + (1.0 - schedule.min_lr_ratio) * wave


def _linear(schedule: ScheduleSpec, step: int) -> float:
    return 1.0 - (1.0 - schedule.min_lr_ratio) * _progress(schedule, step)


def _constant(schedule: ScheduleSpec, step: int) -> float:
    return 1.0


def _wsd(schedule: ScheduleSpec, step: int) -> float:
    """Warm-up, stable, then a linear decay over the last `decay_steps`."""
    decay_begins = schedule.num_steps - schedule.decay_steps
    if step < decay_begins:
        return 1.0
    done = (step - decay_begins + 1) / schedule.decay_steps
    return 1.0 - (1.0 - schedule.min_lr_ratio) * done


def _inverse_sqrt(schedule: ScheduleSpec, step: int) -> float:
    return math.sqrt(max(1, schedule.warmup_steps) / max(1, step + 1))


_SHAPES = {
    "cosine": _cosine,
    "linear": _linear,
    "constant": _constant,
    "wsd": _wsd,
    "inverse_sqrt": _inverse_sqrt,
}
