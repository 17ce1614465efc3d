"""Processes of a domain meet at a gate, over the real key-value store of JAX, in few messages."""

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from jax._src.lib import _jax

from holmesjax.runtime.domain import Gate
from tests.jobs import free_listen

NUM_PROCESSES = 5
LIMIT_MS = 60_000


class CountedClient:
    """A client of the store that counts its messages by name."""

    def __init__(self, client):
        self._client, self.messages = client, Counter()

    def __getattr__(self, name):
        def call(*args, **settings):
            self.messages[name] += 1
            return getattr(self._client, name)(*args, **settings)

        return call


@pytest.fixture
def gates():
    """A gate for each process of a domain, whose clients are threads of this one."""
    address = free_listen()
    service = _jax.get_distributed_runtime_service(address, NUM_PROCESSES)
    clients = [
        _jax.get_distributed_runtime_client(address, number, init_timeout=60)
        for number in range(NUM_PROCESSES)
    ]
    with ThreadPoolExecutor(NUM_PROCESSES) as pool:
        list(pool.map(lambda client: client.connect(), clients))
        yield [
            Gate("saves", CountedClient(client), number, NUM_PROCESSES)
            for number, client in enumerate(clients)
        ]
        list(pool.map(lambda client: client.shutdown(), clients))
    service.shutdown()


def come(gates, key, timeout_ms=LIMIT_MS):
    """Starts a thread for each gate that comes to a key; returns what each raises, as futures."""
    pool = ThreadPoolExecutor(len(gates))
    futures = [pool.submit(gate, key=key, timeout_ms=timeout_ms) for gate in gates]
    pool.shutdown(wait=False)
    return futures


def test_all_go_when_the_last_has_come_and_waiting_costs_no_messages(gates):
    for _ in range(3):
        for gate in gates:
            gate.begin()
        early = come(gates[1:], "begun")
        time.sleep(0.5)
        assert not any(future.done() for future in early)
        for future in [*come(gates[:1], "begun"), *early]:
            future.result(LIMIT_MS / 1000)
    for gate in gates:
        messages = gate._client.messages
        assert messages["key_value_dir_get"] == 0, "a listing costs as much as there are processes"
        assert sum(messages.values()) <= 4 * 3, "a process that waits has nothing to ask"
    kept = gates[0]._client.key_value_dir_get("saves/")
    assert not [name for name, _ in kept if name.startswith("saves/1/")], "old keys are deleted"


def test_a_failure_sends_all_away_who_wait_or_come_later(gates):
    for gate in gates:
        gate.begin()
    waiting = come(gates[1:3], "written")
    while any(gate._client.messages["blocking_key_value_get"] == 0 for gate in gates[1:3]):
        time.sleep(0.01)
    gates[0].fail()
    late = [*come(gates[3:4], "written"), *come(gates[4:], "another key")]
    for future in [*waiting, *late]:
        with pytest.raises(OSError, match="another process of the stage has failed"):
            future.result(LIMIT_MS / 1000)
    for gate in gates:  # the next thing begins anew
        gate.begin()
    for future in come(gates, "written"):
        future.result(LIMIT_MS / 1000)


def test_nobody_waits_past_the_deadline(gates):
    [waiting] = come(gates[:1], "begun", timeout_ms=300)
    with pytest.raises(TimeoutError, match="within 300 ms"):
        waiting.result(LIMIT_MS / 1000)
