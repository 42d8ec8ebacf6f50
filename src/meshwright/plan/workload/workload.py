"""What is trained, apart from the layout: the model, the sequence, the number formats, the optimizer."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from meshwright.plan.memory.buckets import Buckets
from meshwright.plan.workload import flops
from meshwright.spec.model import ModelSpec
from meshwright.spec.parameters import Parameter, layer_parameters, parameters

Precision = Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4"]
AttentionKernel = Literal["flash", "unfused"]

# Bytes kept per parameter beside weight and gradient; vectors, scales and factors do not count.
OPTIMIZER_BYTES = {
    "adamw": 8.0,
    "adamw_8bit": 2.0,
    "adamw_bf16": 4.0,
    "sgd": 4.0,
    "adafactor": 4.0,
    "lion": 4.0,
    "muon": 4.0,
    "lars": 4.0,
    "lamb": 8.0,
    "none": 0.0,
}
# Rate that matmuls run at, and the format everything else stays in.
MATMUL_RATE = {"mxfp8": "fp8", "nvfp4": "fp4"}
WORKING_BYTES = {"fp64": 8.0, "fp32": 4.0, "tf32": 4.0}


@dataclass(frozen=True)
class Adapters:
    """LoRA: the base is frozen and kept in `base_bits`; pairs of thin matrices are trained beside it."""

    rank: int = 16
    base_bits: int = 16
    """16 (LoRA), 8 or 4 (QLoRA)."""


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters by how the axes cut them; per layer where it says so."""

    embedding: int
    head: int
    """0 when tied to the embedding."""
    dense_layer: int
    """Of one layer without experts: cut by tp."""
    moe_layer: int
    """Of one MoE layer apart from its routed experts: cut by tp."""
    experts_layer: int
    """Routed experts of one MoE layer: cut by ep and etp."""
    replicated_layer: int
    """Norms of one layer: on every rank of tp."""
    router_layer: int
    """Router of one MoE layer: on every rank of tp."""
    num_dense_layers: int
    num_moe_layers: int

    @property
    def total(self) -> int:
        """Every parameter once."""
        layers = self.num_dense_layers * self.dense_layer
        layers += self.num_moe_layers * (self.moe_layer + self.experts_layer + self.router_layer)
        return (
            self.embedding
            + self.head
            + layers
            + (self.num_dense_layers + self.num_moe_layers) * self.replicated_layer
        )


def _size(listed: list[Parameter], *kinds: str) -> int:
    return sum(parameter.num_elements for parameter in listed if parameter.kind in kinds)


def count_parameters(model: ModelSpec) -> ParameterCounts:
    """Parameter counts by placement, from the same list the model is built from."""
    outside = [parameter for parameter in parameters(model) if parameter.layer is None]
    num_moe = sum(model.is_moe_layer(layer) for layer in range(model.num_layers))
    moe = layer_parameters(model, model.num_layers - 1) if num_moe else []
    dense = layer_parameters(model, 0) if num_moe < model.num_layers else []
    return ParameterCounts(
        embedding=_size(outside, "embedding", "position", "norm", "bias"),
        head=_size(outside, "head"),
        dense_layer=_size(dense, "matrix", "bias"),
        moe_layer=_size(moe, "matrix", "bias"),
        experts_layer=_size(moe, "expert"),
        replicated_layer=_size(moe or dense, "norm"),
        router_layer=_size(moe, "router"),
        num_dense_layers=model.num_layers - num_moe,
        num_moe_layers=num_moe,
    )


@dataclass(frozen=True)
class Workload:
    """A model trained on sequences of one length in one precision."""

    model: ModelSpec
    sequence_length: int
    precision: Precision = "bf16"
    optimizer: str = "adamw"
    attention_kernel: AttentionKernel = "flash"
    adapters: Adapters | None = None
    compiled: bool = False
    narrow_layers: float = 1.0
    """Part of the layers whose linears a narrow recipe takes."""
    narrow_experts: bool = True
    """Routed experts are narrow too."""
    keeps_narrow_weights: bool = False
    """Weights are made narrow once per update and kept so beside themselves, as they lie and turned."""
    separate_documents: bool = False
    """Attention stays inside documents, so that it reads a mask."""
    imbalance: float = 1.0
    """Most loaded expert rank over the mean; 1 is forced or perfect balance."""

    @cached_property
    def counts(self) -> ParameterCounts:
        """Parameters by placement."""
        return count_parameters(self.model)

    @cached_property
    def buckets(self) -> Buckets:
        """The flat buffers in which gradients are reduced."""
        return Buckets(self.model)

    @property
    def matmul_rate(self) -> str:
        """The device rate that the block's matmuls run at."""
        return MATMUL_RATE.get(self.precision, self.precision)

    @property
    def wide_precision(self) -> str:
        """The format of attention, head and activations: 16 bits below an fp8 or fp4 recipe."""
        return "bf16" if self.is_narrow else self.precision

    @property
    def is_narrow(self) -> bool:
        """Matmuls run in 8 or 4 bits."""
        return self.precision in ("fp8", "mxfp8", "nvfp4")

    @property
    def working_bytes(self) -> float:
        """Bytes of one activation element."""
        return WORKING_BYTES.get(self.precision, 2.0)

    @property
    def has_mask(self) -> bool:
        """Attention reads a mask: of documents, or of a window that is shorter than the sequence."""
        window = self.model.attention.window
        return self.separate_documents or (window is not None and window < self.sequence_length)

    @property
    def keys_seen(self) -> float:
        """Keys a causal query sees on average."""
        return flops.mean_keys_seen(self.sequence_length, self.model.attention.window)

    @cached_property
    def model_flops_per_token(self) -> float:
        """Strict convention: causal half once, recompute never."""
        full = flops.flops_per_token(self.model, self.sequence_length)
        return full * 2.0 / 3.0 if self.adapters else full

    def with_precision(self, precision: Precision) -> "Workload":
        """The same in other number formats."""
        return replace(self, precision=precision)
