"""The options file of the launcher `ray`: which nodes of Ray's a cluster takes."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from holmesjax.errors import HolmesError
from holmesjax.files import places
from holmesjax.files.yaml_files import Document, Keys
from holmesjax.transport import addresses
from launch.launchers.variables import wrong_names

AUTO = "auto"  # the Ray of this machine
Name = Annotated[str, Field(min_length=1, strict=True)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True, kw_only=True, slots=True)
class RayNodeOptions:
    """The options of the nodes of a cluster."""

    resources: dict[str, Amount] = field(default_factory=dict)  # of Ray, on each node
    env: dict[str, str] = field(default_factory=dict)
    folder: Name | None = None  # the checkout there; None: this process's current folder
    python: Name | None = None  # in it, or absolute, or found in PATH; None: this process's
    run_dir: Name | None = None  # there, or a URL; None: where the launcher has it


@dataclass(frozen=True, kw_only=True, slots=True)
class RayCluster(RayNodeOptions):
    """The options of one cluster; they count more than those for all."""

    name: Name


@dataclass(frozen=True, kw_only=True, slots=True)
class RayOptions(RayNodeOptions):
    """The options file."""

    address: Name = AUTO  # of Ray, whose node this machine is
    grows: bool = False  # whether Ray starts more nodes when they are asked for
    clusters: tuple[RayCluster, ...] = ()


def options_of(file: RayOptions, cluster: str) -> RayNodeOptions:
    """Returns the options that hold for a cluster."""
    own = next((c for c in file.clusters if c.name == cluster), RayNodeOptions())
    return RayNodeOptions(
        resources={**file.resources, **own.resources},
        env={**file.env, **own.env},
        folder=own.folder or file.folder,
        python=own.python or file.python,
        run_dir=own.run_dir or file.run_dir,
    )


def mistakes(document: Document, file: RayOptions) -> Iterator[HolmesError]:
    """Yields the mistakes of a file whose values may be right by themselves."""
    if not is_place(file.address):
        problem = "must be `auto`, or HOST:PORT of Ray's head; this machine is a node of it"
        fix = "start on a node of Ray's (by `ray job submit`, say), and leave the address out"
        yield document.mistake(("address",), problem, found=file.address, fix=fix)
    parts: list[tuple[Keys, RayNodeOptions]] = [((), file)]
    parts += [(("clusters", i), cluster) for i, cluster in enumerate(file.clusters)]
    for keys, options in parts:
        yield from wrong_names(document, (*keys, "env"), options.env)
        if options.run_dir and (problem := places.mistake_in_run_dir(options.run_dir)):
            fix = "write /scratch/llama, or s3://BUCKET/NAME, say"
            yield document.mistake((*keys, "run_dir"), problem, found=options.run_dir, fix=fix)
        for name, number in options.resources.items():
            if number > 1 and number % 1:
                problem = "Ray divides what is one and no more"
                yield document.mistake(
                    (*keys, "resources", name), problem, found=number, fix="use a whole number"
                )


def is_place(address: str) -> bool:
    """Whether it is the address of a Ray that runs.

    >>> [is_place(text) for text in ("auto", "10.0.0.1:6379", "local", "ray://10.0.0.1:10001")]
    [True, True, False, False]
    """
    with contextlib.suppress(ValueError):
        return address == AUTO or ("/" not in address and addresses.parse(address)[1] > 0)
    return False
