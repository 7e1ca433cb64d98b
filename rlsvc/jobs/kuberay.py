"""A job as a KubeRay RayJob: a cluster of its own, as large as the run's specification asks for, gone when it is over.

The manifest goes with those under deployments/kuberay: the same images, secret, claim and labels, so that the network
policies there select its pods. The specification travels in the job's environment, the working tree in the image or by
a URL. A failed job is tried again on a new cluster (`backoffLimit`), and goes on from the run's last commit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlsvc import __version__
from rlsvc.core.errors import UserError
from rlsvc.spec.run import RunSpec

RAY_VERSION = "2.60.0"
UID = 10001
SHARED = "/shared"
POD_CPUS, GPU_POD_CPUS = 4, 8
HEAD_CPUS = 2
LABELS = {"app.kubernetes.io/part-of": "rlsvc"}


@dataclass(frozen=True)
class Group:
    """Pods of one kind.

    Attributes:
        name: of the group.
        replicas: how many.
        image: of the container.
        cpus, memory_gib, gpus: of each pod.
        robot: id of the arm beside the pod's node, "" for none.
    """

    name: str
    replicas: int
    image: str
    cpus: int
    memory_gib: int
    gpus: int = 0
    robot: str = ""


def groups_of(spec: RunSpec | None, asks: Mapping[str, float], image: str | None) -> list[Group]:
    """The workers that hold a run, or a command that asks for so much.

    Args:
        spec: of the run, with its GPUs as numbers; None for another command.
        asks: what the job holds by resource.
        image: of all pods; None takes ours by the kind of pod.
    """
    gpus, cpus = asks.get("GPU", 0.0), asks.get("CPU", 0.0)
    largest_gpu, cpus_beside_gpu, largest_cpu = gpus, 0.0, cpus
    if spec is not None:
        per_rank = spec.learner.gpus_per_rank or 0.0
        largest_gpu = max(per_rank, spec.evaluation.gpus or 0.0, spec.rollout.inference_gpus or 0.0)
        largest_cpu = max(spec.learner.cpus_per_rank, spec.rollout.cpus_per_worker, spec.evaluation.cpus_per_worker)
        cpus_beside_gpu = spec.learner.ranks * spec.learner.cpus_per_rank if per_rank else 0.0
    groups = []
    if gpus:
        size = max(1, math.ceil(largest_gpu))
        count = math.ceil(gpus / size - 1e-9)
        each = max(GPU_POD_CPUS, math.ceil(cpus_beside_gpu / count))
        groups.append(Group("gpu", count, image or _image("cuda"), each, 8 * each, size))
    if rest := cpus - cpus_beside_gpu:
        each = max(POD_CPUS, math.ceil(largest_cpu))
        groups.append(Group("cpu", math.ceil(rest / each - 1e-9), image or _image("cpu"), each, 4 * each))
    groups += [
        Group(f"robot-{name.removeprefix('robot:')}".lower(), 1, image or _image("robot"), 2, 4, robot=name)
        for name in asks
        if name.startswith("robot:")
    ]
    return groups


def ray_job(
    name: str, entrypoint: str, runtime_env: Mapping[str, Any], groups: list[Group], image: str | None, retries: int
) -> dict[str, Any]:
    """The manifest.

    Args:
        name: of the RayJob.
        entrypoint: of the job.
        runtime_env: Ray's.
        groups: of workers.
        image: of the head; None takes ours.
        retries: further attempts, each on a new cluster.
    """
    head = Group("head", 1, image or _image("cpu"), HEAD_CPUS, 8)
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": _dns(name), "labels": LABELS},
        "spec": {
            "entrypoint": entrypoint,
            "runtimeEnvYAML": to_yaml(dict(runtime_env)),
            "submissionMode": "K8sJobMode",
            "backoffLimit": retries,
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": 600,
            "rayClusterSpec": {
                "rayVersion": RAY_VERSION,
                "authOptions": {"mode": "token", "secretName": "rlsvc-ray-token"},
                "headGroupSpec": {
                    "serviceType": "ClusterIP",
                    "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0"},
                    "template": _pod(head),
                },
                "workerGroupSpecs": [_workers(group) for group in groups],
            },
        },
    }


def gpus_as_numbers(spec: RunSpec) -> RunSpec:
    """The run as it is placed on a cluster that is made for it: a card for each rank where it names GPUs, else none."""
    from rlsvc.train.cluster import place_on_gpus

    named = spec.device == "gpu" or spec.learner.gpus_per_rank
    return place_on_gpus(spec, float(spec.learner.ranks) if named else 0.0)


def to_yaml(value: Any) -> str:
    """As a person would write it: texts of several lines as such, no anchors."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

        def text(self, data: str) -> yaml.ScalarNode:
            return self.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)

    Dumper.add_representer(str, Dumper.text)
    return yaml.dump(value, Dumper=Dumper, sort_keys=False, width=120)


def check_root(root: str) -> None:
    """Refuse a folder that would be lost with the cluster. Raises UserError."""
    if "://" not in root and not root.startswith(f"{SHARED}/"):
        raise UserError(
            f"root: got {root}, which goes with the RayJob's cluster; take a folder below {SHARED}, where the "
            "claim rlsvc-shared is mounted, or a URL such as s3://bucket/runs"
        )


def _image(kind: str) -> str:
    return f"rlsvc/{kind}:{__version__}"


def _dns(name: str) -> str:
    """A job's id as a name of Kubernetes."""
    return "".join(c if c.isalnum() or c == "-" else "-" for c in name.lower()).strip("-")[:47]


def _workers(group: Group) -> dict[str, Any]:
    params = {"num-gpus": str(group.gpus)} if group.gpus else {}
    if group.robot:
        # A string in a string: KubeRay puts it on a shell's command line.
        params["resources"] = f'"{{\\"{group.robot}\\": 1}}"'
    count = {"replicas": group.replicas, "minReplicas": group.replicas, "maxReplicas": group.replicas}
    return {"groupName": group.name, **count, "rayStartParams": params, "template": _pod(group)}


def _pod(group: Group) -> dict[str, Any]:
    head = group.name == "head"
    amounts = {"cpu": str(group.cpus), "memory": f"{group.memory_gib}Gi"}
    amounts |= {"nvidia.com/gpu": str(group.gpus)} if group.gpus else {}
    ports = {"gcs": 6379, "dashboard": 8265} if head else {"agent": 52365}
    path, port = ("/api/gcs_healthz", "dashboard") if head else ("/api/local_raylet_healthz", "agent")
    probe = {"httpGet": {"path": path, "port": port}, "periodSeconds": 5}
    container = {
        "name": "ray-head" if head else "ray-worker",
        "image": group.image,
        "imagePullPolicy": "IfNotPresent",
        "ports": [{"name": name, "containerPort": number} for name, number in {**ports, "serve": 8000}.items()],
        "env": [{"name": "RLSVC_CACHE", "value": f"{SHARED}/cache"}],
        "resources": {"requests": amounts, "limits": amounts},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "startupProbe": {**probe, "failureThreshold": 60},
        "livenessProbe": {**probe, "timeoutSeconds": 5, "failureThreshold": 60},
        "readinessProbe": {**probe, "timeoutSeconds": 5, "failureThreshold": 3},
        "volumeMounts": [
            {"name": "shared", "mountPath": SHARED},
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "ray", "mountPath": "/tmp"},
        ],
    }
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True, "runAsUser": UID, "runAsGroup": UID, "fsGroup": UID,
            "fsGroupChangePolicy": "OnRootMismatch", "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [
            {"name": "shared", "persistentVolumeClaim": {"claimName": "rlsvc-shared"}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "4Gi"}},
            {"name": "ray", "emptyDir": {"sizeLimit": "50Gi"}},
        ],
    }  # fmt: skip
    if group.gpus:
        spec["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    if group.robot:
        spec["nodeSelector"] = {"rlsvc/robot": group.robot.removeprefix("robot:")}
        spec["tolerations"] = [{"key": "rlsvc/robot", "operator": "Exists", "effect": "NoSchedule"}]
    return {"metadata": {"labels": LABELS}, "spec": spec}
