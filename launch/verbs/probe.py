"""`launch probe`: measures the networks between nodes, and writes what it finds beside nominal."""

import argparse
import contextlib
import datetime
import importlib
import itertools
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from holmesjax import units
from holmesjax.costs import collective_times
from holmesjax.errors import ConfigError, Mistakes, PeerError
from holmesjax.files import yaml_files
from holmesjax.hosts import probe
from holmesjax.hosts.agent_messages import (
    A,
    Bind,
    Book,
    Collect,
    Join,
    NicPath,
    NoAnswer,
    Open,
    Question,
    Send,
)
from holmesjax.hosts.doctor import Finding
from holmesjax.hosts.probe import Phase, Step, Way
from holmesjax.topology import loading, saving, windows
from holmesjax.topology.machines import (
    Cluster,
    Collective,
    Link,
    Measured,
    Topology,
    Ways,
    name_of,
)
from holmesjax.topology.probe_speed import ProbeSpeed, Seconds
from holmesjax.transport import addresses
from holmesjax.transport.ports import streams_over
from holmesjax.units import show
from launch import writable_outputs
from launch.launchers import table
from launch.launchers.agents import ANSWER_S, Agents
from launch.launchers.launcher import Launcher, unwinding

SECTION = "measured"  # of the topology file
CONNECT_S = 5.0  # for one connection
JOIN_S = 150.0  # for the nodes of a cluster to meet, of which some import JAX a minute longer


def run(
    args: argparse.Namespace, launcher: Launcher | None = None, scale: float | None = None
) -> int:
    """Returns 0 if everything was measured, else 1. A given launcher and scale are a lab's."""
    path = _topology_path(args)
    topology = loading.load(path)
    name = args.launcher or "local"
    kind, is_in_lab = table.LAUNCHERS[name], launcher is not None
    stand_in = "lab" if is_in_lab else name if kind.is_here else None
    output = Path(args.output) if args.output else _default_output(path, stand_in)
    text = _text_to_extend(path)
    launcher = launcher or table.make(kind, topology, args)
    writable_outputs.make_folder(output.absolute().parent, "--output")
    writable_outputs.check_file(output, "--output")
    start_s = time.monotonic()
    print(f"probe       {len(topology.nodes)} nodes of {topology.name}", flush=True)
    with unwinding(), Agents(topology, launcher, output.absolute().parent) as agents:
        session = _Session(topology, agents, scale or 1.0, on_cpu=stand_in is not None)
        session.measure(collectives=not args.no_collectives)
    if not session.speeds:
        print(*session.findings, "nothing was measured, and nothing is written", sep="\n")
        return 1
    print(*_table(session.speeds), sep="\n")
    is_judged = is_in_lab or not kind.is_here
    warnings = probe.slow_ways(topology, session.speeds, scale or 1.0) if is_judged else []
    print(*session.findings, *warnings, sep="\n", end="\n" * bool(session.findings or warnings))
    if not is_judged:
        print("not compared with nominal: on one machine, all of it is loopback")
    _write(output, text, replace(topology, measured=session.measured()), session)
    problems = len(session.findings)
    counts = f"{problems or 'no'} problem{'s' * (problems != 1)}, {len(warnings) or 'no'} slow way"
    counts += "s" * (len(warnings) != 1)
    print(f"{counts}; it took {time.monotonic() - start_s:.0f} s")
    return 1 if problems else 0


def _topology_path(args: argparse.Namespace) -> Path:
    if args.topology is None:
        fix = "python -m launch probe TOPOLOGY.yaml"
        raise ConfigError("probe", "needs a topology file", found="nothing", fix=fix)
    return Path(args.topology)


def _default_output(path: Path, stand_in: str | None) -> Path:
    """Returns the topology file; if others stand in for its machines, a file of its own."""
    return path.with_name(f"{path.stem}_{stand_in}.yaml") if stand_in else path


def _text_to_extend(path: Path) -> str:
    """Returns the text of a topology file. Raises ConfigError if it cannot take the section."""
    values = yaml_files.read(path, ConfigError).values
    text = path.read_bytes().decode("utf-8")
    with tempfile.TemporaryDirectory() as folder:
        trial = Path(folder, path.name)
        trial.write_bytes(yaml_files.with_section(text, SECTION, f"{SECTION}: 0\n").encode())
        with contextlib.suppress(Mistakes):
            if yaml_files.read(trial, ConfigError).values == {**values, SECTION: 0}:
                return text
    problem, fix = (
        "a section cannot be added to it",
        "write a key a line, as in configs/topologies/",
    )
    raise ConfigError(str(path), problem, found=text.strip()[:60], fix=fix)


class _Session:
    """The measurements and the problems, while agents answer."""

    def __init__(self, topology: Topology, agents: Agents, scale: float, *, on_cpu: bool):
        self._topology, self._agents, self._on_cpu = topology, agents, on_cpu
        self._scale = scale  # of all rates, and the divisor of all latencies, in a lab
        self._books: dict[str, Book] = {}
        self._collectives: list[Collective] = []
        self.findings: list[Finding] = []
        self.speeds: dict[Way, ProbeSpeed] = {}
        self.together: dict[Step, float] = {}  # bytes per second of all ways of a step

    def measure(self, *, collectives: bool) -> None:
        for node, why in self._agents.missing.items():
            fix = f"see that {node} can be reached, and has this installation and the folder"
            self._problem("start", f"no process on {node}: {why}", fix)
        self._open()
        for phase in probe.schedule(self._topology, list(self._books)):
            self._phase(phase)
        for cluster in self._topology.clusters if collectives else ():
            nodes = [node.name for node in cluster.nodes]
            if self._can_collect(cluster, nodes):
                print(f"  collectives in {cluster.name}", flush=True)
                self._collect(cluster, nodes)

    def measured(self) -> Measured:
        """Returns the measurements in the digits that mean something.

        It leaves out ways that NCCL takes, which TCP cannot measure.
        """
        ways = [way for way in self.speeds if probe.goes_over_tcp(self._topology, way)]
        return Measured(
            date=datetime.date.today().isoformat(),
            pairs={
                way: Link(
                    fabric=self._topology.nominal_link(*way).fabric,
                    bandwidth_bytes_per_s=_rounded(self.speeds[way].bandwidth_bytes_per_s, "b/s"),
                    latency_s=_rounded(self.speeds[way].latency_s, "s"),
                )
                for way in ways
            },
            collectives=tuple(self._collectives),
            transports={
                cluster: _rounded(rate, "b/s")
                for cluster, rate in probe.transports(self._topology, self.speeds).items()
            },
            capacities={pipe: _rounded(rate, "b/s") for pipe, rate in self.capacities().items()},
        )

    def capacities(self) -> dict[Ways, float]:
        return probe.capacities(self._topology, self.speeds, self.together, self._scale)

    def ends(self, step: Step) -> str:
        """Returns the clusters of a step between clusters: "ib -> roce"."""
        homes = ((self._topology.cluster_of(node).name for node in way) for way in step)
        return name_of(tuple(sorted({(a, b) for a, b in homes})))

    def _problem(self, what: str, text: str, fix: str) -> None:
        self.findings.append(Finding(what=what, level="problem", text=text, fix=fix))

    def _ask(
        self, questions: Mapping[str, Question[A]], answer_s: float = ANSWER_S
    ) -> dict[str, A | NoAnswer]:
        """Asks several nodes at once. A lost node has the reason as its answer."""

        def ask(node: str) -> A | NoAnswer:
            try:
                return self._agents.ask(node, questions[node], answer_s)
            except PeerError as error:
                self._books.pop(node, None)
                return NoAnswer(problem=f"{error.where} {error.problem}", found=str(error.found))

        with ThreadPoolExecutor(max(len(questions), 1)) as pool:
            return dict(zip(questions, pool.map(ask, questions), strict=True))

    def _open(self) -> None:
        """Lets all nodes listen, and leaves out nodes that share an address."""
        for node, answer in self._ask(dict.fromkeys(self._agents.nodes, Open())).items():
            if isinstance(answer, NoAnswer):
                fix = "see that its addresses are those of its NICs"
                self._problem("addresses", f"{node}: {answer}", fix)
            else:
                self._books[node] = answer.book
        owners: dict[str, list[str]] = {}
        for node, book in self._books.items():
            for address in {a for fabric in book if fabric != "local" for a, _ in book[fabric]}:
                owners.setdefault(address, []).append(node)
        for address, nodes in owners.items():
            if len(nodes) > 1:
                fix = "give each node its own in the hosts file, or in HOLMES_ADDRESSES"
                text = f"{' and '.join(nodes)} both have {address}"
                self._problem("addresses", text, fix)
                for node in nodes:
                    self._books.pop(node, None)

    # ---- pairs of nodes ------------------------------------------------------------------------

    def _phase(self, phase: Phase) -> None:
        rest = f"; left out: {phase.left_out}" if phase.left_out else ""
        ways = sum(map(len, phase.steps))
        print(f"  {phase.title}: {ways} ways over {phase.fabric}{rest}", flush=True)
        for step in phase.steps:
            for way, of_streams in self._step(phase.fabric, step).items():
                self.speeds[way] = probe.speed(phase.fabric, of_streams)
        for step in phase.together:
            found = [
                probe.speed(phase.fabric, of) for of in self._step(phase.fabric, step).values()
            ]
            if len(found) == len(step):
                total = sum(speed.bandwidth_bytes_per_s for speed in found)
                self.together[step] = total
                ends, rate = self.ends(step), show(total, "b/s")
                print(f"    {ends}: {rate} by {len(step)} pairs together", flush=True)

    def _step(self, fabric: str, step: Step) -> Mapping[Way, Seconds]:
        """Measures the ways of a step at once; a way that cannot be measured is a finding."""
        ways = [way for way in step if all(self._has_address(node, fabric) for node in way)]
        found: dict[Way, dict[int, dict[int, list[float]]]] = {way: {} for way in ways}
        for is_one in (True, False):
            asked = {
                a: self._send(fabric, (a, b), found[a, b].get(1), streams=1 if is_one else None)
                for a, b in found
            }
            for (a, b), answer in zip(list(found), self._ask(asked).values(), strict=True):
                if isinstance(answer, NoAnswer):
                    fix = "see that the network and its firewalls let it through"
                    self._problem(f"{a} -> {b}", str(answer), fix)
                    del found[a, b]
                    continue
                streams = len(asked[a].paths)
                times = zip(probe.SIZES_BYTES, answer.seconds, strict=False)  # it stops early
                found[a, b][streams] = dict(times)
        return found

    def _has_address(self, node: str, fabric: str) -> bool:
        if node in self._books and not self._books[node].get(fabric):
            has = ", ".join(self._books[node])
            text = f"{node} has no address on {fabric}, only on {has}"
            fix = "correct the fabric in the topology file, or name the node's addresses"
            if not any(finding.text == text for finding in self.findings):
                self._problem("addresses", text, fix)
        return bool(self._books.get(node, {}).get(fabric))

    def _send(
        self,
        fabric: str,
        way: Way,
        of_one: Mapping[int, Sequence[float]] | None,
        streams: int | None,
    ) -> Send:
        """Asks for the connections and the windows that a run would use on a way.

        Args:
          fabric: of the way.
          way: from node to node.
          of_one: what one connection has taken, with the round trip, if that was measured.
          streams: connections in place of those of a run.
        """
        own, theirs = (self._books[node][fabric] for node in way)
        nominal_s = self._topology.round_trip_s(*way) / self._scale  # a slower lab has longer ones
        round_trip_s = statistics.median(of_one[0]) if of_one else nominal_s
        rate = self._scale * self._topology.nominal_link(*way).bandwidth_bytes_per_s
        filling = windows.streams_that_fill(rate, round_trip_s)
        count = streams or streams_over(max(probe.STREAMS, filling), len(own), len(theirs))
        pairs = [(own[i % len(own)][0], theirs[i % len(theirs)]) for i in range(count)]
        return Send(
            paths=[NicPath(source=here, address=a, port=port) for here, (a, port) in pairs],
            sizes_bytes=list(probe.SIZES_BYTES[1:]),
            rounds=probe.ROUNDS,
            window_bytes=windows.window_bytes(rate, round_trip_s, count),
            timeout_s=CONNECT_S + 4 * round_trip_s,
            # A connection opens its window over many round trips.
            limit_s=max(probe.LIMIT_S, probe.ROUND_TRIPS * round_trip_s),
        )

    # ---- collectives ---------------------------------------------------------------------------

    def _can_collect(self, cluster: Cluster, nodes: list[str]) -> bool:
        """Whether all nodes have an address on the cluster's fabric, and some reach each other."""
        is_reached = any(a in nodes and b in nodes for a, b in self.speeds)
        return is_reached and all(self._has_address(node, cluster.fabric) for node in nodes)

    def _collect(self, cluster: Cluster, nodes: list[str]) -> None:
        """Measures collectives in a JAX job of the cluster, up to the first slow size."""
        kinds = {node.device.name for node in cluster.nodes}
        [address, *_] = [address for address, _ in self._books[nodes[0]][cluster.fabric]]
        [free] = self._ask({nodes[0]: Bind(address=address, port=0)}).values()
        if isinstance(free, NoAnswer):
            self._refuse(cluster, nodes[0], free)
            return
        joins = {
            node: Join(
                fabric=cluster.fabric,
                coordinator=addresses.show(address, free.port),
                num_nodes=len(nodes),
                rank=rank,
                on_cpu=self._on_cpu or kinds == {"cpu"},
                timeout_s=JOIN_S,
            )
            for rank, node in enumerate(nodes)
        }
        if self._answered(cluster, self._ask(joins, JOIN_S + ANSWER_S)) is None:
            return
        for group, kind in itertools.product(probe.group_sizes(len(nodes)), collective_times.KINDS):
            for size in probe.COLLECTIVE_BYTES:
                question = Collect(
                    collective=kind, group_nodes=group, num_bytes=size, rounds=probe.ROUNDS
                )
                answers = self._answered(cluster, self._ask(dict.fromkeys(nodes, question)))
                if answers is None:
                    return
                seconds = [answer.seconds for answer in answers]
                rate = _rounded(probe.bus_bandwidth(kind, group, size, seconds), "b/s")
                self._collectives.append(
                    Collective(
                        cluster=cluster.name,
                        num_nodes=group,
                        kind=kind,
                        size_bytes=size,
                        bandwidth_bytes_per_s=rate,
                    )
                )
                if max(map(statistics.median, seconds)) > probe.LIMIT_S:
                    break

    def _answered(self, cluster: Cluster, answers: Mapping[str, A | NoAnswer]) -> list[A] | None:
        """Returns the answers of all nodes, or None if one is missing, which is a finding."""
        found = []
        for node, answer in answers.items():
            if isinstance(answer, NoAnswer):
                self._refuse(cluster, node, answer)
            else:
                found.append(answer)
        return found if len(found) == len(answers) else None

    def _refuse(self, cluster: Cluster, node: str, answer: NoAnswer) -> None:
        fix = "see what `launch doctor` says; --no-collectives leaves them out"
        self._problem(f"collectives in {cluster.name}", f"{node}: {answer}", fix)


# ---- what is printed and written -----------------------------------------------------------------


def _rounded(value: float, unit: units.Unit) -> float:
    """Rounds to three digits: the rest is noise."""
    return units.parse(show(value, unit), unit)


def _table(speeds: Mapping[Way, ProbeSpeed]) -> Iterator[str]:
    """Yields a line for each pair, with both ways if both are known."""
    width = max(len(f"{a} -> {b}") for a, b in speeds)
    for (a, b), speed in speeds.items():
        rate, latency = show(speed.bandwidth_bytes_per_s, "b/s"), show(speed.latency_s, "s")
        yield f"  {f'{a} -> {b}':<{width}}  {speed.fabric:<10} {rate:>10} {latency:>9}"


def _write(output: Path, text: str, topology: Topology, session: _Session) -> None:
    """Writes the topology file with its section, and beside it a picture and all times."""
    assert topology.measured is not None
    section = saving.measured_section(topology.measured)
    output.write_bytes(yaml_files.with_section(text, SECTION, section).encode())
    # The times come before the picture, which takes long where there are many nodes.
    times = output.with_name(f"{output.stem}_probe.json")
    times.write_text(json.dumps(_times(session), indent=1) + "\n", encoding="utf-8")
    picture = output.with_name(f"{output.stem}_probe.svg")
    figures = importlib.import_module("holmesjax.report.figures")  # it is slow to import
    figures.measured_ways(topology, session.speeds).savefig(picture)
    counted = Counter(speed.fabric for speed in session.speeds.values())
    ways = ", ".join(f"{count} over {fabric}" for fabric, count in counted.items())
    print(f"written     {output}, {picture.name}, {times.name}: {ways}")
    for pipe, rate in session.capacities().items():
        where = "`capacities`" if len(pipe) == 1 else "`uplinks`"
        print(f"            {name_of(pipe)}: nodes share {show(rate, 'b/s')}, in {where}")
    if len(topology.measured.pairs) < len(session.speeds):
        print(
            "            TCP over RDMA NICs of GPU clusters: in `transports`, for boundaries alone"
        )


def _times(session: _Session) -> dict[str, Any]:
    return {
        "pairs": [
            {
                "from": a,
                "to": b,
                "fabric": speed.fabric,
                "latency_s": speed.latency_s,
                "bandwidth_bytes_per_s": speed.bandwidth_bytes_per_s,
                "seconds": [
                    {"streams": streams, "bytes": size, "seconds": seconds}
                    for streams, of_sizes in speed.seconds.items()
                    for size, seconds in of_sizes.items()
                ],
            }
            for (a, b), speed in session.speeds.items()
        ],
        "together_bytes_per_s": {session.ends(s): r for s, r in session.together.items()},
    }
