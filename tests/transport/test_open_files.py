"""Hosts that let a process have too few open files."""

import socket
import subprocess
import sys
import threading

from tests.transport.calls import DEADLINE_S, call_at

OPEN_A_DOOR = """
import resource, sys, time
from holmesjax.transport import connections
from holmesjax.transport.admission import Admission
from tests.transport.calls import Named

resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))
sock = connections.listen("127.0.0.1")
print(connections.address_of(sock)[1], flush=True)
admission = Admission(sock, key=bytes(range(32)), hello=Named(name="inn"), expected=Named,
            check=lambda hello: None, enter=lambda connection: print("entered", flush=True))
sys.stdin.read()
print(f"trouble: {admission.trouble!r}")
"""


def test_a_listener_without_descriptors_says_so_and_goes_on():
    """A real process with a low limit: strangers take all of it, and go."""
    argv = [sys.executable, "-c", OPEN_A_DOOR]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        guard = threading.Timer(2 * DEADLINE_S, process.kill)
        guard.start()
        try:
            address = ("127.0.0.1", int(process.stdout.readline()))
            crowd = [socket.create_connection(address) for _ in range(30)]
            warning = process.stderr.readline()
            for stranger in crowd:
                stranger.close()
            call_at(address).close()
            assert process.stdout.readline() == "entered\n"
            output, more = process.communicate("", timeout=DEADLINE_S)
        finally:
            guard.cancel()
            process.kill()
    assert f"warning: cannot accept calls at 127.0.0.1:{address[1]}: Too many open files" in warning
    assert "the limit is 20" in warning
    assert more == ""  # once
    assert output == "trouble: ''\n"


def test_the_soft_limit_of_open_files_is_raised():
    code = """
import resource
from holmesjax.transport import connections

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 512))
connections.raise_open_files()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stdout == "512 512\n"


def test_a_job_that_needs_more_descriptors_than_the_host_allows_is_refused_with_the_numbers():
    code = """
import resource
from holmesjax.transport import connections

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 4096))
connections.raise_open_files(4096 - connections.OWN_FILES)
print(*resource.getrlimit(resource.RLIMIT_NOFILE), flush=True)
connections.raise_open_files(4097 - connections.OWN_FILES)
"""
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.stdout == "4096 4096\n"
    assert "needs 4097: 4033 for the processes" in done.stderr
    assert "a hard limit of 4096" in done.stderr


WAIT_FOR_A_NEIGHBOUR = """
import resource, sys
from holmesjax.transport.ports import Ports
from holmesjax.transport.rendezvous import Meeting, Rendezvous
from tests.distributed.scripted_jobs import PROCESSES

ports = Ports.open({"ethernet": ["127.0.0.1"]})
print(ports.book["ethernet"][0][1], flush=True)
sys.stdin.readline()  # all have called, and nobody has answered yet
resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))
rendezvous = Rendezvous(me=PROCESSES[2], processes=PROCESSES, topology=None, ports=ports,
                        look_up=None, key=bytes(32), about={}, min_streams=1, timeout_s=3.0,
                        encrypt="never")
Meeting(rendezvous, book={}, digests={0: "d"}, streams={0: 1}, enter=None, drop=None).hold()
"""


def test_a_neighbour_that_could_not_be_let_in_is_told_with_the_reason():
    argv = [sys.executable, "-c", WAIT_FOR_A_NEIGHBOUR]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        address = ("127.0.0.1", int(process.stdout.readline()))
        crowd = [socket.create_connection(address) for _ in range(30)]
        _, said = process.communicate("\n", timeout=DEADLINE_S)
        for stranger in crowd:
            stranger.close()
    last = said[said.rindex("PeerError") :]
    assert "c0/n0 did not connect for 3 s" in last
    assert "c1/n2 cannot accept calls at 127.0.0.1" in last
