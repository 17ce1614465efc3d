"""Parts of `control_plane`: the cost of a save that waits, and of a run of a million steps.

gate cores      that the domain's key-value store and its members keep busy while all but one
                member wait for a save to begin
gate released   from the last member that comes until the last of the others goes on
resumed         a recorder opens the folder of a run of a million steps
resident        what the recorder of that run holds then
a step          what it holds more for each step that it takes
"""

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

from benchmarks.resident import resident_bytes

LIMIT_MS = 600_000
STEPS = 1_000_000
MORE_STEPS = 20_000  # that the recorder takes after them
WARM_STEPS = 11_000  # until its windows of recent steps are full


def wait_at_gate(num_members: int, pipe: Pipe) -> None:
    """A domain whose members wait for one that comes when the pipe says so; measures both.

    Members are threads with a client of JAX each, and the service is in the same process.
    """
    from jax._src.lib import _jax

    from holmesjax.runtime.domain import Gate

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{sock.getsockname()[1]}"
    service = _jax.get_distributed_runtime_service(address, num_members, heartbeat_timeout=600)
    clients = [
        _jax.get_distributed_runtime_client(
            address, number, init_timeout=600, heartbeat_timeout=600
        )
        for number in range(num_members)
    ]
    with ThreadPoolExecutor(num_members) as pool:
        list(pool.map(lambda client: client.connect(), clients))
        first, *others = (
            Gate("saves", client, number, num_members) for number, client in enumerate(clients)
        )
        for gate in (first, *others):
            gate.begin()
        waiting = [pool.submit(gate, key="begun", timeout_ms=LIMIT_MS) for gate in others]
        time.sleep(1.0)
        before_s, start_s = time.process_time(), time.perf_counter()
        pipe.send("waiting")
        pipe.recv()
        now_s = time.perf_counter()
        cores = (time.process_time() - before_s) / (now_s - start_s)
        first(key="begun", timeout_ms=LIMIT_MS)
        for future in waiting:
            future.result()
        released_s = time.perf_counter() - now_s
        pipe.send({"gate_cores": cores, "gate_released_s": released_s})
        list(pool.map(lambda client: client.shutdown(), clients))
    service.shutdown()


def record_long_run(folder: str, pipe: Pipe) -> None:
    """The recorder of a run that has done a million steps, and goes on for some more."""
    import io
    import json

    from holmesjax import job
    from holmesjax.config import CHECKOUT
    from holmesjax.report import metrics
    from holmesjax.report.recorder import Recorder

    run_dir = Path(folder)
    settings = [f"run.dir={folder}", f"train.steps={2 * STEPS}", "log.tensorboard=false"]
    config = job.load(CHECKOUT / "configs/runs/quickstart.yaml", settings).config

    def report(step: int) -> dict[str, Any]:
        numbers = {"loss": 2.5, "grad_norm": 0.5, "learning_rate": 1e-3, "skipped": False}
        measured = {"step_time_s": 0.25, "input_wait_s": 0.001, "link_bytes": {"a -> b": 1 << 20}}
        return {"step": step, "intervals": [(0, "F", 0, 0.0, 0.2)], **numbers, **measured}

    with Recorder(run_dir, config, done_steps=0, stream=io.StringIO()) as recorder:
        recorder.take(report(1))
    [record] = metrics.read(run_dir)
    with (run_dir / metrics.FILE).open("w", encoding="utf-8") as file:
        for step in range(1, STEPS + 1):
            file.write(json.dumps({**record, "step": step}) + "\n")
    before, start_s = resident_bytes(), time.perf_counter()
    with Recorder(run_dir, config, done_steps=STEPS - 100, stream=io.StringIO()) as recorder:
        resumed_s, resident = time.perf_counter() - start_s, resident_bytes() - before
        for step in range(STEPS - 99, STEPS + MORE_STEPS):
            recorder.take(report(step))
            if step == STEPS - 100 + WARM_STEPS:
                warm = resident_bytes()
        grown = (resident_bytes() - warm) / (100 + MORE_STEPS - WARM_STEPS)
    pipe.send({"resumed_s": resumed_s, "resident_bytes": resident, "bytes_a_step": grown})
