"""Writes the manifest of a job for Kubernetes, as a JobSet: one replicated job for each cluster.

One more replicated job is for the launcher itself, `external`. Its exit status is that of the job.
Its pod has a name in the JobSet's headless service. The other pods start when its controller
listens. The run folder is on a volume that all pods share, the run's settings are a ConfigMap, and
the job's key is a Secret. Kubernetes numbers the pods of each replicated job from 0
(JOB_COMPLETION_INDEX); HOLMES_PROCESSES lists their processes.
"""

import dataclasses
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from holmesjax import config as configs, job_description, job_files
from holmesjax.config import Config
from holmesjax.errors import REQUEUE, ConfigError, FatalError, HolmesError
from holmesjax.files import places
from holmesjax.job import CONFIG, TOPOLOGY, Job
from holmesjax.liveness.lease import Lease
from holmesjax.plan.device_pool import DevicePool
from holmesjax.transport import key_files
from launch.launchers import kubernetes_options
from launch.launchers.components import Component, make_components, read_options
from launch.launchers.kubernetes_options import (
    KEY_DIR,
    SETTINGS_DIR,
    SHARED_MEMORY,
    KubernetesOptions,
    PodOptions,
    Toleration,
    merged,
)
from launch.launchers.table import LauncherOptions

MANIFEST, KEY = "jobset.yaml", "kubernetes.key"
LAUNCHER = "launcher"  # the replicated job of the launcher
# The exit status of processes that would fail again in the same way.
MISTAKE = [HolmesError.exit_status]  # a pod that ends with this would do so again
# JobSet counts all restarts. The launcher counts those without a new step, and ends with 1.
MAX_RESTARTS = 1000
MAX_NAME = 40  # of 63 for the name of a pod, which has those of the cluster and the pod in it
Object = dict[str, Any]  # of Kubernetes


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
    check = kubernetes_options.mistakes
    options = read_options(KubernetesOptions, options_file, job.topology, check)
    name = _label(job.run_dir.absolute().name)
    pool = job.pool({**os.environ, **options.env})
    print(*job_description.describe(job, pool), sep="\n", flush=True)
    path, key = job.run_dir.absolute() / MANIFEST, job.run_dir.absolute() / KEY
    with Lease(job.run_dir):
        job_files.save(job)
        objects = manifest(
            job, options, name=name, max_restarts=max_restarts, allow=allow, pool=pool
        )
        path.write_text(yaml.safe_dump_all(objects, sort_keys=False, width=100))
        key_files.make_key_file(key)
    kubectl = f"kubectl --namespace {options.namespace}"
    print(f"written     {path}")
    print("start it, on a cluster with JobSet installed:")
    print(
        f"  {kubectl} create secret generic {name}-key --from-file=job.key={shlex.quote(str(key))}"
    )
    # A plain apply keeps all in an annotation, of 256 KiB: less than a probed topology may have.
    print(f"  {kubectl} apply --server-side -f {shlex.quote(str(path))}")
    print("see what it prints, and end it:")
    print(f"  {kubectl} logs -f job/{name}-{LAUNCHER}-0")
    print(f"  {kubectl} delete jobset/{name} configmap/{name} secret/{name}-key")
    return 0


def for_job(job: Job, options: LauncherOptions) -> int:
    """Writes the manifest; `table` calls it."""
    return write(job, options.options, max_restarts=options.max_restarts, allow=options.allow)


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

    Raises ConfigError where the names of two components are one here, or a node would have several
    pods, one for each device.
    """
    components = make_components(job)
    _refuse_what_pods_cannot_be(job, components)
    own = {"namespace": options.namespace}
    settings = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, **own},
        "data": {
            CONFIG: configs.to_yaml(_config_of_pods(job, options)),
            TOPOLOGY: (job.run_dir / TOPOLOGY).read_text("utf-8"),
        },
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


def _refuse_what_pods_cannot_be(job: Job, components: Sequence[Component]) -> None:
    """Raises ConfigError where two replicated jobs have one name, or NVLink joins two pods."""
    seen = {LAUNCHER}
    for component in components:
        label = _label(component.name)
        if label in seen:
            problem = f"has two replicated jobs that Kubernetes would call {label}"
            fix = f"rename the cluster: Kubernetes has {MAX_NAME} letters, digits and - of its name"
            fix += f", and {LAUNCHER} is the launcher's"
            raise ConfigError("topology", problem, found=component.name, fix=fix)
        seen.add(label)
        if job.config.distributed.processes == "device" and component.per_node > 1:
            problem = "must be node on Kubernetes: pods may be on any node, and share no NVLink"
            found = f"device, with {component.per_node} devices in each node of {component.name}"
            fix = "set distributed.processes=node: a pod has all devices of its node"
            raise ConfigError("distributed.processes", problem, found=found, fix=fix)


def _config_of_pods(job: Job, options: KubernetesOptions) -> Config:
    """Returns the settings with the places of the pods: those of this machine are not there."""
    run = dataclasses.replace(job.config.run, dir=_run_dir(job, options))
    return dataclasses.replace(job.config, run=run, topology=f"{SETTINGS_DIR}/{TOPOLOGY}")


def _launcher(
    job: Job,
    options: KubernetesOptions,
    name: str,
    max_restarts: int | None,
    allow: Sequence[str],
    memory: Mapping[str, str],
) -> Object:
    pod = merged(options, options.launcher)
    variables = {
        "PYTHONUNBUFFERED": "1",
        **memory,
        **pod.env,
        "HOLMES_KEY_FILE": f"{KEY_DIR}/job.key",
    }
    own_address = {"fieldRef": {"fieldPath": "status.podIP"}}
    container = {
        "command": [options.python, "-m", "launch", "train", f"{SETTINGS_DIR}/{CONFIG}"],
        "args": [
            "--launcher=external",
            f"--listen=[$(HOLMES_POD_IP)]:{options.port}",
            *([f"--max-restarts={max_restarts}"] if max_restarts is not None else []),
            *(f"--allow={names}" for names in allow),
        ],
        "env": [{"name": "HOLMES_POD_IP", "valueFrom": own_address}, *_variables(variables, pod)],
        **_resources(pod.requests, pod.limits),
        "ports": [{"name": "controller", "containerPort": options.port}],
        # The run folder is written before the controller listens.
        "readinessProbe": {"tcpSocket": {"port": options.port}, "periodSeconds": 2},
    }
    # Only the launcher knows a bug from the loss of another process: a worker ends with 1 in both.
    final = [FatalError.exit_status, *MISTAKE]
    template = _job(options, pod, name, container, 1, final)
    return {"name": LAUNCHER, "replicas": 1, "template": template}


def _workers(
    job: Job,
    options: KubernetesOptions,
    name: str,
    component: Component,
    memory: Mapping[str, str],
) -> Object:
    clusters = [c for c in options.clusters if c.name == component.cluster]
    pod, own_dir = merged(options, *clusters), next((c.run_dir for c in clusters), None)
    gpus = {options.gpu: str(component.num_gpus)} if component.num_gpus else {}
    variables = {
        "PYTHONUNBUFFERED": "1",
        **pod.env,
        **job.process_environment({**memory, **pod.env}),
        "HOLMES_CONTROLLER": f"{name}-{LAUNCHER}-0-0.{name}:{options.port}",
        "HOLMES_KEY_FILE": f"{KEY_DIR}/job.key",
        "HOLMES_PROCESSES": component.numbers,
    }
    container = {
        "command": [options.python, "-m", "launch", "worker", own_dir or _run_dir(job, options)],
        "env": _variables(variables, pod),
        **_resources(pod.requests, {**gpus, **pod.limits}),
    }
    return {
        "name": _label(component.name),
        "replicas": 1,
        "dependsOn": [{"name": LAUNCHER, "status": "Ready"}],
        "template": _job(
            options, pod, name, container, len(component.processes), MISTAKE, replaced=[REQUEUE]
        ),
    }


def _run_dir(job: Job, options: KubernetesOptions) -> str:
    """Returns the run folder in the pods."""
    if places.is_url(job.config.run.dir):
        return job.config.run.dir
    return f"{options.mount.rstrip('/')}/{job.run_dir.absolute().name}"


def _variables(values: Mapping[str, str], pod: PodOptions) -> list[Object]:
    """Returns the variables of a container, with those whose values are in Secrets."""
    secrets = {
        variable.name: {"secretKeyRef": {"name": variable.secret, "key": variable.key}}
        for variable in pod.env_secrets
    }
    # Kubernetes would put in a value for $(...).
    plain = {name: text.replace("$(", "$$(") for name, text in values.items()}
    return [
        *({"name": name, "value": text} for name, text in plain.items() if name not in secrets),
        *({"name": name, "valueFrom": source} for name, source in secrets.items()),
    ]


def _resources(requests: Mapping[str, str], limits: Mapping[str, str]) -> Object:
    both = {"requests": dict(requests), "limits": dict(limits)}
    given = {name: amounts for name, amounts in both.items() if amounts}
    return {"resources": given} if given else {}


def _job(
    options: KubernetesOptions,
    own: PodOptions,
    name: str,
    container: Object,
    num_pods: int,
    final: Sequence[int],
    replaced: Sequence[int] = (),
) -> Object:
    """Returns a batch/v1 Job without its kind: `num_pods` pods, numbered from 0, that end once.

    A pod that ends with one of the statuses `final` ends the JobSet. One of the statuses `replaced`
    starts that pod again, and no other: whether all start again is the launcher's to say.
    """
    key: Object = {"secretName": f"{name}-key", "defaultMode": 0o400}
    volumes: list[tuple[str, str, Object]] = [
        ("runs", options.mount, {"persistentVolumeClaim": {"claimName": options.claim}}),
        ("settings", SETTINGS_DIR, {"configMap": {"name": name}}),
        ("key", KEY_DIR, {"secret": key}),
        # NCCL's; 64 MiB if left alone
        ("shm", SHARED_MEMORY, {"emptyDir": {"medium": "Memory"}}),
    ]
    places: list[Object] = [{"name": volume, "mountPath": path} for volume, path, _ in volumes]
    for i, mount in enumerate(own.mounts):
        source = {"persistentVolumeClaim": {"claimName": mount.claim}}
        if mount.host_path is not None:
            source = {"hostPath": {"path": mount.host_path, "type": "Directory"}}
        volumes.append((f"mount-{i}", mount.path, source))
        places.append({"name": f"mount-{i}", "mountPath": mount.path, "readOnly": mount.read_only})
    pod: Object = {
        "restartPolicy": "Never",  # the JobSet starts all pods again
        "terminationGracePeriodSeconds": 120,  # a SIGTERM saves a checkpoint after the step
        **_placement(options, own),
        "containers": [
            {
                "name": "holmes",
                "image": options.image,
                "workingDir": options.folder,
                **container,
                **_capabilities(own),
                "volumeMounts": places,
            }
        ],
        "volumes": [{"name": volume, **source} for volume, _, source in volumes],
    }
    metadata = {"metadata": {"annotations": own.annotations}} if own.annotations else {}
    rules = [
        {
            "action": action,
            "onExitCodes": {"containerName": "holmes", "operator": "In", "values": list(statuses)},
        }
        for action, statuses in (("FailJob", final), ("Ignore", replaced))
        if statuses
    ]
    return {
        "spec": {
            "completionMode": "Indexed",
            "completions": num_pods,
            "parallelism": num_pods,
            "backoffLimit": 0,
            "podFailurePolicy": {"rules": rules},
            "template": {**metadata, "spec": pod},
        }
    }


def _placement(options: KubernetesOptions, own: PodOptions) -> Object:
    """Returns the fields of a pod that say who it is, and on which nodes it may run."""
    found: Object = {}
    if options.service_account:
        found["serviceAccountName"] = options.service_account
    if options.image_pull_secrets:
        found["imagePullSecrets"] = [{"name": secret} for secret in options.image_pull_secrets]
    if own.node_selector:
        found["nodeSelector"] = own.node_selector
    if own.tolerations:
        found["tolerations"] = [_toleration(toleration) for toleration in own.tolerations]
    if own.host_network:
        # The pods find the controller by a name of the cluster's DNS.
        found |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    return found


def _toleration(own: Toleration) -> Object:
    fields = {
        "key": own.key,
        "operator": own.operator,
        "value": own.value,
        "effect": own.effect,
        "tolerationSeconds": own.toleration_seconds,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _capabilities(own: PodOptions) -> Object:
    if not own.capabilities:
        return {}
    return {"securityContext": {"capabilities": {"add": list(own.capabilities)}}}
