"""Metrics, evaluation and what else a run logs."""

from pydantic import Field

from meshwright.spec.base import NonNegativeNumber, Positive, Spec


class EarlyStoppingSpec(Spec):
    """The run ends, and has finished, when its evaluation loss no longer falls."""

    patience: Positive
    """Evaluations in a row without a lower loss after which the run ends."""
    min_delta: NonNegativeNumber = 0.0
    """A loss counts as lower when it is below the lowest one by more than this."""


class EvaluateSpec(Spec):
    """Evaluation loss on the held-out sequences."""

    every_steps: Positive
    """Steps between evaluations."""
    early_stopping: EarlyStoppingSpec | None = None


class NoiseScaleSpec(Spec):
    """Estimate of the gradient noise scale: the batch beyond which more tokens per step help little."""

    every_steps: Positive
    """Steps between estimates; each estimate costs one more forward and backward."""


class HistogramsSpec(Spec):
    """Histograms of activations and gradients by power of two, in histograms.jsonl."""

    every_steps: Positive
    """Steps between histograms; each costs one more forward and backward."""


class WandbSpec(Spec):
    """Metrics, settings and facts sent to Weights & Biases; `WANDB_MODE=offline` writes files instead."""

    project: str = Field(default="meshwright", min_length=1)
    """The W&B project."""
    entity: str | None = None
    """The W&B user or team; null: the default of the account."""


class MlflowSpec(Spec):
    """Metrics, settings and facts logged to MLflow: a server, or a database file."""

    experiment: str = Field(default="meshwright", min_length=1)
    """The MLflow experiment; made where it is missing."""
    tracking_uri: str | None = None
    """Address of the tracking store; null: `MLFLOW_TRACKING_URI`, or else mlflow.db beside the run
    directory."""


class ObserveSpec(Spec):
    """Logging; metrics.jsonl is always written."""

    every_steps: Positive = 1
    """Steps between reads of the metrics from the device; other steps have no host sync."""
    tensorboard: bool = False
    """Also write TensorBoard event files."""
    wandb: WandbSpec | None = None
    mlflow: MlflowSpec | None = None
    evaluate: EvaluateSpec | None = None
    noise_scale: NoiseScaleSpec | None = None
    histograms: HistogramsSpec | None = None
