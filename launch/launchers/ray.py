"""Starts the processes of a job on the nodes of a Ray cluster that is there.

Each cluster of the topology gets a placement group: a bundle for each of its nodes, all on nodes of
Ray's of their own. An actor in each bundle (`ray_node`) starts the processes of its node, and says
what they print and how they end. Ray takes actors and groups away when the launcher has gone.
"""

import importlib
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holmesjax import job as jobs
from holmesjax.errors import ConfigError, may_pass
from holmesjax.job import Job
from holmesjax.plan.device_pool import with_node_variables
from holmesjax.plan.processes import make_processes
from holmesjax.topology.machines import Topology
from holmesjax.transport import addresses
from launch.launchers import agents, ray_node, ray_options
from launch.launchers.components import read_options
from launch.launchers.launcher import EventSink, ProcessStart, parse_listen, with_key
from launch.launchers.ray_group import RayGroup, RayStart, show_resources
from launch.launchers.ray_options import RayOptions, options_of
from launch.launchers.table import LauncherOptions

ANSWER_S = 10.0  # for a call of Ray's head to be taken
# A driver ends, from C++ and with 1, when its head is silent for longer: our own heartbeats decide.
PATIENCE = ("RAY_gcs_rpc_server_reconnect_timeout_s", "86400")
RESTORED = (signal.SIGINT, signal.SIGTERM)  # Ray sets handlers of its own


@dataclass(frozen=True, kw_only=True)
class RayNeeds:
    """The resources of Ray that a job takes, by cluster and node."""

    topology: Topology
    bundles: Mapping[str, Mapping[str, Mapping[str, float]]]  # by cluster and node
    on_gpus: bool

    @classmethod
    def of(
        cls, topology: Topology, nodes: Sequence[str], options: RayOptions, *, on_gpus: bool
    ) -> "RayNeeds":
        """Returns what some nodes of a topology take."""
        bundles: dict[str, dict[str, Mapping[str, float]]] = {}
        for node in dict.fromkeys(nodes):
            cluster = topology.cluster_of(node).name
            bundle = bundle_of(topology, node, options, on_gpus=on_gpus)
            bundles.setdefault(cluster, {})[node] = bundle
        return cls(topology=topology, bundles=bundles, on_gpus=on_gpus)


def bundle_of(
    topology: Topology, node: str, options: RayOptions, *, on_gpus: bool
) -> dict[str, float]:
    """Returns the resources that a node takes; the options count more than the topology."""
    is_gpu = on_gpus and topology.node(node).device.name != "cpu"
    own = options_of(options, topology.cluster_of(node).name).resources
    bundle = {"CPU": 1.0, "GPU": float(topology.node(node).num_devices * is_gpu), **own}
    return {name: n for name, n in bundle.items() if n}


class RayLauncher:
    """The launcher `ray`.

    Args:
      needs: what the job takes.
      options: the options file.
      listen: HOST or HOST:PORT where the controller listens; None: Ray's address of this machine.
      wait_s: how long Ray may take to find nodes.

    Raises ConfigError if Ray is not installed here, does not answer, or has too few nodes.
    """

    sees_exits = True
    is_here = False
    files_each = 0

    def __init__(self, needs: RayNeeds, options: RayOptions, listen: str | None, wait_s: float):
        self._needs, self._options, self._wait_s = needs, options, wait_s
        self._ray = _join(options.address)
        if not options.grows:
            refuse_too_few(self._ray.nodes(), needs.bundles)
        self._groups: dict[str, RayGroup] = {}  # by node
        for cluster, bundles in needs.bundles.items():
            self._reserve(cluster, bundles)
        here = self._ray.util.get_node_ip_address()
        own: tuple[str, int] = (here, 0)
        self.address, self.port = parse_listen(listen) if listen else own

    def start(self, start: ProcessStart, events: EventSink) -> None:
        process = start.process
        options = options_of(self._options, process.cluster)
        if process.node not in self._groups:  # it has a part of a checkpoint, and no process
            bundle = bundle_of(
                self._needs.topology, process.node, self._options, on_gpus=self._needs.on_gpus
            )
            self._reserve(process.cluster, {process.node: bundle})
        own = with_node_variables({"PYTHONUNBUFFERED": "1", **with_key(start.env)}, options.env)
        python, words = options.python or sys.executable, start.command_in(options.run_dir)
        self._groups[process.node].start(
            RayStart(
                start=start,
                folder=options.folder or os.getcwd(),
                argv=[python, "-m", "launch", *words],
                env=own,
                events=events,
            )
        )

    def end(self) -> None:
        groups = dict.fromkeys(self._groups.values())
        for group in groups:
            group.begin_end()
        for group in groups:
            group.end()

    def _reserve(self, cluster: str, bundles: Mapping[str, Mapping[str, float]]) -> None:
        group = RayGroup(self._ray, f"the cluster {cluster}", bundles, self._wait_s)
        self._groups |= dict.fromkeys(bundles, group)


def refuse_too_few(
    nodes: Sequence[Mapping[str, Any]],
    bundles: Mapping[str, Mapping[str, Mapping[str, float]]],
) -> None:
    """Raises ConfigError if Ray has fewer nodes than a cluster takes, whether they are free or not.

    Args:
      nodes: as `ray.nodes()` gives them.
      bundles: cluster -> node -> its resources.
    """
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    total = lambda resources: sum(resources.values())
    for cluster, of_nodes in bundles.items():
        free = sorted(alive, key=total)
        for bundle in sorted(of_nodes.values(), key=total, reverse=True):
            fits = [have for have in free if _holds(have, bundle)]
            if fits:
                free.remove(fits[0])
                continue
            like = sum(_holds(other, bundle) for other in of_nodes.values())
            shown, has = show_resources(bundle), "; ".join(map(show_resources, alive))
            such = sum(_holds(have, bundle) for have in alive)
            raise ConfigError(
                "--launcher",
                f"the cluster {cluster} takes {len(of_nodes)} of Ray's nodes, {like} with {shown}",
                found=f"{such} of {len(alive)} nodes are such: {has}",
                fix="start more with `ray start`, correct `resources` in the options file, or set "
                "`grows: true` there if Ray adds nodes when they are asked for",
            )


def _holds(have: Mapping[str, float], bundle: Mapping[str, float]) -> bool:
    return all(have.get(name, 0) >= number for name, number in bundle.items())


def _join(address: str) -> Any:
    """Joins a Ray cluster; returns Ray. Raises ConfigError."""
    try:
        ray = importlib.import_module("ray")
        for name in ("placement_group", "scheduling_strategies"):
            importlib.import_module(f"ray.util.{name}")
    except ImportError as error:
        fix = "pip install 'ray==VERSION', with the version that `ray --version` says there"
        problem = "the launcher `ray` needs the package ray, as Ray's nodes have it"
        raise ConfigError("--launcher", problem, found=error, fix=fix) from None
    _refuse_silent(address)
    ray.cloudpickle.register_pickle_by_value(ray_node)  # nodes import nothing of ours
    os.environ.setdefault(*PATIENCE)
    handlers = {number: signal.getsignal(number) for number in RESTORED}
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError) as error:
        fix = "start it here with `ray start`, or correct `address` in the options file"
        problem = f"no Ray cluster that can be used is at {address}"
        found = str(error).strip().partition("\n")[0]
        raise ConfigError("--launcher", problem, found=found, fix=fix) from None
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return ray


def _refuse_silent(address: str) -> None:
    """Raises ConfigError if nobody answers at HOST:PORT. Ray itself asks again for minutes."""
    if address == ray_options.AUTO:
        address = os.environ.get("RAY_ADDRESS", address)  # which Ray takes then
    if address == ray_options.AUTO or not ray_options.is_place(address):
        return
    try:
        socket.create_connection(addresses.parse(address), timeout=ANSWER_S).close()
    except OSError as error:
        fix = "start Ray there with `ray start --head`, or correct `address` in the options file"
        problem = f"no Ray answers at {address}"
        raise ConfigError("--launcher", problem, found=error, fix=fix) from None


def for_job(job: Job, options: LauncherOptions) -> RayLauncher:
    """Returns the launcher for a job (`table`).

    Raises:
      ConfigError, Mistakes: the options file is wrong, or Ray does not answer.
      PeerError: Ray does not answer, or has too few nodes, for a run that has trained.
    """
    file = _read(job.topology, options)
    processes = make_processes(job.plan, job.topology, job.config.distributed.processes)
    nodes = [process.node for process in processes]
    needs = RayNeeds.of(job.topology, nodes, file, on_gpus=not job.config.run.rehearse)
    wait_s = job.config.distributed.start_timeout_s / 2  # the other half is the processes'
    try:
        return RayLauncher(needs, file, options.listen, wait_s)
    except ConfigError as error:  # Ray may have lost a node or its head, with the run
        raise may_pass(error) if jobs.has_trained(job.run_dir) else error from None


def for_nodes(topology: Topology, options: LauncherOptions) -> RayLauncher:
    """Returns the launcher for all nodes of a topology (`table`). Raises as `for_job` does."""
    file = _read(topology, options)
    needs = RayNeeds.of(topology, [node.name for node in topology.nodes], file, on_gpus=True)
    return RayLauncher(needs, file, options.listen, agents.START_S / 2)


def _read(topology: Topology, options: LauncherOptions) -> RayOptions:
    if options.options is None:
        return RayOptions()
    return read_options(RayOptions, options.options, topology, ray_options.mistakes)
