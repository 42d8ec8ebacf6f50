"""How ranks use their host and their links: cores, threads, and settings of NCCL and gloo."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from meshwright.spec.base import Positive, Spec
from meshwright.units import parse_bytes

Binding = Literal["numa", "none"]
NcclAlgorithm = Literal["ring", "tree", "collnet_direct", "collnet_chain", "nvls", "nvls_tree", "pat"]
NcclProtocol = Literal["ll", "ll128", "simple"]
# An interface or adapter, or a prefix; NCCL reads `=name` as exactly this one and `^name` as all others.
LinkName = Annotated[str, Field(pattern=r"^[=^]?[A-Za-z0-9][A-Za-z0-9._:@-]*$")]
BufferBytes = Annotated[int | None, Field(ge=1, le=2**32), BeforeValidator(parse_bytes)]


class NcclSpec(Spec):
    """Settings of NCCL, the library of collectives between GPUs; what is not set stays NCCL's own choice."""

    interfaces: tuple[LinkName, ...] = ()
    """Network interfaces of its sockets, such as ib0 (NCCL_SOCKET_IFNAME)."""
    infiniband: bool = True
    """Use InfiniBand or RoCE where there is one; false uses sockets only (NCCL_IB_DISABLE)."""
    hcas: tuple[LinkName, ...] = ()
    """InfiniBand adapters (HCAs) that are used, such as mlx5_0 (NCCL_IB_HCA)."""
    ib_timeout: int | None = Field(default=None, ge=1, le=22)
    """InfiniBand timeout as its exponent: 4.096 us x 2^n (NCCL_IB_TIMEOUT)."""
    ib_retries: int | None = Field(default=None, ge=1, le=7)
    """Retries of an InfiniBand message before it is an error (NCCL_IB_RETRY_CNT)."""
    buffer_bytes: BufferBytes = None
    """Buffer of each channel between two GPUs (NCCL_BUFFSIZE)."""
    algorithms: tuple[NcclAlgorithm, ...] = ()
    """Algorithms that NCCL may choose from (NCCL_ALGO)."""
    protocols: tuple[NcclProtocol, ...] = ()
    """Protocols that NCCL may choose from (NCCL_PROTO)."""
    min_ctas: int | None = Field(default=None, ge=1, le=64)
    """Fewest thread blocks (CTAs, so SMs) of one collective (NCCL_MIN_CTAS)."""
    max_ctas: int | None = Field(default=None, ge=1, le=64)
    """Most thread blocks (CTAs, so SMs) of one collective (NCCL_MAX_CTAS)."""
    high_priority_stream: bool = False
    """Collectives run on CUDA streams of high priority (TORCH_NCCL_HIGH_PRIORITY)."""


class GlooSpec(Spec):
    """Settings of gloo, the library of collectives between CPUs."""

    interfaces: tuple[LinkName, ...] = ()
    """Network interfaces, such as eth0 (GLOO_SOCKET_IFNAME)."""


class LaunchSpec(Spec):
    """Cores, threads and links of the ranks. They change the speed of a run, not what it computes."""

    bind: Binding = "numa"
    """numa: each rank runs on the cores of its GPU's NUMA node (CPU affinity), unless the launcher has bound
    it already; CPU ranks are spread over the NUMA nodes. none: the operating system decides."""
    threads: Positive | None = None
    """CPU threads of each rank (OMP_NUM_THREADS); null: what the launcher set, otherwise its share of the
    cores of the host."""
    nccl: NcclSpec = NcclSpec()
    gloo: GlooSpec = GlooSpec()
