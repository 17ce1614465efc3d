"""Stores and a hub behind a controller on loopback, for tests."""

import contextlib
import hashlib
import os
import threading
import time
from unittest.mock import patch

from holmesjax.checkpoints import manifest, stores
from holmesjax.checkpoints.stores import PIECE_BYTES
from holmesjax.distributed import store_end
from holmesjax.distributed.controller import Controller
from holmesjax.distributed.store_end import NOBODY, OwnStore
from holmesjax.distributed.store_hub import StoreHub
from holmesjax.transport.key_files import KEY_BYTES
from tests.distributed.scripted_jobs import process

KEY = bytes(KEY_BYTES)
STEP = 4
PROCESSES = (process(0, 0), process(1, 1))
LARGE = os.urandom(2 * PIECE_BYTES + 7)
FILES = {
    "part_0/d/large": LARGE,
    "part_0/_METADATA": b"zero",
    "part_1/d/small": b"",
    "part_1/x": b"1",
}


def write_parts(folder, *parts, step=STEP):
    for name, content in FILES.items():
        if name.partition("/")[0] in parts:
            path = manifest.folder_of(folder, step) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def commit(folder, step=STEP, store="x", **places):
    """A manifest with parts in stores on the nodes that are named; the `Checkpoint`."""
    facts = lambda x: {"bytes": len(x), "sha256": hashlib.sha256(x).hexdigest()}
    large = {"bytes": len(LARGE), "sha256": None}
    text = manifest.describe(
        step,
        sequences=0,
        settings={},
        data={},
        plan_hash="",
        arrays={},
        files={name: large if x is LARGE else facts(x) for name, x in FILES.items()},
        stores={part: {"id": store, "node": node, "folder": "/f"} for part, node in places.items()},
    )
    manifest.commit(folder, step, text)
    return manifest.at(manifest.folder_of(folder, step))


@contextlib.contextmanager
def hub_of(folder, checkpoint=None, wait_s=0.0):
    """A hub behind a controller; and how to make a store that calls it."""
    said = []
    hub = StoreHub(folder, PROCESSES, said.append, wait_s)
    hub.said = said
    controller = Controller(
        PROCESSES,
        address="127.0.0.1",
        port=0,
        about={},
        resume=0,
        key=KEY,
        silence_s=30,
        is_saving=lambda step: False,
        progress=None,
        hub=hub,
    )

    def join(own, number=NOBODY, serves=True, in_memory=False):
        before = len(hub._stores)
        stores.identifier(own, stores.run_of(hub.id))  # by an earlier start
        store = OwnStore(own, process=number, node="far", controller=controller.address, key=KEY)
        store.in_memory = in_memory
        store.join(hub.id)
        if serves:
            store.serve()
            wait_until(lambda: len(hub._stores) > before)
        return store

    controller._heartbeat = lambda: None
    try:
        yield hub, join
    finally:
        with patch.object(store_end, "RETRY_S", 0.1):  # nobody calls any more, into another test
            hub.close()
            controller.__exit__()
            for thread in threading.enumerate():
                if thread.name == "store":
                    thread.join(20)
                    assert not thread.is_alive()


def wait_until(condition):
    deadline_s = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
