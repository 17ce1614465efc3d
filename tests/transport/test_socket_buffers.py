"""Buffers of sockets: what this kernel grants, and what others would."""

import socket

import pytest

from holmesjax.transport import socket_buffers
from holmesjax.transport.socket_buffers import Limits, limits, widen

MIB = 1 << 20


@pytest.mark.parametrize(
    ("grown", "core", "window", "expected"),
    [
        ("4096 16384 4194304", "212992", 16 * MIB, 8 * MIB // 3),  # by itself it grows further
        ("4096 16384 4194304", "212992", MIB, 8 * MIB // 3),
        ("4096 16384 67108864", "212992", 16 * MIB, 128 * MIB // 3),
        ("4096 16384 65536", None, MIB, 131072 // 3),  # core is not shown in a namespace
        ("4096 16384 65536", "0", MIB, 131072 // 3),
    ],
)
def test_a_program_asks_only_for_what_the_kernel_does_not_do_by_itself(
    tmp_path, monkeypatch, grown, core, window, expected
):
    for folder, name, text in (
        ("ipv4", "tcp_wmem", grown), ("ipv4", "tcp_rmem", grown),
        ("core", "wmem_max", core), ("core", "rmem_max", core),
    ):  # fmt: skip
        (tmp_path / folder).mkdir(exist_ok=True)
        if text is not None:
            (tmp_path / folder / name).write_text(text + "\n")
    monkeypatch.setattr(socket_buffers, "SYSCTL", tmp_path)
    with socket.socket() as sock:
        before = sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        assert widen(sock, window) == expected
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == before


def test_what_is_granted_is_read_back_from_the_kernel(monkeypatch):
    """A kernel that grows nothing is asked, and grants less than a program believes."""
    real = limits()
    assert real is not None
    monkeypatch.setattr(socket_buffers, "limits", lambda: (Limits(0, 1 << 40),) * 2)
    with socket.socket() as sock:
        granted = widen(sock, 1 << 28)
        sizes = [
            sock.getsockopt(socket.SOL_SOCKET, o) for o in (socket.SO_SNDBUF, socket.SO_RCVBUF)
        ]
    assert granted == min(sizes) // 2
    if all(limit.asked for limit in real):
        assert sizes == [min(limit.asked, 1 << 29) for limit in real]
