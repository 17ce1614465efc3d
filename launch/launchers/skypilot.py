"""Writes the tasks of a job for SkyPilot: one cluster of SkyPilot for each cluster of the topology.

The clusters may lie in different clouds and share nothing. The launcher is `external`, on the
machine where the tasks are written; every node reaches it at one address. A task starts the
processes of its nodes, which SkyPilot numbers from 0 (SKYPILOT_NODE_RANK), and starts them again
after any end but 0, which means that all steps are done, and 2, which is a mistake that would come
again. The key of the job is a file that SkyPilot copies to the nodes.
"""

import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from holmesjax import job_description
from holmesjax.errors import ConfigError
from holmesjax.files import places
from holmesjax.job import Job
from holmesjax.plan.device_pool import DevicePool
from holmesjax.transport import key_files
from launch.launchers import skypilot_options
from launch.launchers.components import Component, make_components, read_options
from launch.launchers.skypilot_options import SkyPilotOptions, options_of
from launch.launchers.table import LauncherOptions
from launch.launchers.written_jobs import saved_for_later

FOLDER, KEY = "skypilot", "skypilot.key"
KEYS_THERE = "~/.holmesjax"  # the folder of the keys on the nodes
Task = dict[str, Any]  # of SkyPilot
# The memory of a GPU is part of SkyPilot's name where there are several.
ACCELERATORS = {
    "a100_40gb": "A100",
    "a100_80gb": "A100-80GB",
    "h100": "H100",
    "h200": "H200",
    "b200": "B200",
    "mi300x": "MI300X",
}


class _Script(str):
    """Lines of bash, which YAML shows as they stand."""


class _Dumper(yaml.SafeDumper):
    """Writes the tasks."""


_Dumper.add_representer(
    _Script, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|")
)
# A process sees GPUs of its own alone. The node has those of its component, and may call them
# otherwise.
RUN = """\
set -u
export HOLMES_KEY_FILE={key}
chmod 600 "$HOLMES_KEY_FILE"
{advertised}numbers=({numbers})
IFS=, read -ra visible <<< "${{CUDA_VISIBLE_DEVICES-}}"
trap 'exit 2' USR1  # from a process with a mistake, whichever is waited for
work() {{
    export HOLMES_PROCESS=$1 CUDA_VISIBLE_DEVICES=
    for ((device = $2 * {num_devices}; device < ($2 + 1) * {num_devices}; device++)); do
        CUDA_VISIBLE_DEVICES+=,${{visible[device]-$device}}
    done
    CUDA_VISIBLE_DEVICES=${{CUDA_VISIBLE_DEVICES#,}}
    until {command}; do
        status=$?
        [ $status = 2 ] && kill -USR1 $$ && return 2
        sleep 5
    done
}}
for ((i = 0; i < {per_node}; i++)); do
    work "${{numbers[SKYPILOT_NODE_RANK * {per_node} + i]}}" $i &
done
for process in $(jobs -p); do
    wait "$process" || exit $?
done
"""
# The service that says the address may be away for a moment.
ADDRESS = """\
for ((i = 0; i < 60; i++)); do
    address=$({command})
    [[ $address =~ ^[0-9A-Za-z.:-]+$ ]] && break
    sleep 5
done
if ! [[ $address =~ ^[0-9A-Za-z.:-]+$ ]]; then
    echo "the address_command prints no address: '$address'"
    exit 2
fi
export HOLMES_ADVERTISED="{addresses}"
"""


def for_job(job: Job, options: LauncherOptions) -> int:
    """Writes the tasks and the key into the run folder, and says what to do with them (`table`).

    Raises:
      ConfigError, Mistakes: the options file is missing or wrong.
      HolmesError: an error of `resume.find`.
    """
    if options.options is None:
        fix = "write --options SKYPILOT.yaml; docs/skypilot.md has an example"
        problem = "the launcher `skypilot` needs an address of the launcher, and a setup"
        raise ConfigError("--options", problem, found="nothing", fix=fix)
    check = skypilot_options.mistakes
    file = read_options(SkyPilotOptions, options.options, job.topology, check)
    pool = job.pool({**os.environ, **file.env})
    print(*job_description.describe(job, pool), sep="\n", flush=True)
    folder, key = job.run_dir.absolute() / FOLDER, job.run_dir.absolute() / KEY
    texts = {
        name: yaml.dump(task, Dumper=_Dumper, sort_keys=False, width=100)
        for name, task in tasks(job, file, key, pool).items()
    }
    with saved_for_later(job, options.allow):
        folder.mkdir(exist_ok=True)
        key_files.make_key_file(key)
        for name, text in texts.items():
            (folder / f"{name}.yaml").write_text(text)
            print(f"written     {folder / name}.yaml")
    print("start the clusters, in clouds that `sky check` has enabled:")
    for name in texts:
        path = shlex.quote(f"{folder / name}.yaml")
        print(f"  sky launch --detach-run --yes --cluster {name} {path}")
    command = ["python", "-m", "launch", "train", str(job.run_dir.absolute())]
    command += ["--launcher", "external", "--listen", file.listen]
    if options.max_restarts is not None:
        command += ["--max-restarts", str(options.max_restarts)]
    command += [word for names in options.allow for word in ("--allow", names)]
    print("start the launcher here, and again while it ends with 75:")
    print(f"  HOLMES_KEY_FILE={shlex.quote(str(key))} {shlex.join(command)}")
    print("see what a cluster prints, and end it:")
    print(f"  sky logs {next(iter(texts))}")
    print(f"  sky down {' '.join(texts)}")
    return 0


def tasks(
    job: Job, options: SkyPilotOptions, key: Path, pool: DevicePool | None = None
) -> dict[str, Task]:
    """Returns the task of each component, by the name of its cluster of SkyPilot.

    Args:
      job: the job that the tasks run.
      options: the options file.
      key: the file with the job's key on this machine.
      pool: of the GPUs, if they are not to have the default.

    Raises ConfigError where the options lack the name of a device, or a folder that nodes share,
    or where two clusters have one name.
    """
    name, written = _label(job.run_dir.absolute().name), dict[str, Task]()
    for component in make_components(job):
        cluster = f"{name}-{_label(component.name)}"
        if cluster in written:
            problem = f"has two clusters that SkyPilot would call {cluster}"
            fix = "rename one of them: SkyPilot's names have letters, digits and -"
            raise ConfigError("topology", problem, found=component.name, fix=fix)
        key_there = f"{KEYS_THERE}/{name}.key"
        written[cluster] = _task(job, options, component, key, key_there, pool)
    return written


def _label(text: str) -> str:
    """Returns a name that SkyPilot accepts for a cluster.

    >>> _label("Quick_start.2"), _label("7b")
    ('quick-start-2', 'run-7b')
    """
    label = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return label if label[:1].isalpha() else f"run-{label}".rstrip("-")


def _task(
    job: Job,
    options: SkyPilotOptions,
    component: Component,
    key: Path,
    key_there: str,
    pool: DevicePool | None,
) -> Task:
    own = options_of(options, component.cluster)
    memory = pool.variables if pool else {}
    variables = {
        "PYTHONUNBUFFERED": "1",
        **own.env,
        **job.process_environment({**memory, **own.env}),
        "HOLMES_CONTROLLER": options.controller or options.listen,
    }
    run = RUN.format(
        key=key_there,
        advertised=_advertised(job, component, own.address_command),
        numbers=component.numbers.replace(",", " "),
        num_devices=len(component.processes[0].devices),
        per_node=component.per_node,
        command=f"{options.python} -m launch worker {_run_dir(job, component, own.run_dir)}",
    )
    return {
        "num_nodes": component.num_nodes,
        "resources": _resources(job, component, own.resources),
        **({"workdir": options.workdir} if options.workdir else {}),
        "file_mounts": {**own.file_mounts, key_there: str(key)},
        "envs": variables,
        "setup": _Script("\n".join(["set -e", *options.setup, ""])),
        "run": _Script(run),
    }


def _resources(job: Job, component: Component, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the resources of each node: those given, the GPUs, and open ports."""
    resources = dict(given)
    num_gpus = component.num_gpus * component.per_node
    if num_gpus and not {"accelerators", "instance_type"} & resources.keys():
        kind = job.topology.node(component.processes[0].node).device.name
        if kind not in ACCELERATORS:
            raise ConfigError(
                "--options",
                f"must say what SkyPilot calls a {kind}",
                found=f"no `accelerators` in the resources of {component.cluster}",
                fix=f"write resources: {{accelerators: NAME:{num_gpus}}}; see `sky gpus list`",
            )
        resources["accelerators"] = f"{ACCELERATORS[kind]}:{num_gpus}"
    if job.config.distributed.ports is not None and "ports" not in resources:
        first, last = job.config.distributed.ports
        resources["ports"] = [f"{first}-{last}"]
    return resources


def _run_dir(job: Job, component: Component, own_dir: str | None) -> str:
    """Returns the run folder of the processes, as bash takes it."""
    if own_dir is None and places.is_url(job.config.run.dir):
        own_dir = job.config.run.dir
    if own_dir is None and component.num_nodes > 1:
        raise ConfigError(
            "--options",
            f"must name a run folder that the nodes of {component.cluster} share",
            found=f"no `run_dir` for {component.num_nodes} nodes",
            fix="write run_dir: s3://BUCKET/NAME, or a folder of `file_mounts` that can be written",
        )
    return f"~/runs/{_label(job.run_dir.name)}" if own_dir is None else shlex.quote(own_dir)


def _advertised(job: Job, component: Component, command: str | None) -> str:
    """Returns the lines that say at which address other sites reach a node."""
    if command is None:
        return ""
    here = component.processes[0].node
    clusters = [c for c in job.topology.clusters if c.name != component.cluster]
    others = [node.name for cluster in clusters for node in cluster.nodes]
    fabrics = sorted({job.topology.nominal_link(here, there).fabric for there in others})
    addresses = ", ".join(f'\\"{fabric}\\": [\\"$address\\"]' for fabric in fabrics)
    return ADDRESS.format(command=command, addresses=f"{{{addresses}}}")
