"""A KubeRay manifest from a configuration: a RayJob whose cluster has a worker group for every pool."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megappo.cluster.node_names import PIN_POOLS, pool_resource
from megappo.config import Config, dump_config
from megappo.config.run import is_url
from megappo.launch.problems import LaunchError

RAY_VERSION = "2.60.0"
CONFIG_FOLDER = "/etc/megappo"


@dataclass(frozen=True, kw_only=True)
class KubeRayOptions:
    """What the configuration does not say.

    Attributes:
        image: with megappo and its stack installed.
        claim: PersistentVolumeClaim (ReadWriteMany) that holds model, data and run.dir.
        mount: where it is seen; the paths of the configuration are relative to the working directory or absolute.
        cpus_per_device, memory_gib_per_device: of worker pods.
        gpu: resource name of a GPU.
        resources: further ones of each pod with devices, by name, for instance ``rdma/hca``.
        host_network: pods use their node's network as it is, and InfiniBand with it.
        restarts: how often Kubernetes starts a failed run again; it resumes.
    """

    image: str
    claim: str
    mount: str
    name: str = ""
    cpus_per_device: int = 8
    memory_gib_per_device: int = 96
    gpu: str = "nvidia.com/gpu"
    resources: Mapping[str, int] = field(default_factory=dict)
    host_network: bool = False
    restarts: int = 3


def manifest(config: Config, options: KubeRayOptions) -> str:
    """YAML of a ConfigMap with the configuration, and of the RayJob.

    Raises:
        LaunchError: Kubernetes would not take it.
    """
    if found := tuple(_problems(config, options)):
        raise LaunchError(found)
    command = f"cd {shlex.quote(options.mount)} && exec megappo train {CONFIG_FOLDER}/config.yaml"
    name = options.name or _label(f"megappo-{Path(os.path.abspath(config.run.folder)).name}")
    map_name = f"{name}-config"
    pod = _Pods(options, map_name)
    workers = [
        {
            "groupName": _label(pool),
            "replicas": size.nodes,
            "minReplicas": size.nodes,
            "maxReplicas": size.nodes,
            "rayStartParams": {
                "num-cpus": str(size.devices_per_node + 2),
                # KubeRay puts it into a shell command as it is: hence the quotes within quotes.
                "resources": json.dumps(json.dumps({pool_resource(pool): 1})),
            },
            "template": pod.template(
                "ray-worker",
                cpus=size.devices_per_node * options.cpus_per_device,
                memory_gib=size.devices_per_node * options.memory_gib_per_device,
                gpus=size.devices_per_node if config.run.device == "cuda" else 0,
            ),
        }
        for pool, size in config.pools.items()
    ]
    head = {
        "rayStartParams": {"num-gpus": "0", "dashboard-host": "0.0.0.0"},
        "template": pod.template("ray-head", cpus=8, memory_gib=64, gpus=0),
    }
    job = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": name},
        "spec": {
            "entrypoint": f"bash -c {shlex.quote(command)}",
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": 600,
            "backoffLimit": options.restarts,
            "rayClusterSpec": {
                "rayVersion": RAY_VERSION,
                "authOptions": {"mode": "token"},
                "headGroupSpec": head,
                "workerGroupSpecs": workers,
            },
        },
    }
    stored = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": map_name},
        "data": {"config.yaml": dump_config(config)},
    }
    return yaml.safe_dump_all([stored, job], sort_keys=False, width=120)


def warnings(config: Config, options: KubeRayOptions) -> Iterator[str]:
    """What the pods may not see: they have the volume at the mount, and else what is in the image."""
    paths: dict[str, str | tuple[str, ...]] = {
        "model": config.model,
        "data.train": config.data.train,
        "data.validation": config.data.validation,
    }
    paths |= {f"roles.{name}.model": role.model for name, role in config.roles.megatron.items() if role.model}
    if not is_url(config.run.dir):
        paths["run.dir"] = config.run.dir
    mount = os.path.normpath(options.mount)
    for key, value in paths.items():
        for path in (value,) if isinstance(value, str) else value:
            # Relative ones are relative to the mount, which is the working directory.
            if not Path(os.path.normpath(os.path.join(mount, path))).is_relative_to(mount):
                yield f"{key}: {path} is not under --mount {mount}: pods see it only if the image has it"


def _problems(config: Config, options: KubeRayOptions) -> Iterator[str]:
    if not options.mount.startswith("/"):
        yield f"--mount: {options.mount}: Kubernetes mounts at absolute paths: give /{options.mount}"
    groups: dict[str, str] = {}
    for pool in config.pools:
        other = groups.setdefault(_label(pool), pool)
        if other != pool:
            yield (
                f"pools.{pool}: its worker group would have the name of that of pools.{other}, {_label(pool)}, as "
                "Kubernetes knows only lower case, digits and dashes: rename one"
            )
    if options.resources and config.run.device != "cuda":
        named = ", ".join(f"{name}={count}" for name, count in options.resources.items())
        yield f"--resource {named}: is for pods with devices, and run.device is {config.run.device}: leave it out"
    if options.gpu in options.resources:
        yield f"--resource: {options.gpu} follows from pools.*.devices_per_node: leave it out"


@dataclass(frozen=True)
class _Pods:
    options: KubeRayOptions
    map_name: str

    def template(self, container: str, *, cpus: int, memory_gib: int, gpus: int) -> Mapping[str, Any]:
        options = self.options
        amounts: dict[str, Any] = {"cpu": str(cpus), "memory": f"{memory_gib}Gi"}
        if gpus:
            amounts |= {options.gpu: str(gpus), **{name: str(count) for name, count in options.resources.items()}}
        # Network cards read and write memory that is locked, which containers may otherwise not do.
        locking = {"securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}} if gpus and options.resources else {}
        network = {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"} if options.host_network else {}
        return {
            "spec": {
                **network,
                "containers": [
                    {
                        "name": container,
                        "image": options.image,
                        "workingDir": options.mount,
                        "env": [{"name": PIN_POOLS, "value": "1"}],
                        "resources": {"limits": amounts, "requests": amounts},
                        **locking,
                        "volumeMounts": [
                            {"name": "shared", "mountPath": options.mount},
                            {"name": "config", "mountPath": CONFIG_FOLDER},
                            {"name": "shm", "mountPath": "/dev/shm"},
                        ],
                    }
                ],
                "volumes": [
                    {"name": "shared", "persistentVolumeClaim": {"claimName": options.claim}},
                    {"name": "config", "configMap": {"name": self.map_name}},
                    # Ray's object store and NCCL: half of the pod's memory, to which it counts.
                    {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{max(memory_gib // 2, 1)}Gi"}},
                ],
            }
        }


def _label(text: str) -> str:
    """As Kubernetes names things: lower case, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40].strip("-") or "megappo"
