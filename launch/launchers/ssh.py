"""Starts the processes of a job over SSH, with the system's own client.

There is one connection for each process. The script for the host's shell and the variables of the
process go in over stdin, so that no command line shows them. The stdin stays open. It ends when the
job is over, the launcher is killed or the connection breaks, and then the process is killed. The
output of the process and its exit status come back.
"""

import json
import os
import re
import shlex
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from holmesjax.distributed.messages import Exit, Failed, Output, ProcessEvent
from holmesjax.errors import REQUEUE, ConfigError, HolmesError, Mistakes
from holmesjax.hosts.process_environment import visible_devices
from holmesjax.plan.device_pool import with_node_variables
from holmesjax.topology.machines import Topology
from launch import programs
from launch.launchers import hosts
from launch.launchers.hosts import SshHost
from launch.launchers.launcher import (
    Children,
    EventSink,
    ProcessStart,
    own_address,
    parse_listen,
    with_key,
)
from launch.launchers.table import LauncherOptions

OPTIONS = {
    "BatchMode": "yes",  # never asks for a password
    "ConnectTimeout": "10",
    "ServerAliveInterval": "10",
    "ServerAliveCountMax": "6",
    "ControlMaster": "no",  # a connection of its own for each process
    "ControlPath": "none",
    "RequestTTY": "no",
    "ForwardX11": "no",
    "ForwardAgent": "no",
}
MAX_AT_ONCE = 16  # ssh clients that are asked for their configuration
END_S = 5.0  # for a process to be gone when its stdin has ended
MAX_BEGUN = 8  # connections to one sshd that it has not let in: it drops some of more than ten
LET_IN_S = 30.0  # after which a connection does not wait any longer for those before it
HERE = "holmes: let in"  # the first line of a host's shell

# The command of a host's shell. It is one compound command, so that the shell has read it whole
# before it runs. Nothing more comes on stdin then, until stdin ends. The process leads a group of
# its own (`die_with`): what it has started would hold the connection open, and outlive it.
SCRIPT = """{{
echo {here}
cd {folder} || exit {no_folder}
[ -f launch/__main__.py ] || exit {no_checkout}
command -v {python} >/dev/null || exit {no_python}
{exports}
export HOLMES_PARENT=$$
exec 3<&0
{python} -m launch {command} </dev/null 3<&- &
process=$!
( read -r _ <&3; kill -9 -$process; kill -9 $process ) >/dev/null 2>&1 &
leash=$!
exec 3<&-
wait $process 2>/dev/null
status=$?
kill $leash 2>/dev/null
kill -9 -$process 2>/dev/null
exit $status
}}
"""
NO_FOLDER, NO_CHECKOUT, NO_PYTHON = 121, 122, 123
SSH_FAILED = 255


class Refusal(NamedTuple):
    """A way in which a process cannot be started, in plain words."""

    problem: str
    fix: str
    exit_status: int = HolmesError.exit_status


# Refusals of the host's shell, by its exit status.
REFUSALS = {
    NO_FOLDER: Refusal("there is no such folder", "set `folder` in the hosts file to the checkout"),
    NO_CHECKOUT: Refusal(
        "the folder is no checkout of HolmesJAX", "set `folder` in the hosts file to the checkout"
    ),
    NO_PYTHON: Refusal("there is no such python", "set `python` in the hosts file"),
}
# Refusals of ssh, by the text that it prints.
SSH_REFUSALS = (
    (
        re.compile("Could not resolve hostname"),
        Refusal("no such host is known here", "correct `ssh` in the hosts file, or the DNS"),
    ),
    (
        re.compile("Host key verification failed|REMOTE HOST IDENTIFICATION HAS CHANGED"),
        Refusal(
            "its host key is unknown, or is not the one it had",
            "connect once by hand and compare the key: ssh {destination}",
        ),
    ),
    (
        re.compile("Permission denied|Too many authentication failures"),
        Refusal(
            "it does not let this user in",
            "see that `ssh -o BatchMode=yes {destination} true` works; set `identity_file`, or "
            "USER@HOST in `ssh`",
        ),
    ),
    (
        re.compile("Connection refused|timed out|No route to host|Network is unreachable"),
        Refusal(
            "it cannot be reached over SSH",
            "see that it is up, and that `port` is right in the hosts file",
            REQUEUE,
        ),
    ),
    (
        re.compile("Bad configuration option|command-line: line"),
        Refusal("ssh does not take its options", "correct `ssh_options` in the hosts file"),
    ),
    (  # last: it also follows what says more
        re.compile("(kex|ssh)_exchange_identification"),
        Refusal(
            "its sshd, or that of the gateway, ended the connection at once",
            f"see that it is up; where others connect through it, too, its sshd_config needs more "
            f"than the {MAX_BEGUN} of this launcher: `MaxStartups 1000`, say",
            REQUEUE,
        ),
    ),
)
BROKEN = Refusal("its SSH connection broke", "see that it is up", REQUEUE)


class SshLauncher:
    """The launcher `ssh`.

    Args:
      topology: on whose nodes processes are to be started.
      hosts_file: says how its nodes are reached.
      listen: HOST or HOST:PORT where the controller listens; None: the address from which this
        machine reaches the hosts.

    Raises ConfigError or Mistakes.
    """

    sees_exits = True
    is_here = False
    files_each = 1

    def __init__(self, topology: Topology, hosts_file: str | None, listen: str | None):
        if hosts_file is None:
            fix = "write --hosts HOSTS.yaml; docs/ssh.md has an example"
            raise ConfigError("--hosts", "the launcher `ssh` needs it", found="nothing", fix=fix)
        self._hosts = hosts.read(hosts_file, topology)
        targets = _targets(self._hosts, hosts_file)
        doors: dict[str, threading.Semaphore] = {}
        self._shut = set[threading.Semaphore]()
        self._doors = {
            target.node: doors.setdefault(target.first, threading.Semaphore(MAX_BEGUN))
            for target in targets
        }
        self.address, self.port = parse_listen(listen) if listen else (_own_address(targets), 0)
        self._children = Children()

    def start(self, start: ProcessStart, events: EventSink) -> None:
        host = self._hosts[start.process.node]
        gpus = visible_devices(start.process, host.env)
        own = with_node_variables(
            {"PYTHONUNBUFFERED": "1", **gpus, **with_key(start.env)}, host.env
        )
        if host.addresses:
            own["HOLMES_ADDRESSES"] = json.dumps(host.addresses)
        script = SCRIPT.format(
            folder=shlex.quote(host.folder),
            python=shlex.quote(host.python),
            exports="\n".join(f"export {name}={shlex.quote(own[name])}" for name in own),
            command=shlex.join(start.command_in(host.run_dir)),
            no_folder=NO_FOLDER,
            no_checkout=NO_CHECKOUT,
            no_python=NO_PYTHON,
            here=shlex.quote(HERE),
        )
        argv = ["ssh", *_arguments(host), "--", host.destination, "/bin/sh"]
        # ssh's own words are compared with SSH_REFUSALS.
        client_env = {**os.environ, "LC_ALL": "C"}
        door = self._doors[start.process.node]
        # One that has let nobody in for so long is not waited at again: the start goes on.
        is_counted = door.acquire(timeout=0 if door in self._shut else LET_IN_S)
        if not is_counted:
            self._shut.add(door)
        ears = _Ears(host, events, door.release if is_counted else None)
        try:
            self._children.start(start.process.number, argv, client_env, ears, stdin=script)
        except BaseException:
            ears.let_in()
            raise

    def end(self) -> None:
        self._children.end(patience_s=END_S)
        self._shut.clear()


def for_nodes(topology: Topology, options: LauncherOptions) -> SshLauncher:
    """Returns the launcher for the nodes of a topology (`table`)."""
    return SshLauncher(topology, options.hosts, options.listen)


def _arguments(host: SshHost) -> list[str]:
    """Returns the arguments of ssh before the destination; of equal options the first counts."""
    arguments = [f"-o{option}" for option in host.ssh_options]
    arguments += [f"-o{name}={value}" for name, value in OPTIONS.items()]
    if host.port is not None:
        arguments.append(f"-p{host.port}")
    if host.identity_file is not None:
        arguments += ["-oIdentitiesOnly=yes", f"-i{host.identity_file}"]
    return arguments


class _Ears:
    """Translates the events of one ssh client: its exit statuses become reasons.

    Args:
      host: to which it connects.
      events: receives what the process says.
      on_entry: is called when the host lets it in, or when it ends.
    """

    def __init__(
        self, host: SshHost, events: EventSink, on_entry: Callable[[], None] | None = None
    ):
        self._host, self._events, self._on_entry = host, events, on_entry
        self._lines: deque[str] = deque(maxlen=20)

    def let_in(self) -> None:
        """Lets the next connection begin."""
        if self._on_entry is not None:
            self._on_entry()
            self._on_entry = None

    def put(self, event: ProcessEvent) -> None:
        record = event.record
        if isinstance(record, Output):
            line = record.line.removesuffix(HERE)
            if line != record.line:
                self.let_in()
                if not line:
                    return
                event = event._replace(record=Output(line=line))  # of the profile of the account
            self._lines.append(line)
        elif isinstance(record, Exit):
            self.let_in()
            if failed := self._failed(record.status):
                event = event._replace(record=failed)
            elif record.status > 128:  # how a shell says that a signal ended its command
                event = event._replace(record=Exit(status=128 - record.status))
        self._events.put(event)

    def _failed(self, status: int) -> Failed | None:
        """Returns the reason if this process was never started or is cut off."""
        host = self._host
        if status in REFUSALS:
            refusal = REFUSALS[status]
            found = host.python if status == NO_PYTHON else host.folder
        elif status == SSH_FAILED:
            text = "\n".join(self._lines)
            refusal = next(
                (refusal for words, refusal in SSH_REFUSALS if words.search(text)), BROKEN
            )
            found = self._lines[-1].strip() if self._lines else "not a word"
        else:
            return None
        return Failed(
            exit_status=refusal.exit_status,
            where=f"ssh {host.destination}",
            problem=refusal.problem,
            found=found,
            fix=refusal.fix.format(destination=host.destination),
        )


# ---- where ssh goes ------------------------------------------------------------------------------


class _Target(NamedTuple):
    """The host to which ssh connects for a node."""

    node: str
    name: str  # of the host
    port: int
    is_direct: bool  # not by way of another host
    first: str  # whose sshd lets it in first: the host, or how it is reached


def _targets(nodes: Mapping[str, SshHost], file: str) -> list[_Target]:
    """Asks ssh for the host of each node. Raises Mistakes if two nodes are one host."""
    with ThreadPoolExecutor(MAX_AT_ONCE) as pool:
        found = list(pool.map(_target, nodes, nodes.values()))
    seen: dict[tuple[str, int], str] = {}
    mistakes = []
    for target in found:
        other = seen.setdefault((target.name, target.port), target.node)
        if target.is_direct and other != target.node:
            where, problem = f"{file}: {target.node}", f"is the same host as {other}"
            fix = "a node is a host of its own: correct one of the two"
            shown = f"{target.name}, port {target.port}"
            mistakes.append(ConfigError(where, problem, found=shown, fix=fix))
    if mistakes:
        raise Mistakes(mistakes)
    return found


def _target(node: str, host: SshHost) -> _Target:
    argv = ["ssh", "-G", *_arguments(host), "--", host.destination]
    asked = programs.ask(argv, fix="install OpenSSH: apt-get install openssh-client, say")
    where, fix = (
        f"ssh {host.destination}",
        "correct ssh_options in the hosts file, or ~/.ssh/config",
    )
    if asked.returncode:
        problem = "ssh does not take its options"
        raise ConfigError(where, problem, found=programs.said(asked), fix=fix)
    settings = dict(line.split(" ", 1) for line in asked.stdout.splitlines() if " " in line)
    proxies = [settings.get(name, "none") for name in ("proxyjump", "proxycommand")]
    name, port = settings.get("hostname"), settings.get("port", "")
    if name is None or not port.isdecimal():
        problem = "`ssh -G` names no host and port"
        raise ConfigError(
            where, problem, found=repr(asked.stdout[:80]), fix="use OpenSSH 6.8 or later"
        )
    is_direct = proxies == ["none", "none"]
    first = f"{name}:{port}" if is_direct else " ".join(proxies)
    return _Target(node, name, int(port), is_direct, first)


def _own_address(targets: Sequence[_Target]) -> str:
    """Finds this machine's address for the hosts. Raises ConfigError if only ssh reaches one."""
    for target in targets:
        if not target.is_direct:
            problem = (
                f"{target.name} is reached by way of another host, and the way back is not known"
            )
            fix = "write --listen HOST, with an address of this machine that all nodes reach"
            raise ConfigError("--listen", problem, found="nothing", fix=fix)
    return own_address({target.node: target.name for target in targets})
