"""What is trained, apart from the layout: the model, the sequence, the number formats, the optimizer."""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Literal

from meshwright.plan.memory.buckets import Buckets, buckets_of
from meshwright.plan.workload import flops
from meshwright.plan.workload.documents import DocumentLengths
from meshwright.spec.model import ModelSpec
from meshwright.spec.parameters import Parameter, layer_parameters, parameters
from meshwright.spec.placement import TP_SHARDED_DIMS

Precision = Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4"]
AttentionKernel = Literal["flash", "unfused"]

# Bytes of optimizer states per parameter; vectors, scales and factors do not count.
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
# Device rate of matmuls in a format, where it has another name; bytes of an activation, where it is not 2.
MATMUL_RATE = {"mxfp8": "fp8", "nvfp4": "fp4"}
WORKING_BYTES = {"fp64": 8.0, "fp32": 4.0, "tf32": 4.0}


@dataclass(frozen=True)
class Adapters:
    """LoRA: the base model is frozen, in `base_bits` per weight; pairs of low-rank matrices are trained."""

    rank: int = 16
    base_bits: float = 16
    """Bits of a frozen weight: 16 (LoRA) or 32, 8 or 4 (QLoRA)."""
    trained_share: float | None = None
    """Trained parameters over those of the base; None: those of all linears at this rank."""
    full_share: float = 0.0
    """Of them, the base's own that are trained in full, which are not stored as frozen ones."""
    packed_bits: float | None = None
    """Bits of a weight of the blocks that is stored in fp8 or NF4, with its scales; None: none is."""
    table_bits: float | None = None
    """Bits of a frozen weight that is not packed, such as those of the tables; None: as `base_bits`."""
    has_dropout: bool = False
    """Whether the input of every adapter is read and written once more, in each pass."""
    is_dora: bool = False
    """Whether outputs are scaled by a trained magnitude over the norm of W + B A."""
    trains_head: bool = False
    """Whether the head, or the table that is tied to it, is trained in full beside the adapters."""

    @property
    def has_fp32_tables(self) -> bool:
        """Whether frozen weights that are not packed, the token table among them, are in fp32."""
        return (self.base_bits if self.table_bits is None else self.table_bits) > 16

    @property
    def has_fp32_stream(self) -> bool:
        """Whether the residual stream is in fp32, as what is read from a table in fp32 beside NF4 weights."""
        return self.packed_bits is not None and self.has_fp32_tables

    @property
    def repeats_frozen(self) -> bool:
        """Whether frozen matmuls run a second time, on the dropped input: DoRA with dropout."""
        return self.is_dora and self.has_dropout

    @property
    def is_apart(self) -> bool:
        """Whether the matmul of a frozen linear never adds its adapter."""
        return self.is_dora or self.has_dropout

    def share(self, width: int) -> float:
        """Trained parameters over those of the base."""
        return 2.4 * self.rank / width if self.trained_share is None else self.trained_share


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters by the axes that shard them; those named `_layer` are of one layer."""

    embedding: int
    head: int
    """0 when tied to the embedding."""
    dense_layer: int
    """Matrices of one dense layer: sharded by tp."""
    moe_layer: int
    """Matrices of one MoE layer without its routed experts: sharded by tp."""
    experts_layer: int
    """Routed experts of one MoE layer: sharded by ep and etp."""
    replicated_layer: int
    """Norms of one layer: replicated over tp."""
    router_layer: int
    """Router of one MoE layer: replicated over tp."""
    num_dense_layers: int
    num_moe_layers: int

    @property
    def total(self) -> int:
        """Parameters of the model, each counted once."""
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


def _unsharded(listed: list[Parameter]) -> int:
    """Elements of matrices that tp does not shard: the down projections of latent attention."""
    matrices = (one for one in listed if one.kind == "matrix")
    return sum(one.num_elements for one in matrices if not _is_sharded(one.name))


def _is_sharded(name: str) -> bool:
    return any(fnmatchcase(name, row.pattern) for row in TP_SHARDED_DIMS)


def count_parameters(model: ModelSpec) -> ParameterCounts:
    """Parameter counts by placement, from the list that the model is built from."""
    outside = [parameter for parameter in parameters(model) if parameter.layer is None]
    num_moe = sum(model.is_moe_layer(layer) for layer in range(model.num_layers))
    moe = layer_parameters(model, model.num_layers - 1) if num_moe else []
    dense = layer_parameters(model, 0) if num_moe < model.num_layers else []
    return ParameterCounts(
        embedding=_size(outside, "embedding", "position", "norm", "bias"),
        head=_size(outside, "head"),
        dense_layer=_size(dense, "matrix", "bias") - _unsharded(dense),
        moe_layer=_size(moe, "matrix", "bias") - _unsharded(moe),
        experts_layer=_size(moe, "expert"),
        replicated_layer=_size(moe or dense, "norm") + _unsharded(moe or dense),
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
    low_precision_layers: float = 1.0
    """Share of the layers whose linears run in fp8 or fp4."""
    low_precision_experts: bool = False
    """Routed experts run in fp8 or fp4 too."""
    bf16_expert_gradients: bool = False
    """The weight gradients of these experts stay in bf16, and so do the inputs that they keep."""
    fp8_recipe: str = "current"
    """How fp8 linears are scaled, which changes what they keep."""
    keeps_low_precision_weights: bool = False
    """Weights are cast to fp8 once per update; the copies, plain and transposed, are kept beside them."""
    documents: DocumentLengths | None = None
    """Attention stays inside these documents (document masking, varlen); None joins them."""
    data_bytes: int = 0
    """Device memory that every rank keeps for the dataset."""

    @cached_property
    def counts(self) -> ParameterCounts:
        """Parameter counts by placement."""
        return count_parameters(self.model)

    @cached_property
    def buckets(self) -> Buckets:
        """The buckets in which gradients are reduced."""
        return buckets_of(self.model)  # pyright: ignore[reportArgumentType]  frozen specs are hashable

    @property
    def matmul_rate(self) -> str:
        """The device rate that the block's matmuls run at."""
        return MATMUL_RATE.get(self.precision, self.precision)

    @property
    def activation_precision(self) -> str:
        """The format of attention, head and activations: bf16 where the linears run in fp8 or fp4."""
        return "bf16" if self.is_low_precision else self.precision

    @property
    def is_low_precision(self) -> bool:
        """Whether linears run in fp8 or fp4."""
        return self.precision in ("fp8", "mxfp8", "nvfp4")

    @property
    def working_bytes(self) -> float:
        """Bytes of one activation element."""
        return WORKING_BYTES.get(self.precision, 2.0)

    @property
    def separate_documents(self) -> bool:
        """Whether attention stays inside documents."""
        return self.documents is not None

    @property
    def assumed(self) -> tuple[str, ...]:
        """What was assumed about the data: lengths of documents where no dataset is there to read them."""
        if self.documents is None or self.documents.source:
            return ()
        return (f"{self.documents} (data.path reads them from a dataset, data.documents=joined joins them)",)

    @property
    def window(self) -> int | None:
        """Keys that a query sees at most; None where that is the sequence."""
        window = self.model.attention.window
        return window if window is not None and window < self.sequence_length else None

    @property
    def has_mask(self) -> bool:
        """Whether attention stores a mask of documents or a window: in fp32, and with attention dropout."""
        needs_mask = self.working_bytes > 2.0 or self.model.attention.dropout > 0
        return needs_mask and (self.separate_documents or self.window is not None)

    @cached_property
    def keys_seen(self) -> float:
        """Mean number of keys that a causal query sees: of its document, its sequence or its window."""
        if self.documents is not None:
            return self.documents.keys_seen(self.model.attention.window)
        return flops.mean_keys_seen(self.sequence_length, self.model.attention.window)

    @cached_property
    def model_flops_per_token(self) -> float:
        """FLOPs by the strict convention: the causal half of attention once, recompute never."""
        full = flops.flops_per_token(self.model, self.sequence_length)
        return full * 2.0 / 3.0 if self.adapters else full
