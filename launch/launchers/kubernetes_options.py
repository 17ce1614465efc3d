"""The options file of the launcher `kubernetes`: what its pods have, and what cannot be.

The options at the top of the file are for all pods. `launcher` and the entries of `clusters` add to
them, and their values win.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from holmesjax.config.allowed_values import Flag
from holmesjax.errors import HolmesError
from holmesjax.files import schema
from holmesjax.files.yaml_files import Document, Keys
from launch.launchers.variables import wrong_names

SETTINGS_DIR, KEY_DIR, SHARED_MEMORY = "/etc/holmes/settings", "/etc/holmes/key", "/dev/shm"
Name = Annotated[str, Field(min_length=1, strict=True)]
# `cpu: 8` is as good as `cpu: "8"`.
Quantity = Annotated[str, BeforeValidator(lambda x: str(x) if type(x) in (int, float) else x)]
UNITS = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "": 1.0}
UNITS |= {unit: 1000.0**i for i, unit in enumerate("kMGTPE", 1)}
UNITS |= {f"{unit}i": 1024.0**i for i, unit in enumerate("KMGTPE", 1)}
AMOUNT = re.compile(rf"(\d+(?:\.\d*)?|\.\d+)(?:({'|'.join(filter(None, UNITS))})|[eE]([+-]?\d+))?")
# Of annotations, labels of nodes, and resources: an optional domain, and a name.
KEY = re.compile(r"([a-z0-9]([a-z0-9.-]*[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
OBJECT = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Toleration:
    """A taint of nodes on which the pods may run all the same."""

    key: Name | None = None  # None: every taint
    operator: Literal["Exists", "Equal"] = "Equal"
    value: str | None = None  # of the taint; only for Equal
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None  # None: all
    toleration_seconds: Annotated[int, Field(ge=0, strict=True)] | None = None  # None: for ever


@dataclass(frozen=True, kw_only=True, slots=True)
class SecretVariable:
    """A variable whose value is in a Secret of the namespace."""

    name: Name  # of the variable
    secret: Name
    key: Name  # in the Secret


@dataclass(frozen=True, kw_only=True, slots=True)
class Mount:
    """A folder that pods have besides that of the runs: a data set, say."""

    path: Name  # in the pods
    claim: Name | None = None  # a PersistentVolumeClaim; or else
    host_path: Name | None = None  # a folder of the node
    read_only: Flag = True


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedPodOptions:
    """The options that all pods may share."""

    node_selector: dict[str, str] = field(default_factory=dict)
    tolerations: tuple[Toleration, ...] = ()
    annotations: dict[str, str] = field(default_factory=dict)  # k8s.v1.cni.cncf.io/networks: rdma
    env: dict[str, str] = field(default_factory=dict)
    env_secrets: tuple[SecretVariable, ...] = ()
    mounts: tuple[Mount, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class PodOptions(SharedPodOptions):
    """The options of some pods."""

    requests: dict[str, Quantity] = field(default_factory=dict)
    limits: dict[str, Quantity] = field(default_factory=dict)  # besides GPUs: {"rdma/hca": "1"}
    capabilities: tuple[Name, ...] = ()  # IPC_LOCK, which RDMA needs to pin memory
    host_network: Flag = False  # the node's network in place of the pod's own


@dataclass(frozen=True, kw_only=True, slots=True)
class KubernetesCluster(PodOptions):
    """The options of the pods of a cluster."""

    name: Name
    run_dir: Name | None = None  # in the pods, or a URL; None: below `mount`


@dataclass(frozen=True, kw_only=True, slots=True)
class KubernetesOptions(SharedPodOptions):
    """The options file."""

    image: Name  # with this version of HolmesJAX
    claim: Name  # the PersistentVolumeClaim of the run folders; ReadWriteMany
    mount: Name = "/runs"  # where it is in the pods
    folder: Name = "/workspace"  # the checkout in the image
    python: Name = "python"
    namespace: Name = "default"
    port: Annotated[int, Field(ge=1024, le=65535, strict=True)] = 7000  # of the launcher
    gpu: Name = "nvidia.com/gpu"  # what the cluster calls a GPU
    image_pull_secrets: tuple[Name, ...] = ()
    service_account: Name | None = None  # None: that of the namespace
    launcher: PodOptions = PodOptions()
    clusters: tuple[KubernetesCluster, ...] = ()


def merged(*parts: SharedPodOptions) -> PodOptions:
    """Returns the options of pods for which several parts of the file hold; the last one wins."""
    whole: dict[str, Any] = {}
    for of in fields(PodOptions):
        for part in parts:
            value = getattr(part, of.name, None)
            if isinstance(value, dict):
                whole[of.name] = {**whole.get(of.name, {}), **value}
            elif isinstance(value, tuple):
                whole[of.name] = (*whole.get(of.name, ()), *value)
            elif value:
                whole[of.name] = value
    return PodOptions(**whole)


# Rules of the file beyond the type of each value: what the API server would refuse, and what the
# launcher needs. Of the pods it would tell the JobSet alone, later.


def mistakes(document: Document, file: KubernetesOptions) -> Iterator[HolmesError]:
    """Yields the mistakes of a file whose values may be right by themselves."""
    for check in (_names_are_names, _paths_are_absolute):
        yield from schema.findings(check, document, file)
    places: list[tuple[Keys, Any]] = [((), file), (("launcher",), file.launcher)]
    places += [(("clusters", i), cluster) for i, cluster in enumerate(file.clusters)]
    for keys, options in places:
        for check_part in (_variables, _tolerations, _keys_of_objects):
            yield from schema.findings(check_part, document, keys, options)
        yield from schema.findings(_mounts, document, keys, options, file)
        if keys:
            yield from schema.findings(_resources, document, keys, options, file.gpu)
            yield from schema.findings(_capabilities, document, keys, options)


def _names_are_names(document: Document, file: KubernetesOptions) -> Iterator[HolmesError]:
    named: list[tuple[Keys, str | None]] = [
        *(((name,), getattr(file, name)) for name in ("claim", "namespace", "service_account")),
        *((("image_pull_secrets", i), name) for i, name in enumerate(file.image_pull_secrets)),
    ]
    for keys, name in named:
        if name and not OBJECT.fullmatch(name):
            yield _no_object(document, keys, name)


def _no_object(document: Document, keys: Keys, found: str) -> HolmesError:
    fix = "use small letters, digits, - and ."
    return document.mistake(keys, "is no name of an object of Kubernetes", found=found, fix=fix)


def _paths_are_absolute(document: Document, file: KubernetesOptions) -> Iterator[HolmesError]:
    for name, path in (("mount", file.mount), ("folder", file.folder)):
        if not path.startswith("/"):
            yield _not_absolute(document, (name,), path, "image")


def _not_absolute(document: Document, keys: Keys, path: str, where: str) -> HolmesError:
    problem = f"must be a path from the root of the {where}"
    return document.mistake(keys, problem, found=path, fix=f"write it as /{path}")


def _variables(document: Document, keys: Keys, options: SharedPodOptions) -> Iterator[HolmesError]:
    yield from wrong_names(document, (*keys, "env"), options.env)
    for i, secret in enumerate(options.env_secrets):
        place = (*keys, "env_secrets", i)
        yield from wrong_names(document, (*place, "name"), [secret.name], is_value=True)
        if secret.name in options.env:
            fix = "remove one of the two"
            yield document.mistake((*place, "name"), "is in `env` too", found=secret.name, fix=fix)
        if not OBJECT.fullmatch(secret.secret):
            yield _no_object(document, (*place, "secret"), secret.secret)


def _tolerations(
    document: Document, keys: Keys, options: SharedPodOptions
) -> Iterator[HolmesError]:
    for i, toleration in enumerate(options.tolerations):
        place = (*keys, "tolerations", i)
        if toleration.operator == "Exists" and toleration.value is not None:
            problem, fix = "has no use beside the operator Exists", "remove it, or write Equal"
            yield document.mistake((*place, "value"), problem, found=toleration.value, fix=fix)
        if toleration.operator == "Equal" and toleration.key is None:
            problem = "needs the key of a taint, or the operator Exists"
            fix = "add `key:`, or `operator: Exists` for every taint"
            yield document.mistake(place, problem, found="no key", fix=fix)
        if toleration.toleration_seconds is not None and toleration.effect != "NoExecute":
            problem = "is only for the effect NoExecute"
            fix = "add `effect: NoExecute`, or remove it"
            found, where = toleration.toleration_seconds, (*place, "toleration_seconds")
            yield document.mistake(where, problem, found=found, fix=fix)


def _keys_of_objects(
    document: Document, keys: Keys, options: SharedPodOptions
) -> Iterator[HolmesError]:
    tables = [(name, getattr(options, name)) for name in ("node_selector", "annotations")]
    for table, values in tables:
        yield from _no_keys(document, (*keys, table), values)


def _no_keys(document: Document, keys: Keys, values: Mapping[str, object]) -> Iterator[HolmesError]:
    for name in values:
        if not KEY.fullmatch(name):
            fix = "write NAME or a.domain/NAME, with letters, digits, -, _ and ."
            problem = "is no key of Kubernetes"
            yield document.mistake((*keys, name), problem, found=name, fix=fix)


def _mounts(
    document: Document, keys: Keys, options: SharedPodOptions, file: KubernetesOptions
) -> Iterator[HolmesError]:
    """Yields what is wrong with the mounts of a part of the file, with those of all pods."""
    known = {SETTINGS_DIR, KEY_DIR, SHARED_MEMORY, file.mount}
    if keys:
        known |= {mount.path for mount in file.mounts}
    taken = {PurePosixPath(path) for path in known}
    for i, asked_mount in enumerate(options.mounts):
        place = (*keys, "mounts", i)
        for name, path in (("path", asked_mount.path), ("host_path", asked_mount.host_path)):
            if path and not path.startswith("/"):
                yield _not_absolute(
                    document, (*place, name), path, "pod" if name == "path" else "node"
                )
        if (where := PurePosixPath(asked_mount.path)) in taken:
            fix = "mount it elsewhere"
            problem = "has another volume of the pod"
            yield document.mistake((*place, "path"), problem, found=asked_mount.path, fix=fix)
        taken.add(where)
        if (asked_mount.claim is None) == (asked_mount.host_path is None):
            found = "neither" if asked_mount.claim is None else "both"
            fix = "name a PersistentVolumeClaim, or a folder of the node"
            problem = "needs one of `claim` and `host_path`"
            yield document.mistake(place, problem, found=found, fix=fix)
        if asked_mount.claim is not None and not OBJECT.fullmatch(asked_mount.claim):
            yield _no_object(document, (*place, "claim"), asked_mount.claim)


def _resources(
    document: Document, keys: Keys, options: PodOptions, gpu: str
) -> Iterator[HolmesError]:
    for table in ("requests", "limits"):
        values = getattr(options, table)
        yield from _no_keys(document, (*keys, table), values)
        for name, text in values.items():
            place = (*keys, table, name)
            if name == gpu:
                problem, fix = "is a GPU, and the plan says how many", "remove it"
                yield document.mistake(place, problem, found=text, fix=fix)
            elif amount(text) is None:
                problem, fix = "is no amount of a resource", 'write "8", 500m or 64Gi'
                yield document.mistake(place, problem, found=text, fix=fix)
    for name, text in options.requests.items():
        place, limit = (*keys, "requests", name), options.limits.get(name)
        asked, most = amount(text), None if limit is None else amount(limit)
        if "/" in name and limit != text and name != gpu:
            problem = "is requested by its limit alone"
            fix = "write it in `limits`, and remove it here"
            yield document.mistake(place, problem, found=text, fix=fix)
        elif asked is not None and most is not None and asked > most:
            problem, fix = f"is more than its limit, {limit}", "raise the limit, or request less"
            yield document.mistake(place, problem, found=text, fix=fix)


def amount(text: str) -> float | None:
    """Returns the number that a quantity of Kubernetes stands for; None: it is none.

    >>> amount("64Gi"), amount("500m"), amount("1e3"), amount("64 GiB")
    (68719476736.0, 0.5, 1000.0, None)
    """
    found = AMOUNT.fullmatch(text)
    if found is None:
        return None
    return float(found[1]) * UNITS[found[2] or ""] * 10.0 ** int(found[3] or 0)


def _capabilities(document: Document, keys: Keys, options: PodOptions) -> Iterator[HolmesError]:
    for i, name in enumerate(options.capabilities):
        if not re.fullmatch(r"[A-Z][A-Z_]*", name) or name.startswith("CAP_"):
            words = re.findall("[A-Z]+", name.upper().removeprefix("CAP_"))
            fix = f"write it as {'_'.join(words)}" if words else "write a name, such as IPC_LOCK"
            problem = "is no capability as Kubernetes writes it"
            yield document.mistake((*keys, "capabilities", i), problem, found=name, fix=fix)
