"""Files and lines of every launcher, as golden text, and what is refused before anything is written."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.golden_files import assert_golden

from meshwright.errors import LaunchError, RunError
from meshwright.launch.docker import docker_lines
from meshwright.launch.files import Choices, prepare_job, write_files
from meshwright.launch.hosts import Host, hosts_of, parse_hosts, read_hosts, require_alive
from meshwright.launch.job import Job, clock, nodes_of
from meshwright.launch.kubernetes import KINDS, manifest_text, object_name
from meshwright.launch.mpi import mpirun_line
from meshwright.launch.sites import SiteSpec, built_in_sites, changed_site, find_site
from meshwright.launch.slurm import sbatch_text, srun_line
from meshwright.launch.submit import log_text, read_submitted, status_text, submit_slurm
from meshwright.launch.torchrun import torchrun_lines
from meshwright.spec.text import load_run

LAUNCHERS = Path(sys.prefix) / "launchers"
APPTAINER = {"kind": "apptainer", "image": "/images/pytorch.sif", "mounts": ("/data:/data",)}
PYXIS = {"kind": "pyxis", "image": "nvidia+pytorch+26.01-py3.sqsh"}
ENROOT = {"kind": "enroot", "image": "pytorch.sqsh"}


def job_on(site: str = "leonardo", **changes: Any) -> Job:
    site_changes = {name: changes.pop(name) for name in list(changes) if name in SiteSpec.model_fields}
    values: dict[str, Any] = {
        "name": "llama-8b",
        "run_file": "launch/llama-8b/run.yaml",
        "run_dir": "runs/llama-8b",
        "folder": "launch/llama-8b",
        "working_dir": "/work/project",
        "num_nodes": 2,
        "ranks_per_node": 4,
        "site": changed_site(find_site(site), site_changes),
        "seconds": 20_000.0,
    }
    return Job(**{**values, **changes})


SBATCH = {
    "leonardo": job_on(account="IscrC_course"),
    "leonardo_apptainer": job_on(container=APPTAINER, modules=["cuda/12.6", "nccl"], setup=["source env.sh"]),
    "lisa_pyxis": job_on("lisa", container=PYXIS, num_nodes=4, ranks_per_node=8, seconds=10**6),
    "berzelius_enroot": job_on("berzelius", container=ENROOT, num_nodes=1, ranks_per_node=8, qos="high"),
    "generic_cpu": job_on("generic", is_on_gpus=False, environment={"GLOO_SOCKET_IFNAME": "eth0"}),
}


@pytest.mark.parametrize("name", SBATCH)
def test_sbatch_files(name: str):
    text = sbatch_text(SBATCH[name])
    assert_golden(f"launch/{name}.sbatch", text)
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


def test_lines_of_the_other_launchers():
    job, hosts = job_on(), ["lrdn0001", "lrdn0002"]
    lines = [
        srun_line(job),
        mpirun_line(job, hosts, "launch/llama-8b/hosts"),
        *torchrun_lines(job, hosts),
        *torchrun_lines(job, hosts, rendezvous="c10d"),
        *docker_lines(job_on(container={"kind": "docker", "image": "meshwright:0.1.0"}), hosts),
    ]
    assert_golden("launch/lines.txt", "\n".join(lines) + "\n")


@pytest.mark.parametrize("kind", KINDS)
def test_manifests(kind: str):
    job = job_on(container={"kind": "docker", "image": "registry.example/meshwright:0.1.0"}, memory=None)
    text = manifest_text(job, "name: llama-8b\n", kind=kind, queue="gpus", volume="scratch")
    assert_golden(f"launch/{kind}.yaml", text)
    config_map, document = yaml.safe_load_all(text)
    assert config_map["data"] == {"run.yaml": "name: llama-8b\n"}
    assert document["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "gpus"}


@pytest.mark.parametrize("kind", ["jobset", "pytorchjob"])
def test_pods_and_jobs_follow_the_schemas_of_kubernetes(kind: str, tmp_path: Path):
    if not (LAUNCHERS / "kubernetes_validate").exists():
        pytest.skip(
            f"NOT CHECKED: kubernetes-validate is not installed in {LAUNCHERS} (`make env` installs it)"
        )
    job = job_on(container={"kind": "docker", "image": "x"}, memory=None)
    config_map, document = yaml.safe_load_all(manifest_text(job, "a: 1\n", kind=kind, queue=None, volume="v"))
    if kind == "jobset":
        inner = document["spec"]["replicatedJobs"][0]["template"]["spec"]
        inner = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": inner}
    else:
        pod = document["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
        inner = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": pod}
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump_all([config_map, inner]))
    code = (
        "import sys, yaml, kubernetes_validate as k\n"
        "for each in yaml.safe_load_all(open(sys.argv[1])): k.validate(each, k.latest_version(), strict=True)"
    )
    environment = {**os.environ, "PYTHONPATH": str(LAUNCHERS)}
    command = [sys.executable, "-W", "ignore", "-c", code, str(file)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


PUBLISHED = yaml.safe_load((Path(__file__).parents[2] / "data/kubernetes_fields.yaml").read_text())


def unknown_fields(found: Any, published: Any, where: str) -> list[str]:
    """The fields of a manifest that the published types do not have; items of lists are looked into."""
    if not isinstance(published, dict):
        return []
    if isinstance(found, list):
        return [field for one in found for field in unknown_fields(one, published, f"{where}[]")]
    missing = [f"{where}.{name}" for name in found if name not in published]
    known = [name for name in found if name in published]
    return missing + [
        field for name in known for field in unknown_fields(found[name], published[name], f"{where}.{name}")
    ]


def test_a_field_that_is_not_published_is_found():
    spec = {"replicatedJobs": [{"name": "x", "replica": 1}], "netwrk": {}}
    published = PUBLISHED["jobset"]["spec"]
    assert unknown_fields(spec, published, "spec") == ["spec.netwrk", "spec.replicatedJobs[].replica"]


@pytest.mark.parametrize("kind", KINDS)
def test_fields_of_the_custom_resources(kind: str):
    job = job_on(container={"kind": "docker", "image": "x"})
    *_, document = yaml.safe_load_all(manifest_text(job, "", kind=kind, queue=None, volume="v"))
    assert unknown_fields(document["spec"], PUBLISHED[kind]["spec"], "spec") == []
    assert {key: document[key] for key in ("apiVersion", "kind")} == {
        key: PUBLISHED[kind][key] for key in ("apiVersion", "kind")
    }
    if kind == "trainjob":  # the runtime sets these itself and refuses a job that does
        names = {each["name"] for each in document["spec"]["trainer"]["env"]}
        assert not names & {"PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR"}


def test_time_limits():
    assert clock(75) == "01:15:00"
    assert clock(24 * 60) == "1-00:00:00"
    assert job_on(seconds=3600).limit_minutes == 90  # 1.25 h and ten minutes, in quarters of an hour
    assert job_on(seconds=10**6).limit_minutes == 24 * 60
    assert job_on(seconds=None).limit_minutes == 24 * 60
    assert job_on(time_limit_seconds=90).limit_minutes == 2
    assert job_on(seconds=10**6).num_jobs == 12
    assert job_on(seconds=3600).num_jobs == 1


def test_nodes():
    assert nodes_of(8, 4, None) == (2, 4)
    assert nodes_of(3, 4, None) == (1, 3)
    assert nodes_of(8, 4, 4) == (4, 2)
    with pytest.raises(LaunchError, match="8 ranks, and 3 nodes of 4 GPUs have 12") as caught:
        nodes_of(8, 4, 3)
    assert "use 2 or 4 or 8 nodes" in caught.value.hint
    with pytest.raises(LaunchError, match="6 ranks"):
        nodes_of(6, 4, 4)


def test_hosts(tmp_path: Path):
    file = tmp_path / "hosts"
    file.write_text("# the cluster\nnode1 slots=4\nnode2:8\nnode3\n\n")
    assert read_hosts(file) == [Host("node1", 4), Host("node2", 8), Host("node3")]
    assert parse_hosts("a, b") == [Host("a"), Host("b")]
    assert hosts_of(job_on(), read_hosts(file), "x") == ["node1", "node2"]


@pytest.mark.parametrize(
    ("text", "fact"),
    [("", "names no host"), ("a b c\n", "is not a host"), ("a\na\n", "named twice")],
)
def test_wrong_hostfiles(tmp_path: Path, text: str, fact: str):
    file = tmp_path / "hosts"
    file.write_text(text)
    with pytest.raises(LaunchError, match=fact):
        read_hosts(file)


def test_too_few_hosts_or_slots():
    with pytest.raises(LaunchError, match="needs 2 nodes, and 1 hosts are named"):
        hosts_of(job_on(), [Host("a")], "--hosts")
    with pytest.raises(LaunchError, match="a has 2 slots, and each node takes 4 ranks"):
        hosts_of(job_on(), [Host("a", 2), Host("b")], "--hosts")


def test_a_dead_host_is_named():
    with pytest.raises(LaunchError, match="host localhost does not answer on port 1:"):
        require_alive(["localhost"], port=1)


def test_sites(tmp_path: Path):
    assert {"generic", "leonardo", "lisa", "berzelius"} == set(built_in_sites())
    own = tmp_path / "own.toml"
    own.write_text('gpus_per_node = 2\npartition = "long"\n[container]\nkind = "pyxis"\nimage = "x"\n')
    assert find_site(str(own)).partition == "long"
    own.write_text("gpu_per_node = 2\n")
    with pytest.raises(LaunchError, match="gpu_per_node is not a key of a profile") as caught:
        find_site(str(own))
    assert "gpus_per_node" in caught.value.hint
    with pytest.raises(LaunchError, match="there is no site 'leonarda'"):
        find_site("leonarda")
    with pytest.raises(LaunchError, match="cannot be read"):
        find_site(str(tmp_path / "none.toml"))


def test_names_of_objects():
    assert object_name(job_on(name="Llama-3.1_8B")) == "llama-3-1-8b"


def test_what_a_launcher_needs_is_refused_early(tmp_path: Path):
    run = load_run("llama-3.1-8b-8gpu")
    for via in ("docker", "kubernetes"):
        with pytest.raises(LaunchError, match="no image is named"):
            prepare_job(via, job_on(), run, Choices())
    with pytest.raises(LaunchError, match="there is no launcher 'pbs'"):
        prepare_job("pbs", job_on(), run, Choices())
    (tmp_path / "file").write_text("")
    with pytest.raises(LaunchError, match="cannot be written"):
        write_files(tmp_path / "file" / "folder", {"a": "b"})


def program(folder: Path, name: str, script: str) -> None:
    file = folder / name
    file.write_text(f"#!/bin/bash\n{script}\n")
    file.chmod(0o755)


def test_submit_status_and_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    program(tmp_path, "sbatch", "echo '4711;cluster'")
    program(tmp_path, "scontrol", "echo 'JobId=4711 JobState=PENDING Reason=Priority'")
    job = submit_slurm(tmp_path / "job.sbatch", tmp_path)
    assert job.job_id == "4711"
    assert read_submitted(str(tmp_path)) == job
    assert status_text(job) == "4711 PENDING (Priority)"
    with pytest.raises(LaunchError, match="there is no output yet"):
        log_text(job, 5)
    Path(job.log).write_text("one\ntwo\nthree\n")
    assert log_text(job, 2) == "two\nthree"
    program(tmp_path, "scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert status_text(job).startswith("4711 GONE")


def test_a_refusal_of_sbatch_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    program(tmp_path, "sbatch", "echo 'sbatch: error: invalid partition specified: x' >&2; exit 1")
    with pytest.raises(RunError, match="sbatch refused: sbatch: error: invalid partition specified: x"):
        submit_slurm(tmp_path / "job.sbatch", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(LaunchError, match="sbatch is not installed here"):
        submit_slurm(tmp_path / "job.sbatch", tmp_path)
    with pytest.raises(LaunchError, match="no job was submitted from here"):
        read_submitted(str(tmp_path))


@pytest.mark.parametrize("name", built_in_sites())
def test_every_number_of_a_site_has_a_source(name: str):
    """A value that nobody has published is marked as to be filled in by the site."""
    site = built_in_sites()[name]
    numbers = ("gpus_per_node", "cpus_per_gpu", "max_hours", "memory", "partition")
    assert {key for key in numbers if getattr(site, key) is not None} == set(site.sources)
    assert all(site.sources.values())
