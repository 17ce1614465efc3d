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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holmesjax.lab import scaled_topology
from holmesjax.lab.injected_faults import parse
from holmesjax.lab.shell import Commands, tear_down
from holmesjax.report import metrics
from holmesjax.topology import calibration, machines
from launch.lab_machine import namespaces
from tests.jobs import RunningJob, compiling_once, run_launch, run_launch_here, write_run
from tests.labs import needs_lab

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
    print(int(sys.argv[2]) / (time.monotonic() - start_s))
"""


def left_behind(id: str) -> list[str]:
    """What a lab of this name has left on this machine."""
    found = [name for name in os.listdir("/var/run/netns") if id in name]
    found += [str(p) for root in ("cpu", "") for p in Path("/sys/fs/cgroup", root).glob(f"*{id}*")]
    found += [str(p) for p in Path("/run/holmesjax").glob(f"*{id}*")]
    found += [name for _, name in socket.if_nameindex() if re.match(r"n\d+-|br-", name)]
    for path in Path("/proc").glob("[0-9]*/cgroup"):
        with contextlib.suppress(OSError):
            found += [str(path)] * (id in path.read_text())
    return found


@contextlib.contextmanager
def network(topology_file: Path, scale: float):
    """A lab without a supervisor, built with the same lines."""
    topology = machines.load(topology_file)
    shares = scaled_topology.make_shares(topology, "float32", sorted(os.sched_getaffinity(0)), None)
    version = namespaces.cgroup_version()
    lab = scaled_topology.make_lab(topology, shares, scale)
    made = dataclasses.replace(namespaces.commands_for(lab), has_netem=False)
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


def rate_bytes_per_s(made: Commands, node, address, num_bytes) -> float:
    words = made.enter(node, [sys.executable, "-c", CLIENT, address, str(num_bytes)])
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    return float(done.stdout)


UNEQUAL = """
name: unequal
clusters:
  - {name: a, fabric: infiniband, nodes: 2, devices: {kind: cpu, count: 1},
     nics: [{kind: infiniband_200}, {kind: ethernet_100}]}
  - {name: b, fabric: roce, nodes: 1, devices: {kind: cpu, count: 1},
     nics: [{kind: roce_200}, {kind: ethernet_100}]}
links:
  - {between: [a, b], fabric: ethernet, bandwidth: 40 Gb/s, latency: 50 us}
  - {between: [b, a], fabric: roce, bandwidth: 20 Gb/s, latency: 50 us}
"""


@needs_lab
def test_every_way_has_its_rate_and_faults_come_and_go(tmp_path):
    path = tmp_path / "topology.yaml"
    path.write_text(UNEQUAL)
    with network(path, 0.001) as made, contextlib.ExitStack() as stack:
        a0, a1, b0 = made.lab.nodes

        def has(rate_bit_per_s, node, to, num_bytes):
            """No faster than shaped; slower, if this machine is busy, but no other rate here."""
            found_bit_per_s = 8 * rate_bytes_per_s(made, node, to, num_bytes)
            return 0.6 < found_bit_per_s / rate_bit_per_s < 1.1

        for node, address in ((a1, a1.fast_address), (a1, a1.slow_address), (b0, b0.slow_address)):
            stack.enter_context(serving(made, node, address))
        assert has(200e6, a0, a1.fast_address, 10_000_000)
        assert has(100e6, a0, a1.slow_address, 5_000_000)
        assert has(40e6, a0, b0.slow_address, 2_000_000)
        assert has(20e6, b0, a1.slow_address, 1_000_000)
        assert has(20e6, b0, a1.fast_address, 1_000_000)

        doing, undoing = made.fault(parse("slow b->a to 5 Mb/s", made.lab.topology))
        [namespaces.run_line(line) for line in doing]
        assert has(5e6, b0, a1.slow_address, 500_000)
        [namespaces.run_line(line) for line in undoing]
        assert has(20e6, b0, a1.slow_address, 1_000_000)
        for text in ("cut a->b 1s", "cut b-0 1s", "cut a-0 1s"):
            doing, undoing = made.fault(parse(text, made.lab.topology))
            [namespaces.run_line(line) for line in doing]
            words = made.enter(a0, [sys.executable, "-c", CLIENT, b0.slow_address, "9000"])
            with pytest.raises(subprocess.TimeoutExpired):  # silent: no refusal, no reset
                subprocess.run(words, capture_output=True, timeout=1.5, check=True)
            [namespaces.run_line(line) for line in undoing]
            assert rate_bytes_per_s(made, a0, b0.slow_address, 9000) > 0


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


@needs_lab
def test_nodes_of_a_cluster_share_a_pipe_one_way_and_nothing_else(tmp_path):
    path = tmp_path / "topology.yaml"
    path.write_text(SHARED)
    with network(path, 0.001) as made, contextlib.ExitStack() as stack:
        a0, a1, b0, b1 = made.lab.nodes
        for node in (a0, a1, b0, b1):
            stack.enter_context(serving(made, node, node.slow_address))

        def together(*ways, num_bytes=2_500_000):
            """Bits per second of all ways at once."""
            with ThreadPoolExecutor(len(ways)) as pool:
                send = lambda way: rate_bytes_per_s(made, way[0], way[1].slow_address, num_bytes)
                return [8 * rate for rate in pool.map(send, ways)]

        [alone] = together((a0, b0))
        assert 0.6 * 40e6 < alone < 1.1 * 40e6
        both = together((a0, b0), (a1, b1))
        assert sum(both) < 1.15 * 50e6  # who ends last had it for itself in the end
        assert min(both) > 0.25 * sum(both)
        assert 1.2 * 50e6 < sum(together((b0, a0), (b1, a1))) < 1.1 * 80e6  # no pipe this way
        assert sum(together((a0, a1), (a1, a0))) > 1.2 * 50e6  # within the cluster


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
            timeout=60,
            check=True,
        )
    name, addresses, cores, share = eval(done.stdout)
    assert (name, cores) == ("a-0", list(node.share.cores))
    assert addresses == ["198.19.0.1", "198.19.0.2", "198.18.1.1"]  # gloo asks for its own
    assert share < 1.1 * node.share.quota
    assert socket.gethostname() != "a-0"
    assert "198.19" not in Path("/etc/hosts").read_text()


# ---- whole jobs ----------------------------------------------------------------------------


CLUSTERS = {"a": (1, 1), "b": (1,)}
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
    wide += ["train.steps=8", "train.eval_every=4", "train.eval_batches=2", "log.report=true"]
    env = compiling_once(tmp_path)
    faults = ["--fault", "step=3 cut a<->b 2s", "--fault", "step=6 freeze b-0 1s"]
    with lab_job(tmp_path, *wide, options=faults, capacity="20 Gb/s", env=env) as job:
        id = id_of(job)
        assert job.end(200) == 0, job.output
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
        assert 0 < parts["rest"] < 0.03 * kernel_bytes  # so the others are nearly all there is
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
    local = ("--launcher", "local")
    one_core = ("taskset", "--cpu-list", "0")  # XLA adds in another order with other threads
    words = [tmp_path / "run.yaml", *local, *SETTINGS, *wide]
    with RunningJob(*words, prefix=one_core, env=env) as job:
        assert job.end(120) == 0, job.output
    assert [r["loss"] for r in metrics.read(tmp_path / "run")] == [r["loss"] for r in records]


@needs_lab
def test_nothing_is_left_whatever_ends_a_lab(tmp_path):
    """One is killed by a fault and gives up, one stopped with Ctrl-C, one killed with -9."""
    folders = [tmp_path / name for name in ("gives_up", "stopped", "killed")]
    for folder in folders:
        folder.mkdir()
    options = ["--fault", "t=5s kill b-0", "--cpu", "20%"]  # not before all have been counted
    with (
        lab_job(folders[0], options=options) as gives_up,
        lab_job(folders[1], options=["--cpu", "20%"]) as stopped,
        lab_job(folders[2], options=["--cpu", "20%"]) as killed,
    ):
        ids = [id_of(job) for job in (gives_up, stopped, killed)]
        for job in (gives_up, stopped, killed):
            job.until("processes ")
            while len(job.workers()) < 3:
                assert job.process.poll() is None, job.output
                time.sleep(0.01)
            job.note_workers()
        killed.process.kill()
        assert killed.end() == -signal.SIGKILL
        assert left_behind(ids[2]) != []
        assert ids[2] in clean()
        assert left_behind(ids[2]) == []
        assert left_behind(ids[1]) != []  # its owner lives
        stopped.process.send_signal(signal.SIGINT)
        assert stopped.end() == 128 + signal.SIGINT
        assert left_behind(ids[1]) == []
        assert gives_up.end() == 75, gives_up.output
        assert left_behind(ids[0]) == []
    assert "b/b-0 (stage 1, process 2): was killed by signal 9" in gives_up.output
    for job in (gives_up, stopped):
        assert "Traceback" not in job.output


def clean() -> str:
    done = run_launch("lab", "clean")
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- the command line ----------------------------------------------------------------------


def test_a_dry_run_needs_no_root_and_changes_nothing(tmp_path):
    run_file = write_run(tmp_path, CLUSTERS)
    somebody = ["unshare", "--user", "--map-user=1000"] if os.geteuid() == 0 else []
    if (
        somebody
        and subprocess.run([*somebody, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("this user is root and cannot be another one")
    words = (tmp_path / "run_topology.yaml", "--cpu", "20%")
    done = run_launch("lab", *words, "--dry-run", "--", "train", run_file, prefix=somebody)
    assert done.returncode == 0, done.stderr
    assert "# take it away" in done.stdout
    assert not (tmp_path / "run").exists()
    assert left_behind(re.search(r"holmes-(\w+):", done.stdout)[1]) == []
    done = run_launch("lab", *words, "--", "train", run_file, prefix=somebody)
    assert done.returncode == 2
    assert "needs root" in done.stderr
    assert "--dry-run" in done.stderr


@pytest.mark.parametrize(
    "options, command, told",
    [
        ([], [], "needs a command"),
        ([], ["--", "train", "{run}", "--launcher", "local"], "starts the processes itself"),
        ([], ["--", "train", "{run}", "topology=x.yaml"], "the lab has its own topology"),
        ([], ["--", "generate", "runs/x"], "has no topology"),
        (["--cpu", "much"], ["--", "train", "{run}"], "write --cpu 45%"),
        (["--scale", "0"], ["--", "train", "{run}"], "must be above 0"),
        (["--fault", "cut a<->z"], ["--", "train", "{run}"], "no such cluster"),
    ],
)
def test_a_mistake_in_the_command_is_told_in_a_paragraph(tmp_path, capsys, options, command, told):
    run_file = write_run(tmp_path, CLUSTERS)
    words = [word.format(run=run_file) for word in command]
    done = run_launch_here(capsys, "lab", tmp_path / "run_topology.yaml", *options, *words)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert told in done.stderr


def test_a_plan_is_made_with_the_topology_of_the_lab(tmp_path, capsys):
    run_file = write_run(tmp_path, CLUSTERS)
    lab = ["lab", "configs/topologies/ib_roce.yaml", "--"]
    done = run_launch_here(capsys, *lab, "plan", run_file, "parallel.clusters=null")
    assert done.returncode == 0, done.stderr
    assert "ib_roce: 4 nodes" in done.stdout


@needs_lab
def test_the_doctor_sees_a_link_that_was_cut(tmp_path):
    run_file = write_run(tmp_path, CLUSTERS)
    told = {}
    for name, options in (("whole", []), ("cut", ["--fault", "t=0s cut a<->b 60s"])):
        lab = [tmp_path / "run_topology.yaml", "--scale", "0.01", *options]
        told[name] = run_launch("lab", *lab, "--", "doctor", run_file)
    assert told["whole"].returncode == 0, told["whole"].stdout
    assert "problem " not in told["whole"].stdout
    assert told["cut"].returncode == 1
    shut = re.findall(r"problem +ports: (\S+) does not reach (\S+) over", told["cut"].stdout)
    across = [(a, b) for a in ("a-0", "a-1") for b in ("b-0",)]
    assert sorted(shut) == sorted(across + [(b, a) for a, b in across])


def test_a_profile_would_run_on_the_node_that_is_named(tmp_path):
    run_file = write_run(tmp_path, CLUSTERS)
    lab = ["lab", tmp_path / "run_topology.yaml", "--dry-run", "--", "profile", run_file]
    done = run_launch(*lab, "--node", "b-0", "--output", tmp_path / "found.yaml")
    assert done.returncode == 0, done.stderr
    [started] = [line for line in done.stdout.splitlines() if "launch profile" in line]
    assert ".b-0 " in started
    assert f"--output {tmp_path}/found.yaml --node b-0" in started
    done = run_launch(*lab, "--node", "c-0")
    assert done.returncode == 2
    assert "must be a node of the topology" in done.stderr


@needs_lab
def test_a_profile_is_made_with_the_share_of_its_node(tmp_path):
    run_file = write_run(tmp_path, CLUSTERS)
    output = tmp_path / "found.yaml"
    lab = ["lab", tmp_path / "run_topology.yaml", "--cpu", "30%", "--scale", "0.01", "--"]
    done = run_launch(*lab, "profile", run_file, "--output", output)
    assert done.returncode == 0, done.stderr + done.stdout
    assert calibration.read(output).devices == ("cpu",)
    assert left_behind(re.search(r"holmes-(\w+):", done.stdout)[1]) == []
