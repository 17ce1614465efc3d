"""The nodes of a cluster on Ray: a placement group, and in each bundle an actor with processes."""

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holmesjax.distributed.messages import Exit, Failed, Output, ProcessEvent
from holmesjax.errors import REQUEUE, ConfigError
from holmesjax.hosts.process_environment import visible_devices
from launch.launchers import ray_node
from launch.launchers.launcher import EventSink, ProcessStart

TAKE_S = 5.0  # for which an actor waits for something to say
LOOK_S = 0.2  # between two looks for what is to be started, or whether all is to end
SAY_S = 10.0  # of waiting, which is said then
END_S = 10.0  # for an actor to end its processes


@dataclass(frozen=True, kw_only=True)
class RayStart:
    """A process to start on a node of Ray's.

    Args:
      start: the process of the job.
      folder, argv: as of `RayNode.start`.
      env: variables besides those of Ray's processes, and of its devices.
      events: hears of it.
    """

    start: ProcessStart
    folder: str
    argv: Sequence[str]
    env: Mapping[str, str]
    events: EventSink

    def tell(self, record: Output | Exit | Failed) -> None:
        self.events.put(ProcessEvent(self.start.process.number, record))


class NoNodesError(Exception):
    """Ray has not found all nodes in time; the text says what is free."""


class RayGroup:
    """The nodes of a cluster. One thread of its own does all with Ray: a start never waits.

    Args:
      ray: the module, which has joined Ray's cluster.
      what: the cluster, in words.
      bundles: node -> what of Ray's resources it takes.
      wait_s: how long Ray may take to find nodes.
    """

    def __init__(
        self, ray: Any, what: str, bundles: Mapping[str, Mapping[str, float]], wait_s: float
    ):
        self._ray, self._what, self._bundles, self._wait_s = ray, what, bundles, wait_s
        self._placement: Any = None
        self._session: _Session | None = None  # from the first start to the next end

    def start(self, start: RayStart) -> None:
        """Starts a process, as soon as its node is there."""
        if self._session is None:
            self._session = _Session(self)
        self._session.starts.put(start)

    def end(self) -> None:
        """Ends all processes, and waits for that. The nodes stay reserved for the next start."""
        self.begin_end()
        session, self._session = self._session, None
        if session is not None:
            session.thread.join(2 * END_S)

    def begin_end(self) -> None:
        """Ends all processes, and does not wait."""
        if self._session is not None:
            self._session.is_over.set()

    def place(self, session: "_Session") -> dict[str, str | None]:
        """Reserves nodes, and makes an actor on each; the GPUs of each that is there.

        Raises NoNodesError if Ray does not find all in time.
        """
        util = self._ray.util
        if self._placement is None:
            self._placement = util.placement_group(
                [dict(bundle) for bundle in self._bundles.values()], strategy="STRICT_SPREAD"
            )
        strategy = util.scheduling_strategies.PlacementGroupSchedulingStrategy
        remote = self._ray.remote(ray_node.RayNode)
        actors = {}
        for i, (node, bundle) in enumerate(self._bundles.items()):
            own = {name: n for name, n in bundle.items() if name not in ("CPU", "GPU")}
            actors[node] = remote.options(
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                resources=own,
                max_concurrency=2,  # it starts a process while it waits for something to say
                scheduling_strategy=strategy(self._placement, placement_group_bundle_index=i),
            ).remote()
        session.actors = actors
        asked = {node: actor.visible_devices.remote() for node, actor in actors.items()}
        begin_s, has_said = time.monotonic(), False
        while True:
            here, missing = self._ray.wait(
                [*asked.values()], num_returns=len(asked), timeout=LOOK_S
            )
            waited_s = time.monotonic() - begin_s
            if not missing or session.is_over.is_set():
                return {node: self._ray.get(ref) for node, ref in asked.items() if ref in here}
            if waited_s > self._wait_s:
                raise NoNodesError(show_resources(self._ray.available_resources()))
            if waited_s > SAY_S and not has_said:
                print(f"ray         waits for {self.wanted}", flush=True)
                has_said = True

    @property
    def wanted(self) -> str:
        """The nodes that this group takes, in words."""
        shown = show_resources(next(iter(self._bundles.values())))
        count = len(self._bundles)
        return f"{count} node{'s' * (count > 1)} with {shown} for {self._what}"

    def give_up(self) -> None:
        """Frees what was reserved, or asked for."""
        placement, self._placement = self._placement, None
        if placement is not None:
            with contextlib.suppress(Exception):  # whatever it is, more cannot be done
                self._ray.util.remove_placement_group(placement)

    def run(self, session: "_Session") -> None:
        """Does all that is done with Ray between a start and the next end.

        Whatever Ray raises is told for each process: nobody hears of a thread that ends.
        """
        given: Mapping[str, str | None] = {}
        try:
            given = self.place(session)
            session.hear(self._ray, given)
        except NoNodesError as error:
            self.give_up()
            session.fail_all(
                Failed(
                    exit_status=REQUEUE,
                    where="ray",
                    problem=f"has not found {self.wanted} in {self._wait_s:g} s",
                    found=f"free in the whole of Ray: {error}",
                    fix="free or add nodes, or correct `resources`; see `ray status`",
                )
            )
        except Exception as error:
            self.give_up()
            problem = "does not answer any more" if session.actors else "cannot make its actors"
            session.fail_all(_lost("ray", problem, error))
        finally:
            self._end_actors(session.actors, given)

    def _end_actors(self, actors: Mapping[str, Any], here: Collection[str]) -> None:
        with contextlib.suppress(Exception):  # the end of this process takes the actors away, too
            ends = [actors[node].end.remote() for node in here]
            if ends:
                self._ray.wait(ends, num_returns=len(ends), timeout=END_S)
        for actor in actors.values():  # what is left of its processes ends with it
            with contextlib.suppress(Exception):
                self._ray.kill(actor)


class _Session:
    """The processes from one start of the job to its end."""

    def __init__(self, group: RayGroup):
        self.starts: queue.SimpleQueue[RayStart] = queue.SimpleQueue()
        self.is_over = threading.Event()
        self.actors: Mapping[str, Any] = {}
        self._running: dict[int, RayStart] = {}
        self._keys = itertools.count()
        self.thread = threading.Thread(target=group.run, args=(self,), name="ray", daemon=True)
        self.thread.start()

    def fail_all(self, failed: Failed) -> None:
        """Says of each process, also of those that run, that it cannot be, until the end."""
        for start in self._running.values():
            start.tell(failed)
        self._running.clear()
        while not self.is_over.is_set():
            with contextlib.suppress(queue.Empty):
                self.starts.get(timeout=LOOK_S).tell(failed)

    def hear(self, ray: Any, given: Mapping[str, str | None]) -> None:
        """Starts what is to be started, and passes on what the actors say, until the end."""
        lost: dict[str, Failed] = {}
        calls = {actor.take.remote(TAKE_S): node for node, actor in self.actors.items()}
        while not self.is_over.is_set():
            while not self.starts.empty():
                start = self.starts.get()
                if failed := lost.get(start.start.process.node):
                    start.tell(failed)
                else:
                    self._send(start, given)
            if not calls:
                self.is_over.wait(LOOK_S)
                continue
            said, rest = ray.wait([*calls], timeout=LOOK_S)
            if rest:  # others that have an answer, too
                said += ray.wait(rest, num_returns=len(rest), timeout=0)[0]
            for call in said:
                node = calls.pop(call)
                try:
                    for key, word in ray.get(call):
                        self._tell(key, word)
                    calls[self.actors[node].take.remote(TAKE_S)] = node
                except ray.exceptions.RayError as error:
                    problem = "the actor that runs its processes was lost"
                    lost[node] = _lost(f"ray, node {node}", problem, error)
                    self._lose(node, lost[node])

    def _send(self, start: RayStart, given: Mapping[str, str | None]) -> None:
        process, env = start.start.process, dict(start.env)
        if (devices := given[process.node]) is not None:
            env.setdefault("CUDA_VISIBLE_DEVICES", devices)
        key = next(self._keys)
        self._running[key] = start
        env |= visible_devices(process, env)
        self.actors[process.node].start.remote(key, start.folder, start.argv, env)

    def _tell(self, key: int, said: str | int | tuple[str, str]) -> None:
        if (start := self._running.get(key)) is None:
            return  # a child of a process that has ended may still print
        if isinstance(said, str):
            start.tell(Output(line=said))
            return
        del self._running[key]
        if isinstance(said, int):
            start.tell(Exit(status=said))
            return
        problem, value = said
        failed = Failed(
            exit_status=ConfigError.exit_status,
            where=f"ray, node {start.start.process.node}",
            problem=problem,
            found=value,
            fix="set `folder` and `python` in the options file",
        )
        start.tell(failed)

    def _lose(self, node: str, failed: Failed) -> None:
        for key, start in [*self._running.items()]:
            if start.start.process.node == node:
                del self._running[key]
                start.tell(failed)


def show_resources(resources: Mapping[str, float]) -> str:
    """Returns resources as words; those that Ray makes for each node are left out.

    >>> show_resources({"CPU": 8.0, "a": 0.5, "memory": 1e9, "node:10.0.0.4": 1.0})
    'CPU 8, a 0.5'
    """
    left_out = ("memory", "object_store_memory")
    names = [name for name in sorted(resources) if name not in left_out and ":" not in name]
    names = [name for name in names if "_group_" not in name]
    return ", ".join(f"{name} {resources[name]:g}" for name in names) or "nothing"


def _lost(where: str, problem: str, error: Exception) -> Failed:
    found = (str(error).strip() or type(error).__name__).splitlines()[0]
    fix = "see `ray status`, and Ray's logs of the node"
    return Failed(exit_status=REQUEUE, where=where, problem=problem, found=found, fix=fix)
