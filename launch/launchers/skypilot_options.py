"""The options file of the launcher `skypilot`: what its clusters are, and what cannot be."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from holmesjax.errors import ConfigError, HolmesError
from holmesjax.files import places, schema
from holmesjax.files.yaml_files import Document, Keys
from launch.launchers.launcher import parse_listen
from launch.launchers.variables import wrong_names

Name = Annotated[str, Field(min_length=1, strict=True)]


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterOptions:
    """The options of the nodes of a cluster."""

    resources: dict[str, Any] = field(default_factory=dict)  # of SkyPilot: infra, use_spot
    env: dict[str, str] = field(default_factory=dict)
    file_mounts: dict[str, Any] = field(default_factory=dict)  # of SkyPilot: buckets, folders
    # A folder that the nodes share, or a URL; None: ~/runs/<name of the run>, of a single node.
    run_dir: Name | None = None
    # A command of bash that prints where other sites reach the node; None: at its own addresses.
    address_command: Name | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SkyPilotCluster(ClusterOptions):
    """The options of one cluster; they count more than those for all."""

    name: Name


@dataclass(frozen=True, kw_only=True, slots=True)
class SkyPilotOptions(ClusterOptions):
    """The options file."""

    listen: Name  # HOST:PORT of the launcher's machine
    setup: tuple[Name, ...]  # lines of bash, once on each node: they install HolmesJAX
    controller: Name | None = None  # where nodes reach the launcher, behind a NAT; None: `listen`
    workdir: Name | None = None  # a folder of this machine that is copied to the nodes
    python: Name = "python"
    clusters: tuple[SkyPilotCluster, ...] = ()


def options_of(file: SkyPilotOptions, cluster: str) -> ClusterOptions:
    """Returns the options that hold for a cluster."""
    own = next((c for c in file.clusters if c.name == cluster), ClusterOptions())
    return ClusterOptions(
        resources={**file.resources, **own.resources},
        env={**file.env, **own.env},
        file_mounts={**file.file_mounts, **own.file_mounts},
        run_dir=own.run_dir or file.run_dir,
        address_command=own.address_command or file.address_command,
    )


def mistakes(document: Document, file: SkyPilotOptions) -> Iterator[HolmesError]:
    """Yields the mistakes of a file whose values may be right by themselves."""
    for check in (_addresses, _folders):
        yield from schema.findings(check, document, file)
    parts: list[tuple[Keys, ClusterOptions]] = [((), file)]
    parts += [(("clusters", i), cluster) for i, cluster in enumerate(file.clusters)]
    for keys, options in parts:
        yield from wrong_names(document, (*keys, "env"), options.env)


def _addresses(document: Document, file: SkyPilotOptions) -> Iterator[HolmesError]:
    try:
        _, port = parse_listen(file.listen)
    except ConfigError as error:
        yield document.mistake(("listen",), error.problem, found=file.listen, fix=error.fix)
    else:
        if not port:
            fix = f"write {file.listen}:7000, say"
            yield document.mistake(("listen",), "needs a port", found=file.listen, fix=fix)
    if file.controller is not None:
        host, _, port_text = file.controller.rpartition(":")
        if not host or not port_text.isdecimal() or not 0 < int(port_text) < 65536:
            problem, fix = "must be HOST:PORT", "write 203.0.113.7:7000, say"
            yield document.mistake(("controller",), problem, found=file.controller, fix=fix)


def _folders(document: Document, file: SkyPilotOptions) -> Iterator[HolmesError]:
    if file.run_dir and (problem := places.mistake_in_run_dir(file.run_dir)):
        fix = "write /scratch/llama, or s3://BUCKET/NAME, say"
        yield document.mistake(("run_dir",), problem, found=file.run_dir, fix=fix)
    if file.workdir is not None and not Path(file.workdir).expanduser().is_dir():
        problem, fix = "is no folder of this machine", "name the checkout, or remove it"
        yield document.mistake(("workdir",), problem, found=file.workdir, fix=fix)
