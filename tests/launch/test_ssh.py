"""The launcher `ssh`, against an sshd of the test's own on loopback; and the hosts file.

Where no model is needed, the nodes' "python" is a shell script.
"""

import contextlib
import dataclasses
import io
import os
import queue
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from holmesjax import job as jobs
from holmesjax.distributed.messages import Exit, Output
from holmesjax.errors import HolmesError
from holmesjax.plan.processes import make_processes
from holmesjax.report import metrics
from holmesjax.topology import loading
from holmesjax.trainer import Trainer
from launch.launchers import hosts, launcher
from launch.launchers.launcher import ProcessStart
from launch.launchers.ssh import SCRIPT, SshLauncher
from tests.jobs import (
    HANG_S,
    ROOT,
    RunningJob,
    compiling_as_here,
    run_launch_here,
    unused_ports,
    write_run,
)

CLUSTERS = {"a": (1,), "b": (1,)}
SETTINGS = ["model.num_layers=2", "model.width=16"]
SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
CONFIG = """
Port {port}
ListenAddress 127.0.0.2
ListenAddress 127.0.0.3
HostKey {folder}/host
PidFile {folder}/sshd.pid
AuthorizedKeysFile {folder}/known.pub
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
MaxStartups 9:100:9
"""
HOSTS = """
defaults:
  port: {port}
  identity_file: {key}
  ssh_options: [UserKnownHostsFile={known_hosts}, GlobalKnownHostsFile=/dev/null]
  {defaults}
hosts:
  - {{node: a-0, ssh: {first}, addresses: {{infiniband: [127.0.9.1], ethernet: [127.0.9.1]}}}}
  - {{node: b-0, ssh: 127.0.0.3, addresses: {{roce: [127.0.9.2], ethernet: [127.0.9.2]}}}}
"""


@pytest.fixture(scope="module")
def sshd(tmp_path_factory):
    """A server that lets one key in; `.hosts(...)` writes a hosts file for it."""
    if SSHD is None or shutil.which("ssh") is None:
        pytest.skip("needs sshd and ssh: apt-get install openssh-server")
    folder, [port] = tmp_path_factory.mktemp("sshd"), unused_ports(1)
    for name in ("host", "known", "stranger"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True
        )
    (folder / "config").write_text(CONFIG.format(port=port, folder=folder))
    host_key = (folder / "host.pub").read_text()
    known_hosts = "".join(f"[127.0.0.{i}]:{port} {host_key}" for i in (2, 3))
    (folder / "known_hosts").write_text(known_hosts)
    if os.geteuid() == 0:  # as its service does; it stays, since another sshd may use it by now
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    log = (folder / "log").open("w")
    server = subprocess.Popen([SSHD, "-D", "-e", "-f", folder / "config"], stderr=log)
    try:
        deadline_s = time.monotonic() + HANG_S
        while "Server listening on 127.0.0.2" not in (text := (folder / "log").read_text()):
            if server.poll() is not None or time.monotonic() > deadline_s:
                pytest.skip(f"sshd does not start here: {text}")
            time.sleep(0.02)

        def write_hosts(path: Path, *, key="known", first="127.0.0.2", defaults="", **changes):
            values = {"port": port, "known_hosts": folder / "known_hosts", **changes}
            path.write_text(
                HOSTS.format(key=folder / key, first=first, defaults=defaults, **values)
            )
            return path

        yield SimpleNamespace(hosts=write_hosts)
    finally:
        server.terminate()
        server.wait(60)
        log.close()


def pids_of(words: str) -> list[int]:
    """Processes with this in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if words in path.read_bytes().replace(b"\0", b" ").decode(errors="replace"):
                found.append(int(path.parent.name))
    return found


def readers_of(path: Path) -> list[int]:
    """Processes that sleep with this as their stdin."""
    found = []
    for pid in pids_of("sleep 1000000"):
        with contextlib.suppress(OSError):  # of another test, and ending
            if os.readlink(f"/proc/{pid}/fd/0") == str(path):
                found.append(pid)
    return found


def wait_until(condition):
    deadline_s = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline_s, "it does not come"
        time.sleep(0.02)


# ---- whole jobs ----------------------------------------------------------------------------------


def number_of(pid: int) -> str:
    """The process tells which one it is; its variables came through ssh, unseen."""
    variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
    assert any(line.startswith("SSH_CONNECTION=") for line in variables)
    [number] = [line for line in variables if line.startswith("HOLMES_PROCESS=")]
    return number[-1]


def test_a_job_over_ssh_survives_the_death_of_a_process(sshd, tmp_path):
    """The losses of one process to which nothing happens."""
    settings = [*SETTINGS, "train.steps=12", "checkpoint.every=5"]
    env = ", ".join(f"{name}: '{value}'" for name, value in compiling_as_here().items())
    hosts_file = sshd.hosts(tmp_path / "hosts.yaml", defaults=f"env: {{{env}}}")
    run_file = write_run(tmp_path, CLUSTERS)
    ssh = ("--launcher", "ssh", "--hosts", hosts_file, "--max-restarts", 1)
    workers = lambda: pids_of(f"launch worker {tmp_path}/run")
    with RunningJob(run_file, *ssh, *settings) as job:
        wait_until(lambda: len(workers()) == 2)
        by_number = {number_of(pid): pid for pid in workers()}
        lines = []
        for pid in pids_of("127.0.0.3"):
            with contextlib.suppress(OSError):  # of another test, and it has ended
                lines.append(Path(f"/proc/{pid}/cmdline").read_text())
        assert lines
        assert not [line for line in lines if "HOLMES" in line]
        os.kill(by_number["1"], signal.SIGKILL)
        assert job.end() == 0, job.output
    assert "error: b/b-0 (stage 1, process 1): was killed by signal 9 (SIGKILL)" in job.output
    assert "starting again" in job.output
    assert workers() == []
    Trainer(write_run(tmp_path, CLUSTERS, name="local"), settings, io.StringIO()).train()
    losses = [[r["loss"] for r in metrics.read(tmp_path / name)] for name in ("run", "local")]
    assert len(losses[0]) == 12
    assert losses[0] == losses[1]


def start_endless(sshd, tmp_path, script: str, *arguments):
    """A job whose processes are a shell script."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    hosts_file = sshd.hosts(tmp_path / "hosts.yaml", defaults=f"python: {python}")
    run_file = write_run(tmp_path, CLUSTERS)
    return RunningJob(run_file, "--launcher", "ssh", "--hosts", hosts_file, *arguments)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_of_a_job_whose_launcher_is_killed(sshd, tmp_path, number):
    endless = f"exec sleep 1000000 < {tmp_path}/run.yaml"
    with start_endless(sshd, tmp_path, f"# {tmp_path}\n{endless}") as job:
        started = lambda: readers_of(tmp_path / "run.yaml")
        wait_until(lambda: len(started()) == 2)
        mine = started()
        try:
            job.process.send_signal(number)
            assert job.process.wait(HANG_S) != 0
            wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in mine))
            wait_until(lambda: not [p for p in pids_of(str(tmp_path)) if p != os.getpid()])
        finally:
            for pid in mine:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def test_a_process_that_ends_too_early_shows_its_last_words(sshd, tmp_path):
    script = "echo first; echo 'cannot read the stars' >&2; exit 3"
    with start_endless(sshd, tmp_path, script) as job:
        assert job.end() == 75
    assert "the last lines of " in job.output
    assert "  cannot read the stars\n" in job.output
    assert "ended with status 3" in job.output


MISTAKES = {
    "stranger": (2, "it does not let this user in", "Permission denied"),
    "host key": (2, "its host key is unknown", "Host key verification failed"),
    "host": (2, "no way to the host nowhere.invalid", "node a-0"),
    "host, with --listen": (2, "no such host is known here", "Could not resolve hostname"),
    "port": (75, "it cannot be reached", "Connection refused"),
    "python": (2, "there is no such python", "/nowhere/python"),
    "folder": (2, "there is no such folder", "/no where"),
    "checkout": (2, "the folder is no checkout of HolmesJAX", "found: /tmp"),
    "option": (2, "ssh does not take its options", "nonsense"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_ssh_says_is_put_in_words(sshd, tmp_path, capsys, mistake):
    status, *words = MISTAKES[mistake]
    changes = {
        "stranger": {"key": "stranger"},
        "host key": {"known_hosts": "/dev/null"},
        "port": {"port": unused_ports(1)[0]},
        "python": {"defaults": "python: /nowhere/python"},
        "folder": {"defaults": "folder: /no where"},
        "checkout": {"defaults": "folder: /tmp"},
        "option": {"known_hosts": "/dev/null, Nonsense=1"},
    }.get(mistake, {"first": "nowhere.invalid"})
    hosts_file = sshd.hosts(tmp_path / "hosts.yaml", **changes)
    listen = ("--listen", "127.0.0.1") if "--listen" in mistake else ()
    run_file = write_run(tmp_path, CLUSTERS)
    ssh = ("--launcher", "ssh", "--hosts", hosts_file)
    done = run_launch_here(capsys, "train", run_file, *ssh, *listen)
    assert done.returncode == status, done.stdout + done.stderr
    paragraph = (done.stdout + done.stderr).split("error: ")[1]
    for word in words:
        assert word.lower() in paragraph.lower()
    assert "fix:" in paragraph


# ---- one process ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "script, status", [("exit 0", 0), ("exit 75", 75), ("kill -9 $$", -9), ("kill -6 $$", -6)]
)
def test_the_status_of_a_process_comes_through(sshd, tmp_path, script, status):
    python = tmp_path / "py thon's"
    words = '"$HOLMES_X" "$@" "$HOLMES_ADDRESSES"'
    share = '"$XLA_PYTHON_CLIENT_MEM_FRACTION$XLA_CLIENT_MEM_FRACTION"'
    python.write_text(f"#!/bin/sh\necho {words} {share}\n{script}\n")
    python.chmod(0o755)
    defaults = f'python: "{python}"\n  env: {{XLA_CLIENT_MEM_FRACTION: "0.5"}}'
    path = sshd.hosts(tmp_path / "hosts.yaml", defaults=defaults)
    job = jobs.load(write_run(tmp_path, CLUSTERS))
    ssh = SshLauncher(job.topology, str(path), None)
    assert ssh.address == "127.0.0.1"  # all hosts are on loopback
    events = queue.Queue()
    process = make_processes(job.plan, job.topology, "node")[0]
    try:
        env = {"HOLMES_X": "it's $HOME", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.93"}
        ssh.start(ProcessStart(process=process, command=["worker", "a b"], env=env), events)
        lines = []
        while isinstance((event := events.get(timeout=HANG_S)).record, Output):
            lines.append(event.record.line)
    finally:
        ssh.end()
    addresses = '{"infiniband": ["127.0.9.1"], "ethernet": ["127.0.9.1"]}'
    # The profile of the account's shell may print lines before it.
    # JAX refuses two names of the share of memory: that of the node counts.
    assert lines[-1] == f"it's $HOME -m launch worker a b {addresses} 0.5"
    assert event == (0, Exit(status=status))


def test_no_more_connections_begin_at_once_than_an_sshd_takes(sshd, tmp_path):
    """This one drops each that comes while nine are not authenticated."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nsleep 0.2\n")
    python.chmod(0o755)
    path = sshd.hosts(tmp_path / "hosts.yaml", defaults=f"python: {python}")
    job = jobs.load(write_run(tmp_path, CLUSTERS))
    launcher, events = SshLauncher(job.topology, str(path), None), queue.SimpleQueue()
    first = make_processes(job.plan, job.topology, "node")[0]
    try:
        for number in range(32):
            process = dataclasses.replace(first, number=number)
            start = ProcessStart(process=process, command=["worker", "a"], env={})
            launcher.start(start, events)
        ends = {}
        while len(ends) < 32:
            event = events.get(timeout=HANG_S)
            if not isinstance(event.record, Output):
                ends[event.process] = event.record
    finally:
        launcher.end()
    assert set(ends.values()) == {Exit(status=0)}


def test_the_end_of_a_process_is_the_end_of_what_it_has_started(tmp_path):
    """It would hold the output open, and with it the connection. A host's shell runs the script."""
    code = """
        import os, subprocess
        from holmesjax.hosts.process_environment import die_with
        die_with(os.environ["HOLMES_PARENT"])
        print(subprocess.Popen(["sleep", "1000"]).pid, flush=True)
        os._exit(3)
    """
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{textwrap.dedent(code)}'\n")
    python.chmod(0o755)
    words = {"here": "''", "exports": "", "no_folder": 1, "no_checkout": 2, "no_python": 4}
    script = SCRIPT.format(folder=ROOT, python=python, command="worker", **words)
    shell = subprocess.Popen(
        ["/bin/sh"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    shell.stdin.write(script)
    shell.stdin.flush()  # and left open, as ssh does
    guard = threading.Timer(HANG_S, os.killpg, (shell.pid, signal.SIGKILL))
    guard.start()
    try:
        started = int(shell.stdout.read())
        assert shell.wait() == 3
    finally:
        guard.cancel()
        shell.stdin.close()
        shell.stdout.close()
    state = Path(f"/proc/{started}/stat")
    wait_until(lambda: not state.exists() or state.read_text().split()[2] == "Z")


# ---- the hosts file ------------------------------------------------------------------------------

GOOD = """
defaults:
  {run_dir: /data/run, folder: /checkout, env: {A: "1", B: "2"}, ssh_options: [Compression=yes]}
hosts:
  - {node: a-0, ssh: me@one, port: 2222, env: {B: "3"}, python: python3.12}
  - {node: b-0, addresses: {roce: [10.0.0.1, 10.0.0.2], ethernet: [10.1.0.1]}}
"""


def two_nodes(tmp_path):
    return loading.load(write_run(tmp_path, CLUSTERS).parent / "run_topology.yaml")


def test_a_hosts_file_fills_in_its_defaults(tmp_path):
    (tmp_path / "hosts.yaml").write_text(GOOD)
    found = hosts.read(tmp_path / "hosts.yaml", two_nodes(tmp_path))
    assert found["a-0"] == hosts.SshHost(
        destination="me@one",
        port=2222,
        identity_file=None,
        ssh_options=("Compression=yes",),
        folder="/checkout",
        python="python3.12",
        run_dir="/data/run",
        env={"A": "1", "B": "3"},
        addresses={},
    )
    assert found["b-0"].destination == "b-0"
    assert found["b-0"].addresses == {"roce": ["10.0.0.1", "10.0.0.2"], "ethernet": ["10.1.0.1"]}


WRONG = [
    ("{node: a-1, ssh: x}", "hosts[2].node: no such node", "did you mean 'a-0'?"),
    ("{node: a-0, ssh: x}", "hosts[2].node: is described twice", "found: a-0"),
    ("{node: c, ssh: me@one, port: 2222}", "hosts[2].ssh: is reached as another", "as a-0"),
    ("{node: c, ssh: you@ONE, port: 2222}", "hosts[2].ssh: is reached as another", "as a-0"),
    ("{node: c, ssh: 'one:2222'}", "is nothing that ssh can connect to", "and the rest in port"),
    ("{node: c, ssh: 'one '}", "is nothing that ssh can connect to", "HOST or USER@HOST"),
    ("{node: c, ssh: me@-oX=y}", "is nothing that ssh can connect to", "HOST or USER@HOST"),
    ("{node: c, addresses: {roce: [224.0.0.1]}}", "is no address of a host", "found: 224.0.0.1"),
    ("{node: c, addresses: {roce: [10.0.0.9, 10.0.0.9]}}", "roce[1]: is there twice", "10.0.0.9"),
    ("{node: c, addresses: {roce: [10.0.0.1]}}", "is the address of another node", "as b-0"),
    (
        "{node: c, addresses: {roce: [one]}}",
        "addresses.roce[0]: is no address of a host",
        "found: one",
    ),
    (
        "{node: c, addresses: {rose: [10.0.0.9]}}",
        "addresses.rose: must be one of",
        "you mean 'roce'",
    ),
    ("{node: c, ssh: -oProxyCommand=x}", "is nothing that ssh can connect to", "HOST or USER@HOST"),
    ("{node: c, ssh: one two}", "is nothing that ssh can connect to", "HOST or USER@HOST"),
    ("{node: c, port: 70000}", "hosts[2].port: must be at most 65535", "found: 70000"),
    ("{node: c, identity_file: /nowhere}", "hosts[2].identity_file: no such file", "/nowhere"),
    ("{node: c, ssh_options: [-v]}", "is no option of ssh", "found: -v"),
    ("{node: c, env: {A B: x}}", "cannot be the name of a variable", "found: A B"),
    ("{node: c, env: {HOLMES_PROCESS: x}}", "cannot be the name of a variable", "by the launcher"),
    ("{node: c, env: {A: 1}}", "hosts[2].env.A: must be a text", "in quotes"),
    (r'{node: c, ssh: "a\nb"}', "hosts[2].ssh: must be one line of readable", r"with '\n'"),
    (r'{node: "c\0"}', "hosts[2].node: must be one line of readable", r"with '\x00'"),
    (r'{node: c, folder: "/a\0"}', "hosts[2].folder: must be one line", r"with '\x00'"),
    (r'{node: c, env: {A: "x\nrm"}}', "hosts[2].env.A: must be one line", r"with '\n'"),
    (r'{node: c, env: {"A\n": x}}', "must be one line of readable characters", r"with '\n'"),
    (r'{node: c, ssh_options: ["A=\0"]}', "ssh_options[0]: must be one line", r"with '\x00'"),
    ("{node: c, env: 1}", "hosts[2].env: must be names with values", "NAME: value"),
    ("{node: c, run_dir: s3://b}", "hosts[2].run_dir: is a URL", "s3://BUCKET/NAME"),
    ("{node: c, run_dir: runs/x}", "hosts[2].run_dir: must be a whole path", "found: runs/x"),
    ("{nod: c}", "hosts[2].nod: no such setting", "did you mean 'node'?"),
]


@pytest.mark.parametrize("entry, problem, words", WRONG)
def test_mistakes_in_a_hosts_file_have_a_place(tmp_path, entry, problem, words):
    (tmp_path / "hosts.yaml").write_text(f"{GOOD}  - {entry}\n")
    with pytest.raises(HolmesError) as caught:
        hosts.read(tmp_path / "hosts.yaml", two_nodes(tmp_path))
    assert f"{tmp_path}/hosts.yaml:7: " in str(caught.value)
    assert problem in str(caught.value)
    assert words in str(caught.value)


def test_all_mistakes_of_a_hosts_file_come_at_once(tmp_path):
    text = "hosts:\n  - {node: a-0, port: 0}\n  - {nod: x}\n  - {node: a-9}\n"
    (tmp_path / "hosts.yaml").write_text(text)
    with pytest.raises(HolmesError) as caught:
        hosts.read(tmp_path / "hosts.yaml", two_nodes(tmp_path))
    lines = [line for line in str(caught.value).splitlines() if ": hosts[" in line]
    assert [line.partition(": hosts[")[2].partition(":")[0] for line in lines] == [
        "0].port",
        "1].nod",  # which `node` is not missing besides
    ]


def test_nodes_that_are_missing_are_named(tmp_path):
    (tmp_path / "hosts.yaml").write_text("hosts:\n  - {node: a-0}\n")
    with pytest.raises(HolmesError, match="lacks nodes of the topology test") as caught:
        hosts.read(tmp_path / "hosts.yaml", two_nodes(tmp_path))
    assert "found: no b-0" in str(caught.value)


def test_whoever_names_addresses_names_all_that_are_needed(tmp_path):
    text = "hosts:\n  - {node: a-0, addresses: {ethernet: [10.0.0.1]}}\n  - {node: b-0}\n"
    (tmp_path / "hosts.yaml").write_text(text)
    with pytest.raises(HolmesError, match="lacks a fabric that a-0 sends over") as caught:
        hosts.read(tmp_path / "hosts.yaml", two_nodes(tmp_path))
    assert "add infiniband: [" in str(caught.value)


def test_two_names_of_one_host_are_noticed(tmp_path):
    """The addresses are those of ssh's own configuration."""
    if shutil.which("ssh") is None:
        pytest.skip("needs ssh")
    text = "hosts:\n  - {node: a-0, ssh: 127.0.0.1}\n"
    text += "  - {node: b-0, ssh: me@alias, ssh_options: [HostName=127.0.0.1]}\n"
    (tmp_path / "hosts.yaml").write_text(text)
    job = jobs.load(write_run(tmp_path, CLUSTERS))
    with pytest.raises(HolmesError, match="is the same host as a-0"):
        SshLauncher(job.topology, str(tmp_path / "hosts.yaml"), None)


@pytest.mark.parametrize(
    "hosts_of, found",
    [
        ({"a": "127.0.0.2", "b": "127.0.0.3"}, "127.0.0.1"),
        ({"a": "127.0.0.2", "b": "10.0.0.9"}, "10.0.0.1"),  # b does not reach 127.0.0.1
        ({"a": "10.0.0.8", "b": "10.0.0.9"}, "10.0.0.1"),
        ({"a": "10.0.0.9", "b": "10.1.0.9"}, None),
    ],
)
def test_the_controller_listens_where_the_hosts_are(monkeypatch, hosts_of, found):
    """With routes that lead to 10.x.0.0/16 from 10.x.0.1."""

    class Probe(contextlib.AbstractContextManager):
        def __init__(self, *_):
            pass

        def __exit__(self, *_):
            pass

        def connect(self, target):
            net = target[0].rsplit(".", 2)[0]
            self.source = "127.0.0.1" if net.startswith("127") else f"{net}.0.1"

        def getsockname(self):
            return self.source, 0

    monkeypatch.setattr(launcher.socket, "socket", Probe)
    if found is None:
        with pytest.raises(HolmesError, match="from several addresses"):
            launcher.own_address(hosts_of)
    else:
        assert launcher.own_address(hosts_of) == found


@pytest.mark.parametrize("listen", ["0.0.0.0", "0.0.0.0:7000", ":7000", "10.0.0.1:", "h:99999"])
def test_the_controller_listens_on_one_named_address(tmp_path, listen):
    (tmp_path / "hosts.yaml").write_text("hosts:\n  - {node: a-0}\n  - {node: b-0}\n")
    job = jobs.load(write_run(tmp_path, CLUSTERS))
    with pytest.raises(HolmesError, match="--listen: must be one address"):
        SshLauncher(job.topology, str(tmp_path / "hosts.yaml"), listen)


# ---- the doctor ----------------------------------------------------------------------------------


def doctor(capsys, run_file, hosts, *overrides):
    ssh = ("--launcher", "ssh", "--hosts", hosts)
    return run_launch_here(capsys, "doctor", run_file, *ssh, *overrides)


def test_the_doctor_goes_over_ssh(sshd, tmp_path, capsys):
    """Not rehearsed, this machine has to have what the topology says."""
    hosts = sshd.hosts(tmp_path / "hosts.yaml")
    done = doctor(capsys, write_run(tmp_path, CLUSTERS), hosts)
    assert done.returncode == 1, done.stderr
    assert "2 ways, all open" in done.stdout
    assert "0 of 1 infiniband NICs work" in done.stdout
    wait_until(lambda: not [p for p in pids_of(str(tmp_path)) if p != os.getpid()])


def test_the_doctor_says_which_host_does_not_start(sshd, tmp_path, capsys):
    """Nothing else is in the way of a rehearsal."""
    hosts = sshd.hosts(tmp_path / "hosts.yaml")
    nowhere = "node: a-0, python: /no/such/python"
    hosts.write_text(hosts.read_text().replace("node: a-0", nowhere))
    done = doctor(capsys, write_run(tmp_path, CLUSTERS), hosts, "run.rehearse=true")
    assert done.returncode == 1
    assert (
        "no process on a-0: ssh 127.0.0.2: there is no such python (/no/such/python)" in done.stdout
    )
    assert "1 problem;" in done.stdout
