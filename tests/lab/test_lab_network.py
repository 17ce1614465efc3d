"""Labs that are built: what their networks carry, what runs in them, and that nothing is left."""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from holmesjax.errors import FatalError
from holmesjax.lab import scaled_topology
from holmesjax.lab.injected_faults import parse
from holmesjax.lab.scaled_topology import LabNode
from holmesjax.lab.shell import FIRST_LINK, NIC, OWN, Commands, _mac, port_name, tear_down
from holmesjax.report import metrics
from holmesjax.topology import loading
from holmesjax.topology.machines import name_of
from launch.lab_machine import namespaces
from tests.jobs import RunningJob, compiling_once, run_launch_here, write_run
from tests.labs import CLUSTERS, left_behind, needs_lab

SERVER = """
import socket, sys
with socket.create_server((sys.argv[1], 5000)) as server:
    print("listening", flush=True)
    while True:
        connection, _ = server.accept()
        with connection:
            while connection.recv(1 << 20):
                pass
            connection.sendall(b"k")
"""
CLIENT = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 5000)) as sock:
    start_s = time.monotonic()
    sock.sendall(bytes(int(sys.argv[2])))
    sock.shutdown(socket.SHUT_WR)
    assert sock.recv(1) == b"k"
    print(start_s, time.monotonic())  # one clock for all processes of a machine
"""
CLASS = re.compile(r"class htb 1:(\w+) .*ceil (\S+) .*\n\s*Sent (\d+) bytes")
DEADLINE_S = 240.0  # for what must come: a hang guard


def wait_until(condition):
    deadline_s = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        assert time.monotonic() < deadline_s, "it does not come"
        time.sleep(0.02)
    return found


@contextlib.contextmanager
def network(topology_file: Path, scale: float, latency_s: float = 0.0):
    """A lab without a supervisor, built with the same lines, and with a latency of its links."""
    topology = loading.load(topology_file)
    shares = scaled_topology.make_shares(topology, "float32", sorted(os.sched_getaffinity(0)), None)
    version = namespaces.cgroup_version()
    lab = scaled_topology.make_lab(topology, shares, scale)
    links = {way: dataclasses.replace(link, latency_s=latency_s) for way, link in lab.links.items()}
    made = namespaces.commands_for(dataclasses.replace(lab, links=links))
    with namespaces.owned(made.id):
        try:
            for line in made.build():
                namespaces.run_line(line)
            yield made
        finally:
            for line in tear_down(made.id, version):
                namespaces.run_line(line)
    assert left_behind(made.id) == []


@contextlib.contextmanager
def serving(made: Commands, node, address):
    words = made.enter(node, [sys.executable, "-c", SERVER, address])
    server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout.readline() == "listening\n"
        yield server
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


def send(made: Commands, node, address, num_bytes) -> tuple[float, float]:
    """Sends bytes to a server, which has them all at the end; when they begin and end."""
    words = made.enter(node, [sys.executable, "-c", CLIENT, address, str(num_bytes)])
    done = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    start_s, end_s = map(float, done.stdout.split())
    return start_s, end_s


def classes(namespace: str, device: str) -> dict[tuple[int, str], int]:
    """The bytes that each class of a device has let through, by its number and its limit."""
    text = namespaces.run_line(f"tc -n {namespace} -s class show dev {device}")
    return {(int(minor, 16), ceil): int(sent) for minor, ceil, sent in CLASS.findall(text)}


def carriers(before, after, num_bytes) -> set[tuple[int, str]]:
    """The leaf classes through which bytes have gone; acknowledgements are a few of these."""
    grown = {name: sent - before.get(name, 0) for name, sent in after.items() if name[0] != NIC}
    assert all(not num_bytes / 4 < sent_bytes < num_bytes for sent_bytes in grown.values()), grown
    return {name for name, sent_bytes in grown.items() if sent_bytes >= num_bytes}


def says_nothing(made: Commands, node, address) -> bool:
    """Whether a call is neither answered nor refused: the caller asks again, or finds nobody."""
    words = made.enter(node, [sys.executable, "-c", CLIENT, address, "9000"])
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as caller:

        def asks_again() -> bool:
            table = ["ip", "netns", "exec", made.namespace(node), "cat", "/proc/net/tcp"]
            lines = subprocess.check_output(table, text=True).splitlines()[1:]
            calls = [line.split() for line in lines]
            return any(
                state == "02" and int(again, 16) for _, _, _, state, _, _, again, *_ in calls
            )

        wait_until(lambda: asks_again() or caller.poll() is not None)
        caller.kill()
        said, error = caller.communicate()
    return not said and (not error or b"No route to host" in error or b"timed out" in error)


UNEQUAL = """
name: unequal
clusters:
  - {name: a, fabric: infiniband, nodes: 2, devices: {kind: cpu, count: 1},
     nics: [{kind: infiniband_200}, {kind: ethernet_100}]}
  - {name: b, fabric: roce, nodes: 1, devices: {kind: cpu, count: 1},
     nics: [{kind: roce_200}, {kind: ethernet_100}]}
links:
  - {between: [a, b], fabric: ethernet, bandwidth: 40 Gb/s, latency: 50 us}
  - {between: [b, a], fabric: ethernet, bandwidth: 20 Gb/s, latency: 50 us}
"""


@needs_lab
def test_every_way_has_its_rate_and_faults_come_and_go(tmp_path):
    """The class of the kernel that lets the bytes of a way through has the rate of the way."""
    path = tmp_path / "topology.yaml"
    path.write_text(UNEQUAL)
    with network(path, 0.001) as made, contextlib.ExitStack() as stack:
        a0, a1, b0 = made.lab.nodes
        to_a, to_b = FIRST_LINK, FIRST_LINK + 1

        def way(node, to, num_bytes=500_000, device="eth0"):
            """The class of the sender that the bytes take."""
            before = classes(made.namespace(node), device)
            send(made, node, to, num_bytes)
            return carriers(before, classes(made.namespace(node), device), num_bytes)

        for node, address in ((a1, a1.fast_address), (a1, a1.slow_address), (b0, b0.slow_address)):
            stack.enter_context(serving(made, node, address))
        assert classes(made.namespace(a0), "fast0").keys() == {(NIC, "200Mbit")}
        before = classes(made.switch, port_name(a1, "fast0"))
        assert way(a0, a1.fast_address) == set()  # none of eth0's
        after = classes(made.switch, port_name(a1, "fast0"))
        assert after[NIC, "200Mbit"] - before[NIC, "200Mbit"] >= 500_000
        assert way(a0, a1.slow_address) == {(OWN, "100Mbit")}
        assert way(a0, b0.slow_address) == {(to_b, "40Mbit")}
        assert way(b0, a1.slow_address) == {(to_a, "20Mbit")}
        assert way(b0, a1.fast_address) == {(to_a, "20Mbit")}

        doing, undoing = made.fault(parse("slow b->a to 5 Mb/s", made.lab.topology))
        [namespaces.run_line(line) for line in doing]
        assert way(b0, a1.slow_address) == {(to_a, "5Mbit")}
        start_s, end_s = send(made, b0, a1.slow_address, 500_000)
        assert 8 * 500_000 / (end_s - start_s) < 1.05 * 5e6  # a busy machine only takes longer
        [namespaces.run_line(line) for line in undoing]
        assert way(b0, a1.slow_address) == {(to_a, "20Mbit")}
        for text in ("cut a->b 1s", "cut b-0 1s", "cut a-0 1s"):
            doing, undoing = made.fault(parse(text, made.lab.topology))
            [namespaces.run_line(line) for line in doing]
            assert says_nothing(made, a0, b0.slow_address), text
            # Packets are lost on their way: TCP gives up soon where it is told of each of them.
            said = namespaces.run_line(f"tc -n {made.namespace(a0)} -s qdisc show dev eth0")
            assert set(re.findall(r"dropped (\d+)", said)) == {"0"}, text
            [namespaces.run_line(line) for line in undoing]
            assert way(a0, b0.slow_address, 9000) == {(to_b, "40Mbit")}


SHARED = """
name: shared
clusters:
  - {name: a, fabric: infiniband, nodes: 2, devices: {kind: cpu, count: 1},
     nics: [{kind: infiniband_200}, {kind: ethernet_100}]}
  - {name: b, fabric: roce, nodes: 2, devices: {kind: cpu, count: 1},
     nics: [{kind: roce_200}, {kind: ethernet_100}]}
links:
  - {between: [a, b], fabric: ethernet, bandwidth: 40 Gb/s, capacity: 50 Gb/s, latency: 50 us}
  - {between: [b, a], fabric: ethernet, bandwidth: 40 Gb/s, latency: 50 us}
"""


SENT_BYTES = 2_500_000


def together(made, pipes, *ways):
    """The bytes through some classes of pipes, those of the senders, and the seconds of all ways.

    Args:
      made: the lab.
      pipes: classes to look at: an interface of the switch, a class of it, and its rate.
      ways: nodes that send so many bytes to nodes that serve, at once.
    """
    in_pipes = lambda: [classes(made.switch, device)[minor, rate] for device, minor, rate in pipes]
    before = [classes(made.namespace(node), "eth0") for node, _ in ways]
    old_bytes = in_pipes()
    with ThreadPoolExecutor(len(ways)) as pool:
        call = lambda way: send(made, way[0], way[1].slow_address, SENT_BYTES)
        times_s = list(pool.map(call, ways))
    own = [
        carriers(old, classes(made.namespace(node), "eth0"), SENT_BYTES)
        for (node, _), old in zip(ways, before, strict=True)
    ]
    took_s = max(end_s for _, end_s in times_s) - min(start_s for start_s, _ in times_s)
    found = [now - old for now, old in zip(in_pipes(), old_bytes, strict=True)]
    return found, own, took_s


@needs_lab
def test_nodes_of_a_cluster_share_a_pipe_one_way_and_nothing_else(tmp_path):
    """The bytes of both nodes go through one class, and no others do."""
    path = tmp_path / "topology.yaml"
    path.write_text(SHARED)
    with network(path, 0.001) as made, contextlib.ExitStack() as stack:
        a0, a1, b0, b1 = made.lab.nodes
        for node in (a0, a1, b0, b1):
            stack.enter_context(serving(made, node, node.slow_address))
        ports = namespaces.run_line(f"ip -n {made.switch} -o link show")
        assert set(re.findall(r" (in\d+)@", ports)) == {"in0"}  # cluster b has no pipe
        num_bytes, pipe = SENT_BYTES, ("in0", FIRST_LINK, "50Mbit")

        # A busy machine takes longer; no machine takes less than the pipe and the NICs allow.
        in_pipe, own, took_s = together(made, [pipe], (a0, b0))
        assert in_pipe[0] >= num_bytes
        assert own == [{(FIRST_LINK + 1, "40Mbit")}]
        assert 8 * num_bytes / took_s < 1.05 * 40e6
        in_pipe, own, took_s = together(made, [pipe], (a0, b0), (a1, b1))
        assert in_pipe[0] >= 2 * num_bytes
        assert own == [{(FIRST_LINK + 1, "40Mbit")}] * 2
        assert 8 * 2 * num_bytes / took_s < 1.05 * 50e6
        in_pipe, own, _ = together(made, [pipe], (b0, a0), (b1, a1))  # the other way has no pipe
        assert in_pipe[0] < num_bytes / 4  # acknowledgements
        assert own == [{(FIRST_LINK, "40Mbit")}] * 2
        in_pipe, own, _ = together(made, [pipe], (a0, a1), (a1, a0))  # within the cluster
        assert in_pipe[0] < num_bytes / 100
        assert own == [{(OWN, "100Mbit")}] * 2


UPLINKS = """
name: uplinks
clusters:
  - {name: a, fabric: local, nodes: 1, devices: {kind: cpu, count: 1}}
  - {name: b, fabric: local, nodes: 1, devices: {kind: cpu, count: 1}}
  - {name: c, fabric: local, nodes: 1, devices: {kind: cpu, count: 1}}
links:
  - {between: [a, b], fabric: ethernet, bandwidth: 40 Gb/s, latency: 50 us}
  - {between: [a, c], fabric: ethernet, bandwidth: 40 Gb/s, latency: 50 us}
  - {between: [b, c], fabric: ethernet, bandwidth: 40 Gb/s, latency: 50 us}
uplinks:
  - {pairs: [[a, c], [b, c]], capacity: 30 Gb/s}
  - {pairs: [[c, a], [c, b]], capacity: 80 Gb/s}
  - {pairs: [[a, b], [a, c]], capacity: 20 Gb/s}
  - {pairs: [[b, a], [c, a]], capacity: 80 Gb/s}
"""


@needs_lab
def test_pairs_of_clusters_get_together_no_more_than_the_uplink_that_they_share(tmp_path):
    """Whether they have the sender or the receiver in common; one of them goes through both."""
    path = tmp_path / "topology.yaml"
    path.write_text(UPLINKS)
    with network(path, 0.001) as made, contextlib.ExitStack() as stack:
        a, b, c = made.lab.nodes
        for node in (b, c):
            stack.enter_context(serving(made, node, node.slow_address))
        number = {name_of(pipe.ways): i for i, pipe in enumerate(made.lab.topology.pipes)}
        out, into = (f"in{number[name]}" for name in ("a -> b+c", "a+b -> c"))
        a_b, a_c = ((out, FIRST_LINK + i, "20Mbit") for i in (0, 1))
        through_a, through_b = ((into, FIRST_LINK + i, "30Mbit") for i in (0, 1))
        classes_of = [a_b, a_c, through_a, through_b]
        for ways, goes_through, most in (
            (((a, c), (b, c)), (False, True, True, True), 30e6),
            (((a, b), (a, c)), (True, True, True, False), 20e6),
        ):
            found, _, took_s = together(made, classes_of, *ways)
            for num_bytes, goes in zip(found, goes_through, strict=True):
                assert num_bytes >= SENT_BYTES if goes else num_bytes < SENT_BYTES / 4
            assert 8 * 2 * SENT_BYTES / took_s < 1.05 * most


def numbered(made: Commands, sender: LabNode, receiver: LabNode, numbers: Sequence[int]):
    """Sends a datagram for each number from node to node."""
    with namespaces.socket_on(made, sender, socket.SOCK_DGRAM) as sock:
        for number in numbers:
            sock.sendto(number.to_bytes(4), (receiver.slow_address, 5001))


def num_delayed(made: Commands) -> int:
    """The packets that have come out of the first delay."""
    table = namespaces.run_line(f"ip netns exec {made.switch} cat /proc/net/dev")
    return int(re.search(r"late0: *\d+ +(\d+)", table)[1])


@needs_lab
def test_a_delayed_link_takes_its_time_and_changes_nothing(tmp_path):
    """Both ways at once, and after cuts. No machine takes less than the round trip."""
    path, latency_s = tmp_path / "topology.yaml", 0.02
    path.write_text(UNEQUAL)
    with network(path, 0.01, latency_s) as made, contextlib.ExitStack() as stack:
        line = stack.enter_context(namespaces.delaying(made))
        # A bridge that asks for groups sends calls of its own to each port, at any moment.
        namespaces.run_line(f"ip -n {made.switch} link set br-eth type bridge mcast_querier 1")
        a, near, b = made.lab.nodes
        namespaces.round_trip_s(made, a, near)
        assert num_delayed(made) == 0  # inside a cluster there is no latency
        # It asks nobody where b is: while b is cut, that would have no answer.
        known = f"{b.slow_address} lladdr {_mac(b)} dev eth0 nud permanent"
        namespaces.run_line(f"ip -n {made.namespace(a)} neigh replace {known}")
        with namespaces.socket_on(made, b, socket.SOCK_DGRAM) as taker:
            taker.bind((b.slow_address, 5001))
            taker.settimeout(DEADLINE_S)
            numbered(made, a, b, range(100))
            assert [int.from_bytes(taker.recv(9)) for _ in range(100)] == list(range(100))
            passed = 100
            for number, text in enumerate(("cut a->b 1s", "cut b-0 1s", "cut a-0 1s"), 1):
                doing, undoing = made.fault(parse(text, made.lab.topology))
                [namespaces.run_line(do) for do in doing]
                numbered(made, a, b, [1000])
                passed += "a-0" not in text  # what leaves a node that is cut does not come so far
                wait_until(lambda passed=passed: num_delayed(made) == passed)
                [namespaces.run_line(undo) for undo in undoing]
                numbered(made, a, b, [number])
                passed += 1
                assert int.from_bytes(taker.recv(9)) == number, text

        assert namespaces.round_trip_s(made, a, b) >= 2 * latency_s

        num_bytes, random = 4_000_000, np.random.default_rng(0)
        sent = {end.name: random.bytes(num_bytes) for end in (a, b)}
        with namespaces.socket_on(made, b) as listener, namespaces.socket_on(made, a) as caller:
            listener.bind((b.slow_address, 0))
            listener.listen()
            caller.settimeout(DEADLINE_S)
            caller.connect(listener.getsockname())
            with listener.accept()[0] as answerer, ThreadPoolExecutor(4) as pool:
                answerer.settimeout(DEADLINE_S)
                sockets = {a.name: caller, b.name: answerer}
                sending = [pool.submit(sockets[end].sendall, sent[end]) for end in sent]
                read = lambda sock: sock.makefile("rb").read(num_bytes)
                got = dict(zip(sent, pool.map(read, (answerer, caller)), strict=True))
                [each.result() for each in sending]
        assert got == sent

        line.kill()
        line.wait()
        with pytest.raises(FatalError, match="ended before the lab"):
            stack.close()


@needs_lab
def test_a_node_has_its_own_name_hosts_cores_and_share(tmp_path):
    path = tmp_path / "topology.yaml"
    path.write_text(UNEQUAL)
    ask = """
import os, socket, time
wall_s, cpu_s = time.monotonic(), time.process_time()
while time.monotonic() < wall_s + 1.0:
    sum(range(1000))
share = (time.process_time() - cpu_s) / (time.monotonic() - wall_s)
names = [socket.gethostbyname(name) for name in ("a-0", "a-1", "b-0")]
print(repr([socket.gethostname(), names, sorted(os.sched_getaffinity(0)), share]))
"""
    with network(path, 0.001) as made:
        node = made.lab.nodes[0]
        done = subprocess.run(
            made.enter(node, [sys.executable, "-c", ask]),
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=True,
        )
    name, addresses, cores, share = eval(done.stdout)
    assert (name, cores) == ("a-0", list(node.share.cores))
    assert addresses == ["198.19.0.1", "198.19.0.2", "198.18.1.1"]  # gloo asks for its own
    assert share < 1.25 * node.share.quota
    assert socket.gethostname() != "a-0"
    assert "198.19" not in Path("/etc/hosts").read_text()


# ---- whole jobs ----------------------------------------------------------------------------


SETTINGS = ["model.num_layers=2", "model.width=16"]


def lab_job(folder: Path, *arguments, options=(), capacity=None, env=None) -> RunningJob:
    run_file = write_run(folder, CLUSTERS)
    if capacity:
        path = folder / "run_topology.yaml"
        shared = f"latency: 50 us, capacity: {capacity}}}"
        path.write_text(path.read_text().replace("latency: 50 us}", shared))
    before = ["lab", folder / "run_topology.yaml", "--scale", "0.01", *options, "--"]
    return RunningJob(run_file, *SETTINGS, *arguments, before=before, env=env)


def id_of(job: RunningJob) -> str:
    return re.match(r"lab +holmes-(\w+):", job.until("lab "))[1]


@needs_lab
def test_a_job_is_the_same_in_a_lab_and_its_bytes_are_those_of_the_kernel(tmp_path):
    wide = ["train.global_batch=32", "model.context_length=128", "model.width=64"]
    wide += ["train.steps=4", "train.eval_every=2", "train.eval_batches=1", "log.report=true"]
    env = compiling_once(tmp_path)
    faults = ["--fault", "step=1 cut a<->b 2s", "--fault", "step=3 freeze b-0 1s"]
    with lab_job(tmp_path, *wide, options=faults, capacity="20 Gb/s", env=env) as job:
        id = id_of(job)
        assert job.end() == 0, job.output
    assert left_behind(id) == []
    for said in ("cut a<->b 2s", "over: cut a<->b 2s", "freeze b-0 1s", "over: freeze b-0 1s"):
        assert re.search(rf"fault +after step \d+, .* s: {said}\n", job.output), said

    records = metrics.read(tmp_path / "run")
    lab = json.loads((tmp_path / "run/lab.json").read_text())
    told = {"a -> b": 0, "b -> a": 0}
    for record in records:
        told = {link: told[link] + record["link_bytes"][link] for link in told}
    counted = {f"{link['from']} -> {link['to']}": link for link in lab["links"]}
    for link, num_bytes in told.items():
        assert counted[link]["runtime_bytes"] == num_bytes > 1_000_000
        parts, kernel_bytes = counted[link]["parts"], counted[link]["kernel_bytes"]
        assert parts["steps"] == num_bytes
        assert (parts["validation"] > 0.1 * num_bytes) == (link == "a -> b")  # only forward
        assert 0 < parts["headers"] < 0.05 * kernel_bytes
        assert parts["again"] >= 0
        assert parts["rest"] > 0
    ports = [port for node in lab["nodes"] for port in node["interfaces"] if port["name"] == "eth0"]
    lost = sum(port["sent_bytes"] - port["received_bytes"] for port in ports)  # in the cut, too
    unknown = sum(link["parts"]["rest"] + link["parts"]["again"] for link in lab["links"]) - lost
    all_bytes = sum(link["kernel_bytes"] for link in lab["links"])
    assert abs(unknown) < 0.01 * all_bytes  # so the others are nearly all there is
    assert len(lab["faults"]) == 4
    sent = {
        f"{node['node']} {interface['name']}": interface["sent_bytes"]
        for node in lab["nodes"]
        for interface in node["interfaces"]
    }
    assert sum(record["nic_bytes"]["b-0 eth0"] for record in records) <= sent["b-0 eth0"]
    assert sent["b-0 eth0"] > told["b -> a"]
    assert sent["a-0 fast0"] > 10 * sent["b-0 fast0"]  # collectives stay on the cluster's own
    report = (tmp_path / "run/report.html").read_text()
    assert "<h2>Lab</h2>" in report
    assert "<th>Validation</th><th>Headers</th>" in report.replace("\n", "")
    assert "cut a&lt;-&gt;b 2s" in report

    shutil.rmtree(tmp_path / "run")
    one_core = ("taskset", "--cpu-list", "0")  # XLA adds in another order with other threads
    words = [tmp_path / "run.yaml", *SETTINGS, *wide]
    with RunningJob(*words, prefix=one_core, env=env) as job:
        assert job.end() == 0, job.output
    assert [r["loss"] for r in metrics.read(tmp_path / "run")] == [r["loss"] for r in records]


def processes_of_line(id: str) -> str:
    """The ids of the processes that delay the packets of a lab."""
    [folder] = (
        p for root in ("cpu", "") for p in Path("/sys/fs/cgroup", root).glob(f"holmes-{id}")
    )
    return (folder / "+line/cgroup.procs").read_text()


@needs_lab
def test_nothing_is_left_whatever_ends_a_lab(tmp_path, capsys):
    """One is killed by a fault and gives up, one stopped with Ctrl-C, one killed with -9."""
    folders = [tmp_path / name for name in ("gives_up", "stopped", "killed")]
    for folder in folders:
        folder.mkdir()
    options, endless = ["--cpu", "20%"], "train.steps=100000"
    kills = ["--fault", "t=0s kill b-0"]  # as soon as it is there
    with (
        lab_job(folders[0], endless, options=[*kills, *options]) as gives_up,
        lab_job(folders[1], endless, options=options) as stopped,
        lab_job(folders[2], endless, options=options) as killed,
    ):
        ids = [id_of(job) for job in (gives_up, stopped, killed)]
        for job in (stopped, killed):
            job.until("processes ")
            while len(job.workers()) < 3:
                assert job.process.poll() is None, job.output
                time.sleep(0.01)
            job.note_workers()
        assert processes_of_line(ids[2])
        killed.process.kill()
        assert killed.end() == -signal.SIGKILL
        # The process that delays ends by itself: nobody else would see that it is left.
        wait_until(lambda: not processes_of_line(ids[2]))
        assert left_behind(ids[2]) != []
        cleaned = run_launch_here(capsys, "lab", "clean")
        assert (cleaned.returncode, cleaned.stderr) == (0, "")
        assert ids[2] in cleaned.stdout
        assert left_behind(ids[2]) == []
        assert left_behind(ids[1]) != []  # its owner lives
        stopped.process.send_signal(signal.SIGINT)
        assert stopped.end() in (0, 128 + signal.SIGINT)  # after its first step, and before
        assert left_behind(ids[1]) == []
        assert gives_up.end() == 75, gives_up.output
        assert left_behind(ids[0]) == []
    assert "b/b-0 (stage 1, process 2): was killed by signal 9" in gives_up.output
    for job in (gives_up, stopped):
        assert "Traceback" not in job.output


@needs_lab
def test_a_lab_that_ends_while_others_are_cleaned_is_no_trouble(tmp_path, monkeypatch):
    monkeypatch.setattr(namespaces, "STATE", str(tmp_path))
    taken_away = []
    monkeypatch.setattr(namespaces, "_take_away", lambda id, version: taken_away.append(id))
    for name in ("crashed", "ends"):
        (tmp_path / name).mkdir()
    lock = namespaces.fcntl.flock

    def end(fd, operation):
        with contextlib.suppress(FileNotFoundError):
            (tmp_path / "ends").rmdir()
        lock(fd, operation)

    with namespaces.owned("lives"):
        monkeypatch.setattr(namespaces.fcntl, "flock", end)
        assert namespaces.clean() == taken_away == ["crashed"]
