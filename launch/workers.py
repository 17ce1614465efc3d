"""The workers of a job: the command and the environment with which a launcher starts each."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from holmesjax.distributed.controller import Controller
from holmesjax.files import places
from holmesjax.job import Job
from holmesjax.plan.device_pool import DevicePool
from holmesjax.plan.processes import Process
from holmesjax.transport import addresses, key_files
from launch.launchers.launcher import EventSink, Launcher, ProcessStart


def pool_of(
    job: Job, launcher: Launcher, processes: Sequence[Process], env: Mapping[str, str]
) -> DevicePool | None:
    """Returns the pool that each worker has of a GPU; None: the job has no GPU.

    Several processes may have the same GPU where all nodes are one machine, and divide the pool.

    Args:
      job: the job.
      launcher: starts its processes.
      processes: all processes.
      env: of the user. Raises ConfigError for a share of memory that makes no sense.
    """
    pool = job.pool(env)
    if pool is None or not launcher.is_here:
        return pool
    sharing = Counter(device for process in processes for device in process.local_devices)
    return pool.among(max(sharing.values()))


def start_workers(
    launcher: Launcher,
    processes: Sequence[Process],
    controller: Controller,
    *,
    run_dir: Path,
    key_file: Path,
    variables: Mapping[str, str],
    restart: int = 0,
    options: Sequence[str] = (),
    store: str | None = None,
    look: Callable[[], object] = lambda: None,
) -> None:
    """Starts a worker for each process of a job.

    Args:
      launcher: starts them.
      processes: all processes.
      controller: is called by the workers, and hears what the launcher tells of them.
      run_dir: the run folder.
      key_file: has the key of the job.
      variables: of their environment, besides those that say where a worker is in the job.
      restart: how often the job was started before.
      options: of the command, behind the run folder.
      store: the identifier of the run folder; None: all processes see it.
      look: called before each start, which may take seconds; what it raises passes through.
    """
    shared = {
        **variables,
        **({"HOLMES_STORE": store} if store else {}),
        "HOLMES_CONTROLLER": addresses.show(*controller.address),
        "HOLMES_KEY_FILE": str(key_file.absolute()),
        "HOLMES_KEY_DIGEST": key_files.key_digest(key_files.read_key_file(key_file)),
        "HOLMES_RESTART": str(restart),
    }
    folder = places.shown(run_dir)
    command = ["worker", folder, *options]
    for process in processes:
        look()
        env = {**shared, "HOLMES_PROCESS": str(process.number)}
        start = ProcessStart(process=process, command=command, env=env, run_dir=folder)
        launcher.start(start, controller.events)


def start_stores(
    launcher: Launcher,
    nodes: Sequence[Process],
    address: tuple[str, int],
    *,
    run_dir: Path,
    key_file: Path,
    events: EventSink,
) -> None:
    """Starts a process on each of some nodes, which lets others read its run folder.

    Args:
      launcher: starts them.
      nodes: which have parts of a checkpoint, and no process of the job.
      address: with its port, where the hub listens.
      run_dir: the run folder, where the launcher knows no other for a node.
      key_file: has the key of the job.
      events: receives their output and their ends.
    """
    folder = places.shown(run_dir)
    for process in nodes:
        env = {
            "HOLMES_CONTROLLER": addresses.show(*address),
            "HOLMES_KEY_FILE": str(key_file.absolute()),
            "HOLMES_NODE": process.node,
        }
        start = ProcessStart(process=process, command=["store", folder], env=env, run_dir=folder)
        launcher.start(start, events)
