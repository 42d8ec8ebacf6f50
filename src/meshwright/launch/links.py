"""Settings of NCCL and gloo as variables of the environment, set before ranks connect. Imports no torch."""

from collections.abc import MutableMapping

from meshwright.spec.launch import LaunchSpec, NcclSpec

# NCCL's own spelling of the algorithms and protocols.
_NCCL_NAMES = {
    "ring": "Ring",
    "tree": "Tree",
    "collnet_direct": "CollnetDirect",
    "collnet_chain": "CollnetChain",
    "nvls": "NVLS",
    "nvls_tree": "NVLSTree",
    "pat": "PAT",
    "ll": "LL",
    "ll128": "LL128",
    "simple": "Simple",
}


def link_variables(spec: LaunchSpec, *, is_on_gpu: bool) -> dict[str, tuple[str, str]]:
    """(value, key of the run file) by variable, for the settings that are set."""
    found = {"GLOO_SOCKET_IFNAME": (",".join(spec.gloo.interfaces), "launch.gloo.interfaces")}
    if is_on_gpu:
        found |= _nccl_variables(spec.nccl)
    return {name: (value, key) for name, (value, key) in found.items() if value}


def _nccl_variables(nccl: NcclSpec) -> dict[str, tuple[str, str]]:
    def number(value: int | None) -> str:
        return "" if value is None else str(value)

    values = {
        "interfaces": ("NCCL_SOCKET_IFNAME", ",".join(nccl.interfaces)),
        "infiniband": ("NCCL_IB_DISABLE", "" if nccl.infiniband else "1"),
        "hcas": ("NCCL_IB_HCA", ",".join(nccl.hcas)),
        "ib_timeout": ("NCCL_IB_TIMEOUT", number(nccl.ib_timeout)),
        "ib_retries": ("NCCL_IB_RETRY_CNT", number(nccl.ib_retries)),
        "buffer_bytes": ("NCCL_BUFFSIZE", number(nccl.buffer_bytes)),
        "algorithms": ("NCCL_ALGO", ",".join(_NCCL_NAMES[name] for name in nccl.algorithms)),
        "protocols": ("NCCL_PROTO", ",".join(_NCCL_NAMES[name] for name in nccl.protocols)),
        "min_ctas": ("NCCL_MIN_CTAS", number(nccl.min_ctas)),
        "max_ctas": ("NCCL_MAX_CTAS", number(nccl.max_ctas)),
        "high_priority_stream": ("TORCH_NCCL_HIGH_PRIORITY", "1" if nccl.high_priority_stream else ""),
    }
    return {variable: (value, f"launch.nccl.{field}") for field, (variable, value) in values.items()}


def set_links(spec: LaunchSpec, environment: MutableMapping[str, str], *, is_on_gpu: bool) -> list[str]:
    """Set the variables; the run file holds. Returns a line for each that had another value."""
    notes: list[str] = []
    for name, (value, key) in link_variables(spec, is_on_gpu=is_on_gpu).items():
        before = environment.get(name, value)
        if before != value:
            notes.append(f"{name}={before} was set, and {key} says {value}: the run file holds")
        environment[name] = value
    return notes
