"""Types of the keywords of `fit` and `prepare`, for type checkers: the fields of their specs.

With the fields of nested specs that have a unique name. `nested_settings.py` has the types of nested specs.
"""

from collections.abc import Sequence
from typing import Literal, TypedDict

from meshwright.spec.checkpoint import CheckpointSpec, LocalSpec, UploadSpec
from meshwright.spec.launch import Binding, GlooSpec, LaunchSpec, NcclAlgorithm, NcclProtocol, NcclSpec
from meshwright.spec.memory import MemorySpec, Offloaded, OnOom, Recompute
from meshwright.spec.modules import DeviceKind, Readers, SamplesSpec
from meshwright.spec.nested_settings import (
    BadStepSettings,
    CheckpointSettings,
    EarlyStoppingSettings,
    ElasticSettings,
    EvaluateSettings,
    Fp8Settings,
    GlooSettings,
    GroupSettings,
    HistogramsSettings,
    LaunchSettings,
    LocalSettings,
    LossScaleSettings,
    LrScalingSettings,
    MemorySettings,
    MlflowSettings,
    NcclSettings,
    NoiseScaleSettings,
    ObserveSettings,
    OptimSettings,
    ParallelSettings,
    PrecisionSettings,
    ReplaySettings,
    ResilienceSettings,
    RestartSettings,
    SamplesSettings,
    ScheduleSettings,
    UploadSettings,
    WandbSettings,
)
from meshwright.spec.observe import (
    EarlyStoppingSpec,
    EvaluateSpec,
    HistogramsSpec,
    MlflowSpec,
    NoiseScaleSpec,
    ObserveSpec,
    WandbSpec,
)
from meshwright.spec.optim import (
    DecayedParameters,
    GroupSpec,
    LrScalingRule,
    LrScalingSpec,
    OptimizerKind,
    OptimSpec,
    StateDtype,
)
from meshwright.spec.parallel import CpKind, EpOverlap, GradReduce, ParallelSpec, Schedule
from meshwright.spec.precision import (
    CastWeights,
    ComputeDtype,
    Fp8Recipe,
    Fp8Spec,
    GradientDtype,
    LossScaleSpec,
    PrecisionSpec,
    WeightDtype,
)
from meshwright.spec.resilience import (
    BadStepAction,
    BadStepSpec,
    ElasticSpec,
    ReplayAction,
    ReplaySpec,
    ResilienceSpec,
    RestartSpec,
)
from meshwright.spec.schedule import ScheduleSpec


class ModuleSettings(TypedDict, total=False):
    """Keywords that `fit` and `prepare` have in common."""

    name: str
    seed: int
    deterministic: bool
    device: DeviceKind
    compile: bool
    blocks: str | None
    sync_batch_norm: bool
    parallel: ParallelSpec | ParallelSettings
    precision: PrecisionSpec | PrecisionSettings
    memory: MemorySpec | MemorySettings
    checkpoint: CheckpointSpec | CheckpointSettings
    launch: LaunchSpec | LaunchSettings
    bind: Binding
    threads: int | None
    nccl: NcclSpec | NcclSettings
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
    gloo: GlooSpec | GlooSettings
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
    virtual_stages: int
    ep: int
    etp: int
    ep_overlap: EpOverlap
    compute: ComputeDtype
    weights: WeightDtype
    gradients: GradientDtype
    loss_scale: LossScaleSpec | LossScaleSettings | None
    initial: float
    growth_factor: float
    backoff_factor: float
    growth_steps: int
    hysteresis: int
    minimum: float | None
    fp8: Fp8Spec | Fp8Settings | Fp8Recipe | None
    recipe: Fp8Recipe
    experts: bool
    bf16_layers_each_end: int
    cast_weights: CastWeights
    history_steps: int
    compare_every_steps: int | None
    min_gradient_cosine: float
    recompute: Recompute
    recompute_every: int
    offload: Sequence[Offloaded] | Offloaded
    regather_tp_inputs: bool
    on_oom: OnOom
    asynchronous: bool
    keep_last: int
    keep_every_steps: int | None
    keep_every_epochs: int | None
    keep_best: int | None
    local: LocalSpec | LocalSettings | None
    save_every_steps: int
    node_directory: str
    neighbour_copy: bool
    upload: UploadSpec | UploadSettings | None
    destination: str
    interval_steps: int | None
    keep_copies: int | None
    delete_local: bool
    start_from: str | None
    new_tokens: int
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
    rule: LrScalingRule
    reference_batch_tokens: int
    ema_decay: float | None


class FitSettings(ModuleSettings, total=False):
    """Keywords of `fit`: fields of `FitSpec`, and fields of its nested specs that have a unique name."""

    optim: OptimSpec | OptimSettings
    schedule: ScheduleSpec | ScheduleSettings
    data: SamplesSpec | SamplesSettings
    observe: ObserveSpec | ObserveSettings
    resilience: ResilienceSpec | ResilienceSettings
    num_steps: int
    warmup_steps: int
    min_lr_ratio: float
    decay_steps: int
    batch_samples: int
    microbatch_samples: int | None
    shuffle: bool
    max_epochs: int | None
    num_workers: int | Literal["auto"]
    on_device: bool
    readers: Readers
    sample_tokens: int
    tensorboard: bool
    wandb: WandbSpec | WandbSettings | None
    project: str
    entity: str | None
    mlflow: MlflowSpec | MlflowSettings | None
    experiment: str
    tracking_uri: str | None
    evaluate: EvaluateSpec | EvaluateSettings | None
    early_stopping: EarlyStoppingSpec | EarlyStoppingSettings | None
    patience: int
    min_delta: float
    noise_scale: NoiseScaleSpec | NoiseScaleSettings | None
    histograms: HistogramsSpec | HistogramsSettings | None
    step_timeout_seconds: float
    start_timeout_seconds: float
    evaluate_timeout_seconds: float | None
    save_timeout_seconds: float | None
    hang_factor: float | None
    compare_replicas_every_steps: int | None
    replay: ReplaySpec | ReplaySettings | None
    on_difference: ReplayAction
    data_retries: int
    straggler_factor: float | None
    restart: RestartSpec | RestartSettings
    elastic: ElasticSpec | ElasticSettings | None
    max_restarts: int
    max_cycles_without_progress: int
    backoff_seconds: float
    max_backoff_seconds: float
    single_rank: bool
    min_ranks: int
    spare_ranks: int
    failures_per_device: int
    return_seconds: float
    node_grace_seconds: float
    bad_steps: BadStepSpec | BadStepSettings
    action: BadStepAction
    spike_factor: float | None
    loss_spike_factor: float | None
    max_in_a_row: int


class LoopSettings(ModuleSettings, total=False):
    """Keywords of `prepare`: fields of `LoopSpec`, and fields of its nested specs that have a unique name."""

    accumulation: int
    optim: OptimSpec | OptimSettings | None
    readers: Readers
    schedule: Schedule
    every_steps: int | None
    kind: OptimizerKind
