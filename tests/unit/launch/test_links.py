"""Settings of NCCL and gloo become variables before ranks connect."""

from meshwright.launch.links import link_variables, set_links
from meshwright.spec import LaunchSpec
from meshwright.spec.launch import NcclSpec

FULL = LaunchSpec.model_validate(
    {
        "nccl": {
            "interfaces": ["ib0", "ib1"],
            "hcas": ["=mlx5_0", "=mlx5_1"],
            "ib_timeout": 22,
            "ib_retries": 7,
            "buffer_bytes": "8MiB",
            "algorithms": ["ring", "nvls_tree"],
            "protocols": ["ll128", "simple"],
            "min_ctas": 4,
            "max_ctas": 16,
            "high_priority_stream": True,
        },
        "gloo": {"interfaces": ["eth0"]},
    }
)
NCCL = {
    "NCCL_SOCKET_IFNAME": "ib0,ib1",
    "NCCL_IB_HCA": "=mlx5_0,=mlx5_1",
    "NCCL_IB_TIMEOUT": "22",
    "NCCL_IB_RETRY_CNT": "7",
    "NCCL_BUFFSIZE": "8388608",
    "NCCL_ALGO": "Ring,NVLSTree",
    "NCCL_PROTO": "LL128,Simple",
    "NCCL_MIN_CTAS": "4",
    "NCCL_MAX_CTAS": "16",
    "TORCH_NCCL_HIGH_PRIORITY": "1",
}


def test_every_setting_has_its_variable():
    environment: dict[str, str] = {}
    assert set_links(FULL, environment, is_on_gpu=True) == []
    assert environment == {**NCCL, "GLOO_SOCKET_IFNAME": "eth0"}
    fields = {key.rpartition(".")[2] for _, key in link_variables(FULL, is_on_gpu=True).values()}
    assert fields | {"infiniband"} == set(NcclSpec.model_fields)


def test_sockets_only():
    assert link_variables(LaunchSpec(nccl={"infiniband": False}), is_on_gpu=True) == {
        "NCCL_IB_DISABLE": ("1", "launch.nccl.infiniband")
    }


def test_defaults_set_nothing_and_cpus_no_nccl():
    assert link_variables(LaunchSpec(), is_on_gpu=True) == {}
    assert list(link_variables(FULL, is_on_gpu=False)) == ["GLOO_SOCKET_IFNAME"]


def test_a_variable_with_another_value_is_named():
    environment = {"NCCL_ALGO": "Tree", "GLOO_SOCKET_IFNAME": "eth0"}
    notes = set_links(FULL, environment, is_on_gpu=True)
    assert notes == [
        "NCCL_ALGO=Tree was set, and launch.nccl.algorithms says Ring,NVLSTree: the run file holds"
    ]
    assert environment["NCCL_ALGO"] == "Ring,NVLSTree"
