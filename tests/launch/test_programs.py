"""Programs of the system that are missing, fail, hang or answer nonsense: a message is shown."""

import errno
import re
import socket
import subprocess
from unittest import mock

import pytest

from holmesjax.errors import HolmesError, PeerError
from launch import programs
from launch.__main__ import main
from launch.launchers import launcher, ssh
from launch.launchers.hosts import SshHost
from tests.jobs import write_run

HANG = "exec sleep 100"
NAMES = "echo localhost; echo other"
SLURM = {  # what `scontrol` and `srun` do; None: they are not there
    "no scontrol": (None, None, r"scontrol: cannot be started\n  found: not installed"),
    "scontrol fails": (
        "echo no controller >&2; exit 1",
        None,
        r"of n\[1-2\]\n  found: no controll",
    ),
    "scontrol is silent": ("exit 3", None, r"of n\[1-2\]\n  found: not a word, and status 3"),
    "scontrol hangs": (HANG, None, r"scontrol: does not answer\n  found: no answer in 1 s"),
    "scontrol says nonsense": ("printf '\\377 b\\nc\\n'", None, "scontrol: names what is no host"),
    "scontrol says less": ("echo localhost", None, "the plan needs 2 nodes"),
    "no srun": (NAMES.replace("other", "127.0.0.1"), None, "srun: cannot be started"),
}


@pytest.mark.parametrize("scontrol, srun, message", SLURM.values(), ids=SLURM)
def test_an_allocation_without_working_programs(
    tmp_path, monkeypatch, capfd, scontrol, srun, message
):
    write_program(tmp_path, monkeypatch, scontrol=scontrol, srun=srun)
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}.items():
        monkeypatch.setenv(name, value)
    run_file = write_run(tmp_path, {"a": (1, 1)})
    assert main(["train", str(run_file), "--launcher", "slurm"]) == (75 if scontrol == HANG else 2)
    said = capfd.readouterr()
    assert "Traceback" not in said.out + said.err

    assert re.search(message, said.out + said.err), said


def write_program(tmp_path, monkeypatch, **does):
    """Programs of this test in place of all others; those of None are missing."""
    (tmp_path / "bin").mkdir()
    for name, script in does.items():
        if script is not None:
            (tmp_path / "bin" / name).write_text(f"#!/bin/sh\nPATH=/bin:/usr/bin\n{script}\n")
            (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(programs, "ANSWER_S", 1.0 if HANG in does.values() else 240.0)


@pytest.mark.parametrize(
    "script, message",
    [
        (None, "ssh: cannot be started\n  found: not installed"),
        ("exit 255", "ssh does not take its options\n  found: not a word, and status 255"),
        (HANG, "ssh: does not answer"),
        ("echo welcome", "`ssh -G` names no host and port\n  found: 'welcome"),
        ("echo hostname a; printf 'port \\377\\n'", "`ssh -G` names no host and port"),
    ],
)
def test_an_ssh_that_does_not_work(tmp_path, monkeypatch, script, message):
    write_program(tmp_path, monkeypatch, ssh=script)
    host = SshHost(
        destination="n",
        port=None,
        identity_file=None,
        ssh_options=(),
        folder="/",
        python="python",
        env={},
        addresses={},
        run_dir=None,
    )
    with pytest.raises(HolmesError, match=message):
        ssh._target("n", host)


@pytest.mark.parametrize(
    "script, message",
    [
        (None, "must say where the nodes find this folder"),  # no machine of the cluster
        ("exit 1", "sbatch refuses it\n  found: not a word, and status 1"),
        (HANG, "sbatch: does not answer"),
    ],
)
def test_an_sbatch_that_does_not_work(tmp_path, monkeypatch, capfd, script, message):
    write_program(tmp_path, monkeypatch, sbatch=script)
    run_file = write_run(tmp_path, {"a": (1, 1)})
    status = main(["train", str(run_file), "--launcher", "slurm", "--submit"])
    assert status == (75 if script == HANG else 2)
    assert message in capfd.readouterr().err


def test_a_host_whose_name_cannot_be_one_is_refused():
    with pytest.raises(HolmesError, match="no way to the host") as refused:
        launcher.own_address({"n": "a" * 70 + ".é"})
    assert refused.value.exit_status == 2


def test_what_a_machine_lacks_for_a_moment_is_no_mistake(monkeypatch):
    silent = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
    monkeypatch.setattr(socket, "getaddrinfo", mock.Mock(side_effect=silent))
    monkeypatch.setattr(subprocess, "run", mock.Mock(side_effect=OSError(errno.EAGAIN, "busy")))
    for ask in (lambda: launcher.own_address({"n": "host"}), lambda: programs.ask(["x"], fix="")):
        with pytest.raises(PeerError):
            ask()
