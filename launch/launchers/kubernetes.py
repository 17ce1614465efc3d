"""Writes the manifest of a job for Kubernetes, as a JobSet: one replicated job for each cluster.

One more replicated job is for the launcher itself, `external`. Its exit status is that of the job.
Its pod has a name in the JobSet's headless service. The other pods start when its controller
listens. The run folder is on a volume that all pods share, the run's settings are a ConfigMap, and
the job's key is a Secret. Kubernetes numbers the pods of each replicated job from 0
(JOB_COMPLETION_INDEX); HOLMES_PROCESSES lists their processes.
"""

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import yaml
from pydantic import Field

from holmesjax.errors import ConfigError, FatalError, HolmesError
from holmesjax.job import CONFIG, TOPOLOGY, Job
from holmesjax.lease import Lease
from holmesjax.plan.device_pool import DevicePool
from holmesjax.transport import connections
from holmesjax.yaml_files import Document
from launch.launchers.components import Component, make_components, read_options
from launch.launchers.table import LauncherOptions

MANIFEST, KEY = "jobset.yaml", "kubernetes.key"
LAUNCHER = "launcher"  # the replicated job of the launcher
SETTINGS_DIR, KEY_DIR = "/etc/holmes/settings", "/etc/holmes/key"
# The exit status of processes that would fail again in the same way.
MISTAKE = [HolmesError.exit_status]  # a pod that ends with this would do so again
# JobSet counts all restarts. The launcher counts those without a new step, and ends with 1.
MAX_RESTARTS = 1000
MAX_NAME = 40  # of 63 for the name of a pod, which has those of the cluster and the pod in it
Name = Annotated[str, Field(min_length=1, strict=True)]
Object = dict[str, Any]  # of Kubernetes


@dataclass(frozen=True, kw_only=True, slots=True)
class KubernetesCluster:
    """The options of the pods of a cluster."""

    name: Name
    node_selector: dict[str, str] = field(default_factory=dict)
    limits: dict[str, str] = field(default_factory=dict)  # besides GPUs: {"rdma/hca": "1"}


@dataclass(frozen=True, kw_only=True, slots=True)
class KubernetesOptions:
    """The options file."""

    image: Name  # with this version of HolmesJAX
    claim: Name  # the PersistentVolumeClaim of the run folders; ReadWriteMany
    mount: Name = "/runs"  # where it is in the pods
    folder: Name = "/workspace"  # the checkout in the image
    python: Name = "python"
    namespace: Name = "default"
    port: Annotated[int, Field(ge=1024, le=65535, strict=True)] = 7000  # of the launcher
    gpu: Name = "nvidia.com/gpu"  # what the cluster calls a GPU
    clusters: tuple[KubernetesCluster, ...] = ()


def write(
    job: Job, options_file: str | None, *, max_restarts: int | None, allow: Sequence[str] = ()
) -> int:
    """Writes manifest and key into the run folder and says what to do with them.

    The pods have the checkpoints, so `allow` is checked there. JobSet starts the launcher again
    with the same arguments. A change that was allowed once needs no permission then (`resume`).

    Raises ConfigError or Mistakes for the options.
    """
    if options_file is None:
        fix = "write --options KUBERNETES.yaml; docs/kubernetes.md has an example"
        problem = "the launcher `kubernetes` needs an image and a volume"
        raise ConfigError("--options", problem, found="nothing", fix=fix)
    options = read_options(KubernetesOptions, options_file, job.topology, _paths_are_absolute)
    name = _label(job.run_dir.absolute().name)
    pool = job.pool(os.environ)
    print(*job.describe(pool), sep="\n", flush=True)
    path, key = job.run_dir.absolute() / MANIFEST, job.run_dir.absolute() / KEY
    with Lease(job.run_dir):
        job.save()
        objects = manifest(
            job, options, name=name, max_restarts=max_restarts, allow=allow, pool=pool
        )
        path.write_text(yaml.safe_dump_all(objects, sort_keys=False, width=100))
        connections.make_key_file(key)
    kubectl = f"kubectl --namespace {options.namespace}"
    print(f"written     {path}")
    print("start it, on a cluster with JobSet installed:")
    print(
        f"  {kubectl} create secret generic {name}-key --from-file=job.key={shlex.quote(str(key))}"
    )
    print(f"  {kubectl} apply -f {shlex.quote(str(path))}")
    print("see what it prints, and end it:")
    print(f"  {kubectl} logs -f job/{name}-{LAUNCHER}-0")
    print(f"  {kubectl} delete jobset/{name} configmap/{name} secret/{name}-key")
    return 0


def for_job(job: Job, options: LauncherOptions) -> int:
    """Writes the manifest; `table` calls it."""
    return write(job, options.options, max_restarts=options.max_restarts, allow=options.allow)


def _paths_are_absolute(document: Document, file: KubernetesOptions) -> Iterator[HolmesError]:
    for name, path in (("mount", file.mount), ("folder", file.folder)):
        if not path.startswith("/"):
            fix = f"write it as /{path}"
            problem = "must be a path from the root of the image"
            yield document.mistake((name,), problem, found=path, fix=fix)


def _label(text: str) -> str:
    """Returns a name that Kubernetes accepts.

    >>> _label("Quick_start.2")
    'quick-start-2'
    """
    label = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:MAX_NAME].rstrip("-")
    return label if label[:1].isalpha() else f"run-{label}".rstrip("-")


def manifest(
    job: Job,
    options: KubernetesOptions,
    *,
    name: str,
    max_restarts: int | None,
    allow: Sequence[str] = (),
    pool: DevicePool | None = None,
) -> list[Object]:
    """Returns the objects to create, besides the Secret `<name>-key` with the key `job.key`.

    Args:
      job: the job that the objects run.
      options: settings of the cluster, as their file has them.
      name: the name of the objects; a DNS label.
      max_restarts: restarts without a new step; None: the default of schedulers.
      allow: settings that may differ from the checkpoint's.
      pool: of the GPUs, if they are not to have the default.
    """
    components = make_components(job)
    own = {"namespace": options.namespace}
    files = {file: (job.run_dir / file).read_text() for file in (CONFIG, TOPOLOGY)}
    settings = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, **own},
        "data": files,
    }
    memory = pool.variables if pool else {}  # the launcher plans with the pool of the workers
    jobs = [_launcher(job, options, name, max_restarts, allow, memory)]
    jobs += [_workers(job, options, name, component, memory) for component in components]
    jobset = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name, **own},
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": name},
            # Any failure but those of the pods' own policies is a restart.
            "failurePolicy": {
                "maxRestarts": MAX_RESTARTS,
                "rules": [
                    {
                        "name": "cannotGoOn",
                        "action": "FailJobSet",
                        "onJobFailureReasons": ["PodFailurePolicy"],
                    }
                ],
            },
            "successPolicy": {"operator": "All", "targetReplicatedJobs": [LAUNCHER]},
            "replicatedJobs": jobs,
        },
    }
    return [settings, jobset]


def _launcher(
    job: Job,
    options: KubernetesOptions,
    name: str,
    max_restarts: int | None,
    allow: Sequence[str],
    memory: dict[str, str],
) -> Object:
    container = {
        "command": [options.python, "-m", "launch", "train", f"{SETTINGS_DIR}/{CONFIG}"],
        "args": [
            f"topology={SETTINGS_DIR}/{TOPOLOGY}",
            f"run.dir={_run_dir(job, options)}",
            "--launcher=external",
            f"--listen=$(POD_IP):{options.port}",
            *([f"--max-restarts={max_restarts}"] if max_restarts is not None else []),
            *(f"--allow={names}" for names in allow),
        ],
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            *_variables(
                {"HOLMES_KEY_FILE": f"{KEY_DIR}/job.key", "PYTHONUNBUFFERED": "1", **memory}
            ),
        ],
        "ports": [{"name": "controller", "containerPort": options.port}],
        # The run folder is written before the controller listens.
        "readinessProbe": {"tcpSocket": {"port": options.port}, "periodSeconds": 2},
    }
    # Only the launcher knows a bug from the loss of another process: a worker ends with 1 in both.
    final = [FatalError.exit_status, *MISTAKE]
    return {"name": LAUNCHER, "replicas": 1, "template": _job(options, name, container, 1, final)}


def _workers(
    job: Job,
    options: KubernetesOptions,
    name: str,
    component: Component,
    memory: dict[str, str],
) -> Object:
    clusters = [c for c in options.clusters if c.name == component.cluster]
    limits = {options.gpu: str(component.num_gpus)} if component.num_gpus else {}
    for cluster in clusters:
        limits |= cluster.limits
    variables = {
        **job.process_environment(memory),
        "HOLMES_CONTROLLER": f"{name}-{LAUNCHER}-0-0.{name}:{options.port}",
        "HOLMES_KEY_FILE": f"{KEY_DIR}/job.key",
        "HOLMES_PROCESSES": component.numbers,
        "PYTHONUNBUFFERED": "1",
    }
    container = {
        "command": [options.python, "-m", "launch", "worker", _run_dir(job, options)],
        "env": _variables(variables),
        **({"resources": {"limits": limits}} if limits else {}),
    }
    template = _job(options, name, container, len(component.processes), MISTAKE)
    for cluster in clusters:
        if cluster.node_selector:
            template["spec"]["template"]["spec"]["nodeSelector"] = cluster.node_selector
    return {
        "name": _label(component.name),
        "replicas": 1,
        "dependsOn": [{"name": LAUNCHER, "status": "Ready"}],
        "template": template,
    }


def _run_dir(job: Job, options: KubernetesOptions) -> str:
    """Returns the run folder in the pods."""
    return f"{options.mount.rstrip('/')}/{job.run_dir.absolute().name}"


def _variables(values: dict[str, str]) -> list[Object]:
    # Kubernetes would put in a value for $(...).
    return [{"name": name, "value": value.replace("$(", "$$(")} for name, value in values.items()]


def _job(
    options: KubernetesOptions, name: str, container: Object, num_pods: int, final: list[int]
) -> Object:
    """Returns a batch/v1 Job without its kind: `num_pods` pods, numbered from 0, that end once.

    A pod that ends with one of the statuses `final` ends the JobSet.
    """
    key: Object = {"secretName": f"{name}-key", "defaultMode": 0o400}
    volumes: list[tuple[str, str, Object]] = [
        ("runs", options.mount, {"persistentVolumeClaim": {"claimName": options.claim}}),
        ("settings", SETTINGS_DIR, {"configMap": {"name": name}}),
        ("key", KEY_DIR, {"secret": key}),
        ("shm", "/dev/shm", {"emptyDir": {"medium": "Memory"}}),  # NCCL's; 64 MiB if left alone
    ]
    pod = {
        "restartPolicy": "Never",  # the JobSet starts all pods again
        "terminationGracePeriodSeconds": 120,  # a SIGTERM saves a checkpoint after the step
        "containers": [
            {
                "name": "holmes",
                "image": options.image,
                "workingDir": options.folder,
                **container,
                "volumeMounts": [{"name": v, "mountPath": path} for v, path, _ in volumes],
            }
        ],
        "volumes": [{"name": volume, **source} for volume, _, source in volumes],
    }
    cannot_go_on = {"containerName": "holmes", "operator": "In", "values": final}
    return {
        "spec": {
            "completionMode": "Indexed",
            "completions": num_pods,
            "parallelism": num_pods,
            "backoffLimit": 0,
            "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": cannot_go_on}]},
            "template": {"spec": pod},
        }
    }
