"""Relays between two ends of a transport, which lose connections or fall silent."""

import contextlib
import socket
import struct
import threading
import time

from holmesjax.transport import connections

RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing resets


class Proxy:
    """Passes bytes on between two ends, until it is told to stop.

    `passed` is told how many bytes have gone to the address, before more go there.
    """

    def __init__(self, address, passed=lambda num_bytes: None):
        self._listener = connections.listen("127.0.0.1")
        self._address, self._passed = address, passed
        self.silent = threading.Event()
        self._socks = [self._listener]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def address(self):
        return connections.address_of(self._listener)

    def _run(self):
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._address)
            except OSError:  # nobody is there any more
                near.close()
                continue
            self._socks += [near, far]
            for way in ((near, far, self._passed), (far, near, lambda num_bytes: None)):
                threading.Thread(target=self._pass, args=way, daemon=True).start()

    def _pass(self, source, target, passed):
        try:
            while data := source.recv(1 << 17):
                while self.silent.is_set():
                    time.sleep(0.01)
                target.sendall(data)
                passed(len(data))
        except OSError:
            pass

    def close(self):
        self.silent.clear()
        for sock in self._socks:
            end(sock)


def end(sock):
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


class Breaker:
    """A proxy whose connections are lost, each after some bytes, with a reset to both ends.

    `lasts` gives the bytes of the next connection; None: it is not lost. One that is `mute` passes
    nothing on, and is not closed. With `flips`, one bit is changed after these bytes, and all goes
    on: a man in the middle.
    """

    def __init__(self, address, lasts, flips=False):
        self._flips = flips
        self._listener = connections.listen("127.0.0.1")
        self._address, self._lasts = address, lasts
        self.is_open = True
        self.num_calls, self.num_lost = 0, 0
        self.mute: set[socket.socket] = set()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def address(self):
        return connections.address_of(self._listener)

    def silence(self):
        """Lets nothing more through the connections that there are."""
        self.mute.update(sock for pair in self._pairs for sock in pair)

    def _run(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self.num_calls += 1
                try:
                    far = socket.create_connection(self._address)
                except OSError:  # nobody is there any more
                    near.close()
                    continue
                self._pairs.append((near, far))
                left = [self._lasts()]
                for way in ((near, far), (far, near)):
                    threading.Thread(target=self._pass, args=(*way, left), daemon=True).start()

    def _pass(self, source, target, left):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if source in self.mute:
                    continue
                if left[0] is not None and self._flips and 0 < left[0] <= len(data):
                    data = bytearray(data)
                    data[left[0] - 1] ^= 1 << left[0] % 8
                    self.num_lost += 1
                    left[0] = None
                elif left[0] is not None:
                    data, left[0] = data[: left[0]], left[0] - len(data)
                target.sendall(data)
                if left[0] is not None and left[0] <= 0:
                    self.num_lost += 1
                    break
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                sock.shutdown(socket.SHUT_RD)  # wakes the other thread, and says nothing outside
                sock.close()

    def close(self):
        for sock in (self._listener, *(sock for pair in self._pairs for sock in pair)):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
