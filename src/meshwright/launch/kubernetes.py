"""Manifests of a job for Kubernetes: JobSet, Kubeflow TrainJob and PyTorchJob."""

import re
from typing import Any, Literal, get_args

from meshwright.errors import LaunchError
from meshwright.launch.job import Job
from meshwright.launch.torchrun import torchrun_variables
from meshwright.spec.yaml_text import dump_yaml

ManifestKind = Literal["jobset", "trainjob", "pytorchjob"]
KINDS: tuple[ManifestKind, ...] = get_args(ManifestKind)
GPU = "nvidia.com/gpu"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_RUN_FOLDER = "/etc/meshwright"
_WORKERS = "workers"
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_GRACE_SECONDS = 180
_RESTARTS = 10
Tree = dict[str, Any]


def manifest_text(job: Job, run_text: str, *, kind: str, queue: str | None, volume: str | None) -> str:
    """The manifest, after a ConfigMap with the run file.

    `queue` is a queue of Kueue, which starts all pods or none (gang scheduling); `volume` is the
    PersistentVolumeClaim that is mounted at the working directory, for data and checkpoints.
    """
    if kind not in KINDS:
        raise LaunchError(f"there is no kind of job {kind!r}", where="--kind", hint=", ".join(KINDS))
    if job.site.container is None:
        raise LaunchError(
            "no image is named", where="--image", hint="--image registry.example/meshwright:0.1.0"
        )
    builders = {"jobset": _jobset, "trainjob": _trainjob, "pytorchjob": _pytorchjob}
    documents = [_config_map(job, run_text), builders[kind](job, queue, volume)]
    return "---\n".join(dump_yaml(document) for document in documents)


def object_name(job: Job) -> str:
    """The run's name as Kubernetes allows it: lower case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9-]+", "-", job.name.lower()).strip("-")[:50] or "run"


def _config_map(job: Job, run_text: str) -> Tree:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{object_name(job)}-run"},
        "data": {"run.yaml": run_text},
    }


def _metadata(job: Job, queue: str | None) -> Tree:
    labels = {"labels": {QUEUE_LABEL: queue}} if queue else {}
    return {"name": object_name(job), **labels}


def _container(job: Job, name: str, environment: list[Tree], volume: str | None) -> Tree:
    assert job.site.container is not None
    resources: Tree = {"cpu": str(job.ranks_per_node * job.site.cpus_per_gpu)}
    if job.is_on_gpus:
        resources[GPU] = str(job.ranks_per_node)
    if job.site.memory is not None:
        resources["memory"] = job.site.memory
    mounts = [{"name": "run", "mountPath": _RUN_FOLDER}, {"name": "shared-memory", "mountPath": "/dev/shm"}]
    mounts += [{"name": "work", "mountPath": job.working_dir}] if volume else []
    return {
        "name": name,
        "image": job.site.container.image,
        "command": ["torchrun", "-m", "meshwright", "train"],
        "args": [f"{_RUN_FOLDER}/run.yaml", "--dir", job.run_dir],
        **({"workingDir": job.working_dir} if volume else {}),
        "env": environment,
        "resources": {"requests": dict(resources), "limits": dict(resources)},
        "volumeMounts": mounts,
    }


def _pod(job: Job, container: Tree, volume: str | None) -> Tree:
    volumes: list[Tree] = [
        {"name": "run", "configMap": {"name": f"{object_name(job)}-run"}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
    ]
    volumes += [{"name": "work", "persistentVolumeClaim": {"claimName": volume}}] if volume else []
    return {
        "terminationGracePeriodSeconds": max(_GRACE_SECONDS, job.site.signal_seconds),
        "containers": [container],
        "volumes": volumes,
    }


def _variables(job: Job, own: Tree) -> list[Tree]:
    values = {
        "OMP_NUM_THREADS": str(job.site.cpus_per_gpu),
        **torchrun_variables(),
        **job.site.environment,
        **own,
    }
    return [{"name": name, "value": value} for name, value in values.items()]


def _jobset(job: Job, queue: str | None, volume: str | None) -> Tree:
    name = object_name(job)
    own = {
        "PET_NNODES": str(job.num_nodes),
        "PET_NPROC_PER_NODE": str(job.ranks_per_node),
        "PET_MASTER_ADDR": f"{name}-{_WORKERS}-0-0.{name}",
        "PET_MASTER_PORT": str(job.port),
    }
    rank = {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}}
    container = _container(job, "train", [*_variables(job, own), rank], volume)
    pod = {**_pod(job, container, volume), "restartPolicy": "Never"}
    template = {
        "spec": {
            "parallelism": job.num_nodes,
            "completions": job.num_nodes,
            "completionMode": "Indexed",
            "backoffLimit": 0,
            "template": {"spec": pod},
        }
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(job, queue),
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": _RESTARTS},
            "successPolicy": {"operator": "All"},
            "replicatedJobs": [{"name": _WORKERS, "replicas": 1, "template": template}],
        },
    }


def _trainjob(job: Job, queue: str | None, volume: str | None) -> Tree:
    """A TrainJob of the runtime torch-distributed, which sets the variables of torchrun itself."""
    container = _container(job, "node", _variables(job, {}), volume)
    pod = {
        "volumes": _pod(job, container, volume)["volumes"],
        "containers": [{"name": "node", "volumeMounts": container["volumeMounts"]}],
    }
    patch = {
        "manager": "meshwright.launch/kubernetes",
        "trainingRuntimeSpec": {
            "template": {
                "spec": {
                    "replicatedJobs": [{"name": "node", "template": {"spec": {"template": {"spec": pod}}}}]
                }
            }
        },
    }
    trainer = {
        "image": container["image"],
        "command": container["command"],
        "args": container["args"],
        "env": container["env"],
        "numNodes": job.num_nodes,
        "numProcPerNode": job.ranks_per_node,
        "resourcesPerNode": container["resources"],
    }
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(job, queue),
        "spec": {
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": "ClusterTrainingRuntime",
                "name": "torch-distributed",
            },
            "trainer": trainer,
            "runtimePatches": [patch],
        },
    }


def _pytorchjob(job: Job, queue: str | None, volume: str | None) -> Tree:
    """A PyTorchJob: the operator numbers master and workers and sets the variables of torchrun."""
    pod = _pod(job, _container(job, "pytorch", _variables(job, {}), volume), volume)
    replicas: Tree = {"Master": _replica(1, pod)}
    if job.num_nodes > 1:
        replicas["Worker"] = _replica(job.num_nodes - 1, pod)
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": _metadata(job, queue),
        "spec": {
            "nprocPerNode": str(job.ranks_per_node),
            "runPolicy": {
                "cleanPodPolicy": "Running",
                "backoffLimit": _RESTARTS,
                "schedulingPolicy": {"minAvailable": job.num_nodes},
            },
            "pytorchReplicaSpecs": replicas,
        },
    }


def _replica(count: int, pod: Tree) -> Tree:
    return {"replicas": count, "restartPolicy": "OnFailure", "template": {"spec": pod}}
