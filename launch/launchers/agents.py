"""Starts an agent on every node of a topology, and asks it questions."""

import contextlib
import queue
import threading
import time
from collections import defaultdict, deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

from holmesjax.distributed.messages import Exit, Failed, Output, ProcessEvent
from holmesjax.errors import PeerError
from holmesjax.hosts.agent_messages import A, AgentHello, AskerHello, NoAnswer, Question
from holmesjax.plan.processes import Process, node_processes
from holmesjax.topology.machines import Topology
from holmesjax.transport import addresses, connections, key_files
from holmesjax.transport.admission import Admission
from holmesjax.transport.connections import Connection
from holmesjax.transport.records import by_kind, decode, encode
from launch.launchers.launcher import Launcher, ProcessStart

KEY = "agents.key"
LAST_LINES = 3
START_S = 60.0  # for the agents to come: SSH, Python on a slow file system or a busy host
ANSWER_S = 180.0  # for an answer: measurements over a slow link take longest


class Agents:
    """One agent a node; a context manager.

    Args:
      topology: has the nodes.
      launcher: starts the agents.
      folder: a folder that the nodes share, for the key.
    """

    def __init__(self, topology: Topology, launcher: Launcher, folder: Path):
        self._processes = {p.node: p for p in node_processes(topology)}
        self._node_of = {p.number: p.node for p in self._processes.values()}
        self._connections: dict[str, Connection[AgentHello]] = {}
        self._lines: dict[int, deque[str]] = defaultdict(lambda: deque(maxlen=LAST_LINES))
        self._ended: dict[int, str] = {}
        self._events: queue.SimpleQueue[ProcessEvent] = queue.SimpleQueue()
        self._changed = threading.Condition()
        key_file = folder / KEY
        with contextlib.ExitStack() as stack:
            stack.callback(_remove, key_file)
            key = key_files.make_key_file(key_file)
            connections.raise_open_files(len(self._processes) * (1 + launcher.files_each))
            sock = connections.listen(launcher.address, launcher.port)
            address = addresses.show(*connections.address_of(sock))
            admission = Admission(
                sock,
                key=key,
                hello=AskerHello(),
                expected=AgentHello,
                check=self._check,
                enter=self._enter,
                num_callers=len(self._processes),
            )
            stack.callback(admission.close)
            stack.callback(launcher.end)
            stack.callback(self._hang_up)
            env = {"HOLMES_CONTROLLER": address, "HOLMES_KEY_FILE": str(key_file.absolute())}
            for process in self._processes.values():
                own = {**env, "HOLMES_PROCESS": str(process.number)}
                start = ProcessStart(process=process, command=["agent"], env=own)
                launcher.start(start, self._events)
            self._wait()
            self._opened = stack.pop_all()

    def __enter__(self) -> "Agents":
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    @property
    def nodes(self) -> list[str]:
        """The nodes that answer, in the order of the topology."""
        return [node for node in self._processes if node in self._connections]

    @property
    def missing(self) -> dict[str, str]:
        """The nodes that do not answer, with the reason."""
        return {
            node: self._why(process)
            for node, process in self._processes.items()
            if node not in self._connections
        }

    def ask(self, node: str, question: Question[A], answer_s: float = ANSWER_S) -> A | NoAnswer:
        """Returns the answer of a node. Raises PeerError if the node is gone, or does not answer.

        `answer_s` is how long it may take.
        """
        connection = self._connections[node]
        connection.sock.settimeout(answer_s)
        try:
            connection.send(encode(question))
            answer = decode(connection.receive(), by_kind(question.answer, NoAnswer))
        except ValueError as error:
            return NoAnswer(problem="answers as another version of HolmesJAX", found=str(error))
        except OSError as error:
            problem = f"was lost while it was asked to {question.kind}"
            fix = "see that it is up, and that its network works"
            raise PeerError(f"node {node}", problem, found=error, fix=fix) from None
        return cast(A | NoAnswer, answer)

    def ask_all(
        self, questions: Mapping[str, Question[A]], answer_s: float = ANSWER_S
    ) -> dict[str, A | NoAnswer]:
        """Returns the answers of several nodes, asked at once."""
        with ThreadPoolExecutor(max(len(questions), 1)) as pool:
            answers = pool.map(lambda node: self.ask(node, questions[node], answer_s), questions)
            return dict(zip(questions, answers, strict=True))

    def _hang_up(self) -> None:
        for connection in self._connections.values():
            connection.close()  # an agent ends with it

    def _check(self, hello: AgentHello) -> str | None:
        node = self._node_of.get(hello.process)
        is_wanted = node is not None and node not in self._connections
        return None if is_wanted else "no such agent, or it is here already"

    def _enter(self, connection: Connection[AgentHello]) -> None:
        node = self._node_of[connection.hello.process]
        with self._changed:
            if node in self._connections:  # two agents of one node have come at once
                connection.close()
                return
            self._connections[node] = connection
            self._changed.notify_all()

    def _wait(self) -> None:
        """Waits until every agent has come or has ended."""
        deadline_s = time.monotonic() + START_S
        while time.monotonic() < deadline_s:
            self._hear()
            with self._changed:
                gone = {p.node for p in self._processes.values() if p.number in self._ended}
                if self._processes.keys() <= self._connections.keys() | gone:
                    return
                self._changed.wait(0.1)
        self._hear()

    def _hear(self) -> None:
        while not self._events.empty():
            number, record = self._events.get()
            if isinstance(record, Output):
                self._lines[number].append(record.line)
            elif isinstance(record, Exit):
                self._ended[number] = f"ended with status {record.status}"
            elif isinstance(record, Failed):
                self._ended[number] = f"{record.where}: {record.problem} ({record.found})"

    def _why(self, process: Process) -> str:
        lines = [line.strip() for line in self._lines[process.number] if line.strip()]
        return "; ".join([self._ended.get(process.number, "did not come in time"), *lines])


def _remove(key_file: Path) -> None:
    with contextlib.suppress(OSError):  # what the agents said is worth more
        key_file.unlink(missing_ok=True)
