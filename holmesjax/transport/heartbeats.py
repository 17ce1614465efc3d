"""How long a link may be silent, and how often its ends send a heartbeat. No JAX.

`distributed.heartbeat_timeout_s` sets the limit. An end that has nothing to send pings well before
the limit, so that silence means the loss of the other end, of its process or of the link.
"""

import time


class Silence:
    """The silence of the other end of a connection.

    Args:
      limit_s: how long nothing at all may be heard.
    """

    def __init__(self, limit_s: float):
        self.limit_s = limit_s
        self.ping_s = limit_s / 4  # an end that has sent nothing for so long sends a ping
        self.look_s = limit_s / 8  # a call that receives ends after so long, to tell what it heard
        self.heard_s = time.monotonic()  # when the other end was heard last

    def end(self) -> None:
        """Notes that something was heard."""
        self.heard_s = time.monotonic()

    def check(self) -> None:
        """Raises TimeoutError once the silence has lasted for its limit."""
        if time.monotonic() - self.heard_s >= self.limit_s:
            raise TimeoutError(f"silent for {self.limit_s:g} s")

    @property
    def is_long(self) -> bool:
        """Whether half of the limit has passed: two pings have not come."""
        return self.left_s <= self.limit_s / 2

    @property
    def left_s(self) -> float:
        """Seconds until the silence has lasted for its limit."""
        return self.heard_s + self.limit_s - time.monotonic()
