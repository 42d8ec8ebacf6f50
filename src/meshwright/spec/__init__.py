"""What was asked for: frozen, typed, complete descriptions of a run. Imports no torch."""

from meshwright.spec.adapter import AdapterRankSpec, AdapterSpec
from meshwright.spec.checkpoint import CheckpointSpec
from meshwright.spec.data import (
    BatchRampSpec,
    BlendPartSpec,
    BlockShuffleSpec,
    CurriculumSpec,
    DataSpec,
    SyntheticSpec,
)
from meshwright.spec.launch import GlooSpec, LaunchSpec, NcclSpec
from meshwright.spec.memory import MemorySpec
from meshwright.spec.model import (
    AttentionSpec,
    LatentSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    RopeScalingSpec,
    RopeSpec,
)
from meshwright.spec.observe import EvaluateSpec, HistogramsSpec, NoiseScaleSpec, ObserveSpec
from meshwright.spec.optim import GroupSpec, LrScalingSpec, OptimSpec
from meshwright.spec.parallel import MESH_ORDER, ParallelSpec
from meshwright.spec.precision import Fp8Spec, LossScaleSpec, PrecisionSpec
from meshwright.spec.preference import PreferenceSpec
from meshwright.spec.resilience import ResilienceSpec
from meshwright.spec.run import RunSpec
from meshwright.spec.schedule import ScheduleSpec

__all__ = [
    "MESH_ORDER",
    "AdapterRankSpec",
    "AdapterSpec",
    "AttentionSpec",
    "BatchRampSpec",
    "BlendPartSpec",
    "BlockShuffleSpec",
    "CheckpointSpec",
    "CurriculumSpec",
    "DataSpec",
    "EvaluateSpec",
    "Fp8Spec",
    "GlooSpec",
    "GroupSpec",
    "HistogramsSpec",
    "LatentSpec",
    "LaunchSpec",
    "LossScaleSpec",
    "LrScalingSpec",
    "MemorySpec",
    "MlpSpec",
    "ModelSpec",
    "MoeSpec",
    "NcclSpec",
    "NoiseScaleSpec",
    "ObserveSpec",
    "OptimSpec",
    "ParallelSpec",
    "PrecisionSpec",
    "PreferenceSpec",
    "ResilienceSpec",
    "RopeScalingSpec",
    "RopeSpec",
    "RunSpec",
    "ScheduleSpec",
    "SyntheticSpec",
]
