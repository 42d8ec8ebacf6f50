"""Types of nested specs as keywords of `fit` and `prepare`: one TypedDict per spec, for type checkers."""

from collections.abc import Sequence
from typing import Literal, Required, TypedDict

from meshwright.spec.checkpoint import LocalSpec, UploadSpec
from meshwright.spec.launch import Binding, GlooSpec, NcclAlgorithm, NcclProtocol, NcclSpec
from meshwright.spec.memory import Offloaded, OnOom, Recompute
from meshwright.spec.modules import Readers
from meshwright.spec.observe import (
    EarlyStoppingSpec,
    EvaluateSpec,
    HistogramsSpec,
    MlflowSpec,
    NoiseScaleSpec,
    WandbSpec,
)
from meshwright.spec.optim import (
    DecayedParameters,
    GroupSpec,
    LrScalingRule,
    LrScalingSpec,
    OptimizerKind,
    StateDtype,
)
from meshwright.spec.parallel import CpKind, EpOverlap, GradReduce, Schedule
from meshwright.spec.precision import (
    CastWeights,
    ComputeDtype,
    Fp8Recipe,
    Fp8Spec,
    GradientDtype,
    LossScaleSpec,
    WeightDtype,
)
from meshwright.spec.resilience import (
    BadStepAction,
    BadStepSpec,
    ElasticSpec,
    ReplayAction,
    ReplaySpec,
    RestartSpec,
)
from meshwright.spec.schedule import ScheduleKind


class ParallelSettings(TypedDict, total=False):
    """Fields of `ParallelSpec`."""

    dp_replicate: int
    dp_shard: int
    zero: int
    grad_reduce: GradReduce
    cp: int
    cp_kind: CpKind
    cp_inner: int
    cp_stripes: int
    tp: int
    pp: int
    schedule: Schedule
    virtual_stages: int
    ep: int
    etp: int
    ep_overlap: EpOverlap


class LossScaleSettings(TypedDict, total=False):
    """Fields of `LossScaleSpec`."""

    initial: float
    growth_factor: float
    backoff_factor: float
    growth_steps: int
    hysteresis: int
    minimum: float | None


class Fp8Settings(TypedDict, total=False):
    """Fields of `Fp8Spec`."""

    recipe: Fp8Recipe
    experts: bool
    bf16_layers_each_end: int
    cast_weights: CastWeights
    history_steps: int
    compare_every_steps: int | None
    min_gradient_cosine: float


class PrecisionSettings(TypedDict, total=False):
    """Fields of `PrecisionSpec`."""

    compute: ComputeDtype
    weights: WeightDtype
    gradients: GradientDtype
    loss_scale: LossScaleSpec | LossScaleSettings | None
    fp8: Fp8Spec | Fp8Settings | Fp8Recipe | None


class MemorySettings(TypedDict, total=False):
    """Fields of `MemorySpec`."""

    recompute: Recompute
    recompute_every: int
    offload: Sequence[Offloaded] | Offloaded
    regather_tp_inputs: bool
    on_oom: OnOom


class UploadSettings(TypedDict, total=False):
    """Fields of `UploadSpec`."""

    destination: str
    interval_steps: int | None
    keep_copies: int | None
    delete_local: bool


class LocalSettings(TypedDict, total=False):
    """Fields of `LocalSpec`."""

    save_every_steps: int
    node_directory: str
    neighbour_copy: bool


class CheckpointSettings(TypedDict, total=False):
    """Fields of `CheckpointSpec`."""

    every_steps: int | None
    asynchronous: bool
    keep_last: int
    keep_every_steps: int | None
    keep_every_epochs: int | None
    keep_best: int | None
    local: LocalSpec | LocalSettings | None
    upload: UploadSpec | UploadSettings | None
    start_from: str | None
    new_tokens: int


class GroupSettings(TypedDict, total=False):
    """Fields of `GroupSpec`."""

    pattern: Required[str]
    lr_factor: float
    weight_decay: float | None


class LrScalingSettings(TypedDict, total=False):
    """Fields of `LrScalingSpec`."""

    rule: LrScalingRule
    reference_batch_tokens: int


class OptimSettings(TypedDict, total=False):
    """Fields of `OptimSpec`."""

    kind: OptimizerKind
    lr: float
    beta1: float
    beta2: float
    eps: float
    state: StateDtype
    momentum: float
    trust_coefficient: float
    weight_decay: float
    weight_decay_on: DecayedParameters
    groups: Sequence[GroupSpec | GroupSettings]
    max_grad_norm: float | None
    lr_scaling: LrScalingSpec | LrScalingSettings | None
    ema_decay: float | None


class ScheduleSettings(TypedDict, total=False):
    """Fields of `ScheduleSpec`."""

    num_steps: int
    kind: ScheduleKind
    warmup_steps: int
    min_lr_ratio: float
    decay_steps: int


class SamplesSettings(TypedDict, total=False):
    """Fields of `SamplesSpec`."""

    batch_samples: int
    microbatch_samples: int | None
    shuffle: bool
    max_epochs: int | None
    num_workers: int | Literal["auto"]
    on_device: bool
    readers: Readers
    sample_tokens: int


class EarlyStoppingSettings(TypedDict, total=False):
    """Fields of `EarlyStoppingSpec`."""

    patience: int
    min_delta: float


class EvaluateSettings(TypedDict, total=False):
    """Fields of `EvaluateSpec`."""

    every_steps: int
    early_stopping: EarlyStoppingSpec | EarlyStoppingSettings | None


class NoiseScaleSettings(TypedDict, total=False):
    """Fields of `NoiseScaleSpec`."""

    every_steps: int


class HistogramsSettings(TypedDict, total=False):
    """Fields of `HistogramsSpec`."""

    every_steps: int


class WandbSettings(TypedDict, total=False):
    """Fields of `WandbSpec`."""

    project: str
    entity: str | None


class MlflowSettings(TypedDict, total=False):
    """Fields of `MlflowSpec`."""

    experiment: str
    tracking_uri: str | None


class ObserveSettings(TypedDict, total=False):
    """Fields of `ObserveSpec`."""

    every_steps: int
    tensorboard: bool
    wandb: WandbSpec | WandbSettings | None
    mlflow: MlflowSpec | MlflowSettings | None
    evaluate: EvaluateSpec | EvaluateSettings | None
    noise_scale: NoiseScaleSpec | NoiseScaleSettings | None
    histograms: HistogramsSpec | HistogramsSettings | None


class RestartSettings(TypedDict, total=False):
    """Fields of `RestartSpec`."""

    max_restarts: int
    max_cycles_without_progress: int
    backoff_seconds: float
    max_backoff_seconds: float
    single_rank: bool


class ElasticSettings(TypedDict, total=False):
    """Fields of `ElasticSpec`."""

    min_ranks: int
    spare_ranks: int
    failures_per_device: int
    return_seconds: float
    node_grace_seconds: float


class BadStepSettings(TypedDict, total=False):
    """Fields of `BadStepSpec`."""

    action: BadStepAction
    spike_factor: float | None
    loss_spike_factor: float | None
    max_in_a_row: int


class ReplaySettings(TypedDict, total=False):
    """Fields of `ReplaySpec`."""

    every_steps: int
    on_difference: ReplayAction


class ResilienceSettings(TypedDict, total=False):
    """Fields of `ResilienceSpec`."""

    step_timeout_seconds: float
    start_timeout_seconds: float
    evaluate_timeout_seconds: float | None
    save_timeout_seconds: float | None
    hang_factor: float | None
    compare_replicas_every_steps: int | None
    replay: ReplaySpec | ReplaySettings | None
    data_retries: int
    straggler_factor: float | None
    restart: RestartSpec | RestartSettings
    elastic: ElasticSpec | ElasticSettings | None
    bad_steps: BadStepSpec | BadStepSettings


class NcclSettings(TypedDict, total=False):
    """Fields of `NcclSpec`."""

    interfaces: Sequence[str]
    infiniband: bool
    hcas: Sequence[str]
    ib_timeout: int | None
    ib_retries: int | None
    buffer_bytes: int | None
    algorithms: Sequence[NcclAlgorithm]
    protocols: Sequence[NcclProtocol]
    min_ctas: int | None
    max_ctas: int | None
    high_priority_stream: bool


class GlooSettings(TypedDict, total=False):
    """Fields of `GlooSpec`."""

    interfaces: Sequence[str]


class LaunchSettings(TypedDict, total=False):
    """Fields of `LaunchSpec`."""

    bind: Binding
    threads: int | None
    nccl: NcclSpec | NcclSettings
    gloo: GlooSpec | GlooSettings
