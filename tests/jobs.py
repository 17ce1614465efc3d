"""Whole jobs for tests: real processes on loopback that leave nothing behind."""

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from launch.__main__ import main

ROOT = Path(__file__).parent.parent
HANG_S = 240.0  # a process that takes longer hangs; pytest would end the test without its output
CLUSTER = """
  - name: {name}
    fabric: {fabric}
    nodes: [{nodes}]
    nics: [{{kind: {fabric}_200}}, {{kind: ethernet_25}}]
"""
# At a rate of 0.01 a change of the parameters by 1e-7 moved the tenth loss of one device by 6e-5.
RUN = """
topology: {topology}
run: {{dir: {run_dir}}}
model: {{num_layers: 4, width: 32, num_heads: 4, context_length: 32}}
data: {{corpus: python-stdlib}}
train: {{steps: 10, global_batch: 8, log_every_s: 0}}
log: {{report: false, tensorboard: false}}
optimizer: {{learning_rate: 3.0e-3, warmup_steps: 2, epsilon: 1.0e-3}}
parallel:
  clusters: [{clusters}]
  microbatches: 2
  fsdp: 1
  tensor: 1
  schedule: 1f1b
  activation_checkpointing: none
distributed: {{heartbeat_timeout_s: 40, start_timeout_s: 240}}
"""


def write_run(folder: Path, clusters: dict[str, tuple[int, ...]], name="run") -> Path:
    """A run file. `clusters`: name -> devices of each node; fabrics alternate."""
    text, names = "name: test\nclusters:\n", list(clusters)
    for i, (cluster, counts) in enumerate(clusters.items()):
        nodes = ", ".join(
            f"{{name: {cluster}-{j}, devices: {{kind: cpu, count: {count}}}}}"
            for j, count in enumerate(counts)
        )
        fabric = ("infiniband", "roce")[i % 2]
        text += CLUSTER.format(name=cluster, fabric=fabric, nodes=nodes)
    if len(names) > 1:
        text += "links:\n"
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            text += f"  - {{between: [{a}, {b}], fabric: ethernet, bandwidth: 25 Gb/s, "
            text += "latency: 50 us}\n"
    topology = folder / f"{name}_topology.yaml"
    topology.write_text(text)
    path = folder / f"{name}.yaml"
    path.write_text(RUN.format(topology=topology, run_dir=folder / name, clusters=", ".join(names)))
    return path


def compiling_as_here() -> dict[str, str]:
    """Variables with which processes that inherit none share the programs of this session."""
    return {name: os.environ[name] for name in ("XDG_CACHE_HOME", "XLA_FLAGS")}


def compiling_once(folder: Path) -> dict[str, str]:
    """Variables with which the first process of a stage compiles for the others.

    If it finds a program that the others have missed, they wait in vain. So each such job has a
    folder of programs of its own, and only one stage of several processes: two would share some.
    """
    return {"JAX_SHARE_BINARY_BETWEEN_HOSTS": "1", "XDG_CACHE_HOME": str(folder)}


def run_launch(*words, prefix=(), module="launch", **options) -> subprocess.CompletedProcess:
    """The outcome of `launch` with these words, in a process of its own.

    Args:
      words: the verb and its arguments.
      prefix: what comes before the interpreter.
      module: the program: `launch`, or one that adds to it.
      options: more of `subprocess.run`.
    """
    return subprocess.run(
        [*prefix, sys.executable, "-m", module, *map(str, words)],
        **{"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
        text=True,
        timeout=HANG_S,
        check=False,
    )


def run_launch_here(capsys, *words, cwd=ROOT) -> subprocess.CompletedProcess:
    """The same in this process, for what starts no devices: quicker by the start of Python."""
    capsys.readouterr()
    with contextlib.chdir(cwd), contextlib.ExitStack() as stack:
        for number in (signal.SIGINT, signal.SIGTERM):
            stack.callback(signal.signal, number, signal.getsignal(number))
        try:
            status = main(list(map(str, words)))
        except SystemExit as end:
            status = end.code
    printed = capsys.readouterr()
    return subprocess.CompletedProcess(words, status, printed.out, printed.err)


def children(pid: int) -> list[int]:
    """Processes whose parent is `pid`, by their number."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
    return found


class RunningJob:
    """`launch train` in the background; a context manager that ends what is left of it.

    `prefix` comes before the interpreter, `before` before `train`.
    """

    def __init__(self, *arguments, prefix=(), before=(), env=None):
        self.lines: list[str] = []
        self.processes: list[subprocess.Popen] = []  # that `external_job` has started
        self._started: set[int] = set()
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "launch", *map(str, (*before, "train", *arguments))],
            cwd=ROOT,
            env={**os.environ, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.note_workers()
        for pid in (self.process.pid, *self._started):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()

    def note_workers(self):
        self._started |= set(self.workers())

    def workers(self) -> list[int]:
        """Process ids, in the order of the job's processes."""
        found = {}
        for pid in children(self.process.pid):
            with contextlib.suppress(OSError, IndexError):  # it has ended, or not yet begun
                env = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                numbers = [v[15:] for v in env if v.startswith(b"HOLMES_PROCESS=")]
                found[int(numbers[0])] = pid
        return [found[number] for number in sorted(found)]

    def until(self, start: str) -> str:
        """Reads its output until a line starts like this."""
        for line in self.process.stdout:
            self.lines.append(line)
            if line.startswith(start):
                self.note_workers()
                return line
        raise AssertionError(f"no line {start!r} in\n{self.output}")

    def end(self) -> int:
        """Reads to the end; the exit status. Asserts that no process is left."""
        deadline_s = time.monotonic() + HANG_S
        guard = threading.Timer(HANG_S, self.process.kill)
        guard.start()
        try:
            # `communicate` would lose the lines behind the last one that `until` has read.
            self.lines += self.process.stdout
            self.process.wait()
        finally:
            guard.cancel()
        for pid in self._started:
            while Path(f"/proc/{pid}").exists():
                assert time.monotonic() < deadline_s, f"process {pid} is left behind"
                time.sleep(0.02)
        return self.process.returncode

    @property
    def output(self) -> str:
        return "".join(self.lines)


def own_address() -> str:
    """A loopback address of this process alone: a port of it that is closed stays free.

    One of 127.0.0.1 may be given to a connection of another test at once.
    """
    pid = os.getpid()
    return f"127.10.{pid >> 8 & 255}.{pid & 255}"


def unused_ports(count: int) -> list[int]:
    """Ports of all addresses that stay free: the system gives nobody ports as low as these."""
    found: list[int] = []
    while len(found) < count:
        port = 10_000 + next(_PORTS) % 20_000
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            found.append(port)
    return found


_PORTS = itertools.count(os.getpid() * 499)  # processes of pytest-xdist begin far from each other


def free_listen() -> str:
    """`HOST:PORT` for a listener, which stays free until it listens."""
    return f"{own_address()}:{unused_ports(1)[0]}"


@contextlib.contextmanager
def external_job(folder: Path, clusters: dict[str, tuple[int, ...]], *settings, odd=None, env=None):
    """A job whose processes the test starts itself, as a scheduler would; the `RunningJob`.

    `odd` says how they misbehave (`tests.odd_worker`), by number; those that are not in it do not.
    """
    run_file = write_run(folder, clusters)
    with (
        contextlib.ExitStack() as stack,
        RunningJob(run_file, "--launcher", "external", "--listen", free_listen(), *settings) as job,
    ):
        printed = [job.until(f"  {name}=") for name in ("HOLMES_CONTROLLER", "HOLMES_KEY_FILE")]
        variables = dict(line.strip().split("=", 1) for line in printed)
        fabrics = ("infiniband", "roce", "ethernet")
        for number in range(sum(map(len, clusters.values()))):
            addresses = {fabric: [f"127.0.9.{number + 1}"] for fabric in fabrics}
            output = stack.enter_context((folder / f"{number}.out").open("w"))
            words = ["launch", "worker", folder / "run"]
            if number in (odd or {}):
                words = ["tests.odd_worker", folder / "run", json.dumps(odd[number])]
            child = subprocess.Popen(
                [sys.executable, "-m", *words],
                cwd=ROOT,
                env={
                    **os.environ,
                    **variables,
                    "SLURM_PROCID": str(number),
                    "HOLMES_ADDRESSES": json.dumps(addresses),
                    "PYTHONPATH": str(ROOT),
                    **(env or {}),
                },
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            job.processes.append(child)
            stack.callback(child.wait, 30)
            stack.callback(child.kill)
        yield job


def listening_ports(pids: list[int]) -> set[tuple[str, int]]:
    """Addresses and ports on which these processes listen."""
    inodes = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                target = os.readlink(fd)
                if target.startswith("socket:["):
                    inodes.add(target[8:-1])
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and fields[9] in inodes:
            address, port = fields[1].split(":")
            octets = [str(byte) for byte in reversed(bytes.fromhex(address))]
            found.add((".".join(octets), int(port, 16)))
    return found
