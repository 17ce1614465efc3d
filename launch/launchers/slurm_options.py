"""The options file of the launcher `slurm`, and where the nodes find what is on this machine."""

import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from pydantic import Field

from holmesjax.errors import ConfigError, HolmesError
from holmesjax.files import schema
from holmesjax.files.yaml_files import Document, Keys
from holmesjax.topology.machines import Topology
from launch.launchers.components import read_options

Name = Annotated[str, Field(min_length=1, strict=True)]
OPTION = re.compile(r"--[a-z][a-z0-9-]*(=.*)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmCluster:
    """The options of a cluster's component."""

    name: Name
    sbatch: tuple[Name, ...] = ()  # "--partition=hopper"
    srun: tuple[Name, ...] = ()  # "--container-image=/images/hopper.sqsh"
    run_dir: Name | None = None  # on its nodes, or a URL; None: where the launcher has it


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmOptions:
    """The options file."""

    time: Name | None = None  # the limit, "2-00:00:00"; None: that of the partition
    stop_before_s: Annotated[int, Field(ge=1, le=65535, strict=True)] = 120  # to save in, before it
    sbatch: tuple[Name, ...] = ()  # for all clusters: "--account=me"
    srun: tuple[Name, ...] = ()  # for the processes of all clusters: "--container-mounts=/shared"
    setup: tuple[Name, ...] = ()  # lines of bash before the job: "module load cuda"
    folder: Name | None = None  # on the nodes, the folder that is the current one here; None: it
    python: Name | None = None  # on the nodes; None: this process's
    worker_python: Name | None = None  # in the container that srun starts; None: `python`
    clusters: tuple[SlurmCluster, ...] = ()

    def on_nodes(self, path: Path) -> str:
        """Returns where the nodes find a file or a folder of this machine."""
        here = Path.cwd()
        if self.folder is None or not path.is_relative_to(here):
            return str(path)
        return str(PurePosixPath(self.folder, path.relative_to(here)))


# What the launcher says of a job, or of the step of a component, and what a user writes instead.
PLANNED = "remove it: the plan says how many there are"
SBATCH_IS_SET = {
    **dict.fromkeys(("--nodes", "--ntasks", "--ntasks-per-node"), PLANNED),
    "--chdir": "write it as `folder`",
    "--signal": "write the seconds as `stop_before_s`",
    "--array": "remove it: a run folder has one job",
}
SRUN_IS_SET = {
    **dict.fromkeys(("--nodes", "--ntasks", "--ntasks-per-node", "--het-group"), PLANNED),
    **dict.fromkeys(("--gpus-per-node", "--gpus-per-task"), PLANNED),
    **dict.fromkeys(("--distribution", "--mpi", "--input", "--output", "--label"), "remove it"),
    "--export": "remove it: processes have all variables; `setup` may have `export NAME=VALUE`",
    "--kill-on-bad-exit": "remove it",
}


def read(options_file: str | None, topology: Topology) -> SlurmOptions:
    """Reads the options file, if there is one. Raises Mistakes with all that is wrong in it."""
    if options_file is None:
        return SlurmOptions()
    return read_options(SlurmOptions, options_file, topology, _mistakes)


def refuse_places_of_here(options: SlurmOptions, options_file: str | None) -> None:
    """Raises ConfigError where this machine has other folders than the nodes, and none is named."""
    if options.folder is None:
        python = options.python or ""
        if shutil.which("sbatch") is None:
            found = "no sbatch on this machine"
        elif python.startswith("/") and not Path(python).is_file():
            found = f"no {python} on this machine"
        else:
            return
        problem = "must say where the nodes find this folder: they may not share it"
        fix = f"add `folder:`, which is {Path.cwd()} if they do share it"
        raise ConfigError(options_file or "--options", problem, found=found, fix=fix)
    if options.python is None and not Path(sys.executable).is_relative_to(Path.cwd()):
        problem = "must say which Python the nodes have: that of this machine is not in its folder"
        fix = "add `python: /shared/HolmesJAX/.venv/bin/python`, say"
        raise ConfigError(options_file or "--options", problem, found=sys.executable, fix=fix)


def _mistakes(document: Document, file: SlurmOptions) -> Iterator[HolmesError]:
    for check in (_options_are_options, _folder_is_absolute):
        yield from schema.findings(check, document, file)


def _options_are_options(document: Document, file: SlurmOptions) -> Iterator[HolmesError]:
    places: list[tuple[Keys, Any]] = [((), file)]
    places += [(("clusters", i), cluster) for i, cluster in enumerate(file.clusters)]
    for keys, options in places:
        for program, is_set in (("sbatch", SBATCH_IS_SET), ("srun", SRUN_IS_SET)):
            for i, option in enumerate(getattr(options, program)):
                place = (*keys, program, i)
                if not OPTION.fullmatch(option) or not option.isprintable():
                    fix = "write it as --partition=hopper"
                    yield document.mistake(place, "is no option", found=option, fix=fix)
                elif instead := is_set.get(option.partition("=")[0]):
                    problem = "is set by the launcher"
                    yield document.mistake(place, problem, found=option, fix=instead)


def _folder_is_absolute(document: Document, file: SlurmOptions) -> Iterator[HolmesError]:
    if file.folder and not file.folder.startswith("/"):
        problem, fix = "must be a path from the root of the nodes", f"write it as /{file.folder}"
        yield document.mistake(("folder",), problem, found=file.folder, fix=fix)
