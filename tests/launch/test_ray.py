"""The launcher `ray`: what it takes of Ray, its actor, and what it makes of Ray's answers.

Ray stands aside in most tests, where threads play it; the last one has a Ray of four nodes.
"""

import importlib
import json
import os
import queue
import signal
import sys
import threading
import time
from concurrent import futures
from pathlib import Path
from types import SimpleNamespace

import pytest

from holmesjax import job as jobs
from holmesjax.distributed.messages import Exit, Output
from holmesjax.errors import REQUEUE, HolmesError, PeerError
from holmesjax.plan.processes import make_processes
from holmesjax.report import metrics
from launch.launchers import ray, ray_group, ray_node
from launch.launchers.launcher import ProcessStart
from launch.launchers.ray_group import RayGroup, RayStart
from launch.launchers.ray_node import RayNode
from launch.launchers.ray_options import RayOptions
from launch.launchers.table import LauncherOptions
from tests.jobs import RunningJob, free_listen, write_run
from tests.launch.gpu_jobs import gpu_job
from tests.one_device import RTOL

CLUSTERS = {"a": (1, 1), "b": (1, 1)}
DEADLINE_S = 60.0  # for what must come: a hang guard


def test_all_mistakes_of_the_options_file_are_told_at_once(tmp_path):
    file = tmp_path / "ray.yaml"
    file.write_text("""
address: ray://head:10001
run_dir: s3:/runs
env: {HOLMES_KEY: x}
resources: {GPU: -1}
clusters: [{name: hoper}]
""")
    with pytest.raises(HolmesError) as caught:
        ray.for_job(gpu_job(tmp_path), LauncherOptions(options=str(file)))
    text = str(caught.value)
    for words in ("ray job submit", "run_dir", "HOLMES_KEY", "'hopper'", "resources.GPU"):
        assert words in text, words
    file.write_text("clusters: [{name: hopper, run_dir: 's3:/x', resources: {CPU: 1.5}}]")
    with pytest.raises(HolmesError) as caught:
        ray.for_job(gpu_job(tmp_path), LauncherOptions(options=str(file)))
    for words in ("clusters[0].resources.CPU: Ray divides", "clusters[0].run_dir: is a URL"):
        assert words in str(caught.value), words


def test_each_cluster_takes_what_its_nodes_have_unless_the_options_say_otherwise(tmp_path):
    job = gpu_job(tmp_path)
    file = RayOptions(resources={"fast": 0.5})
    of = lambda node, **how: ray.bundle_of(job.topology, node, file, **how)
    nodes = [process.node for process in make_processes(job.plan, job.topology, "node")]
    needs = ray.RayNeeds.of(job.topology, nodes, file, on_gpus=True)
    assert [*needs.bundles] == ["hopper", "ampere"]
    sizes = [b["GPU"] for of_nodes in needs.bundles.values() for b in of_nodes.values()]
    assert sizes == [8, 8, 4, 4]
    assert of(nodes[0], on_gpus=False) == {"CPU": 1, "fast": 0.5}


def test_a_ray_with_too_few_nodes_is_refused_before_anything_starts():
    node = lambda alive=True, **has: {"Alive": alive, "Resources": {**has, "node:10.0.0.4": 1.0}}
    needs = {"a": {"a-0": {"CPU": 1, "GPU": 4}, "a-1": {"CPU": 1, "GPU": 8}}}
    ray.refuse_too_few([node(CPU=9, GPU=8), node(CPU=1, GPU=4)], needs)
    needs["a"]["a-0"] = needs["a"]["a-1"]
    few = [node(CPU=9, GPU=8), node(CPU=9, GPU=4), node(alive=False, CPU=9, GPU=8)]
    with pytest.raises(HolmesError, match="takes 2 of Ray's nodes, 2 with CPU 1, GPU 8") as caught:
        ray.refuse_too_few(few, needs)
    assert "1 of 2 nodes are such: CPU 9, GPU 8; CPU 9, GPU 4" in str(caught.value)


def test_a_missing_ray_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(HolmesError, match="needs the package ray") as caught:
        ray.for_job(jobs.load(write_run(tmp_path, CLUSTERS), []), LauncherOptions())
    assert "pip install" in str(caught.value)


def test_an_address_where_no_ray_is_is_told_at_once(tmp_path, monkeypatch):
    options = tmp_path / "ray.yaml"
    options.write_text(f"address: {free_listen()}")
    job = jobs.load(write_run(tmp_path, CLUSTERS), [])
    for name in ("ray", "ray.util.placement_group", "ray.util.scheduling_strategies"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    with pytest.raises(HolmesError, match="no Ray answers at 127"):
        ray.for_job(job, LauncherOptions(options=str(options)))
    monkeypatch.setenv("RAY_ADDRESS", free_listen())
    with pytest.raises(HolmesError, match="no Ray answers at 127"):
        ray.for_job(job, LauncherOptions())
    run_folder = tmp_path / "run"
    run_folder.mkdir()
    (run_folder / "metrics.jsonl").write_text("a step")
    with pytest.raises(PeerError, match="no Ray answers at 127"):  # its head is being replaced
        ray.for_job(job, LauncherOptions(options=str(options)))
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")  # Ray itself says what is wrong with it
    ray._refuse_silent("auto")


# ---- Ray, played by threads ----------------------------------------------------------------------


class Lost(Exception):
    """Ray's answer where an actor has died."""


class PlayedRay:
    """Ray as far as `RayGroup` asks it: actors are objects of this process."""

    def __init__(self, has_nodes: bool = True):
        self.exceptions = SimpleNamespace(RayError=Lost)
        strategies = SimpleNamespace(PlacementGroupSchedulingStrategy=lambda *_, **__: None)
        self.placements, self.actors, self.has_nodes = [], [], has_nodes
        self.util = SimpleNamespace(
            placement_group=lambda bundles, strategy: self.placements.append(bundles) or bundles,
            remove_placement_group=self.placements.remove,
            scheduling_strategies=strategies,
        )

    def remote(self, cls):
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda: self.make(cls)))

    def make(self, cls):
        self.actors.append(actor := PlayedActor(cls(), self.has_nodes))
        return actor

    def wait(self, calls, num_returns=1, timeout=None):
        when = futures.FIRST_COMPLETED if num_returns == 1 else futures.ALL_COMPLETED
        done = futures.wait(calls, timeout, return_when=when).done
        return [c for c in calls if c in done], [c for c in calls if c not in done]

    def get(self, call):
        return call.result()

    def kill(self, actor):
        actor.lose()

    def available_resources(self):
        return {"CPU": 2.0}


class PlayedActor:
    """An actor whose calls run in threads; it may be lost."""

    def __init__(self, node, is_there):
        self.node, self.is_there, self.calls = node, is_there, []

    def __getattr__(self, name):
        return SimpleNamespace(remote=lambda *args: self.call(getattr(self.node, name), args))

    def call(self, method, args):
        self.calls.append(future := futures.Future())
        if self.is_there:
            threading.Thread(target=self.run, args=(future, method, args), daemon=True).start()
        return future

    def run(self, future, method, args):
        found = method(*args)
        if not future.done():
            future.set_result(found)

    def lose(self):
        for future in self.calls:
            if not future.done():
                future.set_exception(Lost("the worker died\nand more"))


@pytest.fixture
def group(tmp_path):
    """A group of two nodes, and starts of shell scripts on them."""
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch/__main__.py").touch()
    played = PlayedRay()
    processes = make_processes(
        (job := jobs.load(write_run(tmp_path, CLUSTERS), [])).plan, job.topology, "node"
    )
    bundles = {"a-0": {"CPU": 1.0}, "a-1": {"CPU": 1.0}}
    made, events = RayGroup(played, "the cluster a", bundles, 0.0), queue.Queue()

    def start(number, script, folder=tmp_path):
        start = ProcessStart(process=processes[number], command=(), env={})
        argv = ["/bin/sh", "-c", script]
        made.start(RayStart(start=start, folder=str(folder), argv=argv, env={}, events=events))

    def hear():
        event = events.get(timeout=DEADLINE_S)
        return event.process, event.record

    yield SimpleNamespace(played=played, start=start, hear=hear, end=made.end)
    made.end()


def test_processes_start_on_their_nodes_and_their_words_and_ends_are_told(group, tmp_path):
    group.start(0, "echo one; exit 3")
    assert [group.hear(), group.hear()] == [(0, Output(line="one")), (0, Exit(status=3))]
    group.start(1, "kill -9 $$")
    assert group.hear() == (1, Exit(status=-signal.SIGKILL))
    group.start(1, "true", folder=tmp_path / "nothing")
    number, failed = group.hear()
    assert (number, failed.exit_status) == (1, 2)
    assert (failed.where, failed.problem) == (
        "ray, node a-1",
        "the folder is no checkout of HolmesJAX",
    )
    group.start(1, "\0")
    assert group.hear()[1].found == "embedded null byte"


def test_a_line_behind_the_end_of_its_process_is_left_out(group, tmp_path, monkeypatch):
    monkeypatch.setattr(ray_node, "REST_S", 0.1)
    ended = tmp_path / "ended"
    wait = f"until [ -e {ended} ]; do sleep 0.01; done; echo late; echo > {ended}"
    begun = tmp_path / "begun"  # in a group of its own: what is left of the process's is killed
    script = f"setsid sh -c 'touch {begun}; {wait}' & until [ -e {begun} ]; do sleep 0.01; done"
    group.start(0, script)
    assert group.hear() == (0, Exit(status=0))
    ended.touch()
    deadline_s = time.monotonic() + DEADLINE_S
    while not ended.read_text():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    group.start(0, "echo next")
    assert group.hear() == (0, Output(line="next"))


def test_the_end_kills_what_runs_and_the_next_start_has_the_same_nodes(group, tmp_path):
    for _ in range(2):
        group.start(0, f"sleep 1000 & echo $! $$ > {tmp_path}/pids; echo up; wait")
        assert group.hear() == (0, Output(line="up"))
        group.end()
        for pid in (tmp_path / "pids").read_text().split():
            deadline_s = time.monotonic() + DEADLINE_S
            while runs(int(pid)):
                assert time.monotonic() < deadline_s
                time.sleep(0.01)
    assert len(group.played.placements) == 1
    assert len(group.played.actors) == 4


def runs(pid: int) -> bool:
    """Whether a process runs, and is no zombie that nobody has asked for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_lost_node_is_told_for_its_processes_alone_and_for_later_ones(group):
    group.start(0, "echo up; sleep 1000")
    group.start(1, "echo up; sleep 1000")
    assert {group.hear()[0], group.hear()[0]} == {0, 1}
    group.played.actors[1].lose()
    for _ in range(2):
        number, failed = group.hear()
        assert (number, failed.exit_status, failed.found) == (1, REQUEUE, "the worker died")
        group.start(1, "true")
    group.end()


def test_whatever_ray_raises_is_told_for_all_processes_and_for_later_ones(group, monkeypatch):
    def gone(*_, **__):
        raise RuntimeError("Ray has gone")

    group.start(0, "echo up; sleep 1000")
    assert group.hear() == (0, Output(line="up"))
    monkeypatch.setattr(group.played.util, "remove_placement_group", gone)
    for name in ("wait", "kill"):
        monkeypatch.setattr(group.played, name, gone)
    for number in (0, 1):
        told, failed = group.hear()
        assert (told, failed.exit_status, failed.found) == (number, REQUEUE, "Ray has gone")
        group.start(1, "true")
    monkeypatch.setattr(ray_node.threading.Thread, "start", gone)
    (node := RayNode()).start(7, str(Path(__file__).parents[2]), [sys.executable, "-c", ""], {})
    node.end()
    node._children[0].stdout.close()
    assert node.take(0.0) == [(7, ("the process cannot be started", "Ray has gone"))]


def test_nodes_that_do_not_come_in_time_fail_the_start_and_are_not_kept(group, monkeypatch):
    monkeypatch.setattr(ray_group, "LOOK_S", 0.02)
    group.played.has_nodes = False
    group.start(0, "true")
    number, failed = group.hear()
    assert (number, failed.exit_status, group.played.placements) == (0, REQUEUE, [])
    assert failed.problem.startswith("has not found 2 nodes with CPU 1 for the cluster a in")


def test_the_actor_has_nothing_of_ours():
    """Ray's nodes have other Pythons than the checkout's, which know no module of it."""
    text = Path(importlib.import_module(RayNode.__module__).__file__).read_text()
    assert "import holmesjax" not in text
    assert "from holmesjax" not in text
    assert "from launch" not in text


# ---- Ray itself ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def four_nodes():
    """The address of a Ray with two nodes for each cluster."""
    pytest.importorskip("ray", reason="needs Ray: pip install -e '.[ray]'")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    cluster = importlib.import_module("ray.cluster_utils").Cluster()
    try:
        for name in "aabb":
            cluster.add_node(num_cpus=1, resources={name: 1}, object_store_memory=80_000_000)
        yield cluster.address
    finally:
        cluster.shutdown()


@pytest.mark.exhaustive
@pytest.mark.timeout(1500)
@pytest.mark.filterwarnings("default")
def test_a_job_on_a_ray_of_four_nodes_survives_a_process_and_leaves_nothing(four_nodes, tmp_path):
    run_file = write_run(tmp_path, CLUSTERS)
    topology = tmp_path / "run_topology.yaml"  # of the one network that these nodes have
    text = topology.read_text().replace("fabric: infiniband", "fabric: ethernet")
    text = text.replace("fabric: roce", "fabric: ethernet").replace("{kind: infiniband_200}, ", "")
    topology.write_text(text.replace("{kind: roce_200}, ", ""))
    options = tmp_path / "ray.yaml"
    clusters = [{"name": name, "resources": {name: 1}} for name in "ab"]
    options.write_text(json.dumps({"address": four_nodes, "clusters": clusters}))
    words = [run_file, "train.steps=12", "checkpoint.every=2"]
    words += ["--launcher", "ray", "--options", options]
    whole, hurt = (f"run.dir={tmp_path}/{name}" for name in ("whole", "hurt"))
    with RunningJob(*words, whole) as job:
        job.until("step  ")  # Ray's own start takes minutes on a busy machine
        assert job.end() == 0, job.output
    with RunningJob(*words, hurt, "--max-restarts", "2") as job:
        job.until("step  5/12")
        os.kill(workers(tmp_path / "hurt")[0], signal.SIGKILL)
        assert job.end() == 0, job.output
    assert not workers(tmp_path / "hurt")
    of = lambda name: {r["step"]: r["loss"] for r in metrics.read(tmp_path / name)}
    assert of("whole") == pytest.approx(of("hurt"), rel=RTOL)
    with RunningJob(*words, f"run.dir={tmp_path}/killed", "train.steps=10000") as job:
        job.until("step  ")
        job.process.kill()
        deadline_s = time.monotonic() + DEADLINE_S
        while workers(tmp_path / "killed"):
            assert time.monotonic() < deadline_s, "processes outlive the launcher"
            time.sleep(0.1)


def workers(run_dir: Path) -> list[int]:
    """The processes of a job, by their command lines."""
    words = f"launch\0worker\0{run_dir}\0".encode()
    pids = [int(p.name) for p in Path("/proc").glob("[0-9]*") if words in command_line(p)]
    return sorted(pids)


def command_line(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:  # it has ended
        return b""
