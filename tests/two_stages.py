"""Two stages on the eight devices of `ib_roce.yaml`, four each, and transports between them."""

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from holmesjax.plan.plan import Axis, Plan, StagePlan
from holmesjax.plan.processes import make_processes
from holmesjax.topology import loading
from holmesjax.transport.crossings import Crossing, Key
from holmesjax.transport.ports import Ports
from holmesjax.transport.rendezvous import Rendezvous
from holmesjax.transport.tcp import TcpTransport, Timeouts

TOPOLOGY = loading.load(Path(__file__).parent.parent / "configs/topologies/ib_roce.yaml")
CLUSTERS = ("ib", "roce")
KEY = bytes(range(32))


def make_plan(*meshes):
    """A stage for each (data, tensor), the second on the second cluster."""
    stages = []
    for s, (data, tensor) in enumerate(meshes):
        devices = tuple(range(4 * s, 4 * s + data * tensor))
        stages.append(
            StagePlan(
                cluster=CLUSTERS[s],
                nodes=tuple(dict.fromkeys(TOPOLOGY.node_of(d).name for d in devices)),
                chunks=((),),
                devices=devices,
                mesh={Axis.DATA: data, Axis.TENSOR: tensor},
                fabrics={},
                memory_bytes={},
                seconds={},
            )
        )
    return Plan(
        topology=TOPOLOGY.name,
        topology_hash="",
        stages=tuple(stages),
        global_batch=1,
        microbatches=1,
        schedule="1f1b",
        activation_checkpointing="none",
        boundary_bytes=0.0,
        step_time_s=0.0,
        bound_s=0.0,
        shares={},
    )


def mesh_of(stage, devices=None):
    """The mesh of a stage, on devices by their numbers; by default all are in this process."""
    chosen = [(devices or dict(enumerate(jax.devices())))[number] for number in stage.devices]
    shape = tuple(stage.mesh.values())
    return Mesh(
        np.array(chosen).reshape(shape), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2
    )


def whole_stages(plan):
    """One process a stage."""
    first, *_ = processes = make_processes(plan, TOPOLOGY, "node")
    last = next(p for p in processes if p.stage == 1)
    return tuple(
        replace(p, number=s, devices=plan.stages[s].devices) for s, p in enumerate((first, last))
    )


def make_crossing(name, shape, dtype="float32", source_spec=None, target_spec=None, back=False):
    ends = (1, 0) if back else (0, 1)
    nothing = ((),) * len(shape)
    return Crossing(
        name=name,
        source=ends[0],
        target=ends[1],
        link=" -> ".join(CLUSTERS[end] for end in ends),
        shape=tuple(shape),
        dtype=dtype,
        source_spec=nothing if source_spec is None else source_spec,
        target_spec=nothing if target_spec is None else target_spec,
    )


def addresses(*found):
    """The same addresses on every network of a rehearsal."""
    return {name: found or ("127.0.0.1",) for name in ("ethernet", "infiniband", "roce")}


def start(number, plan, crossings, ports, book, processes=None, mesh=None, **changes):
    """The transport of one process."""
    processes = processes or whole_stages(plan)
    me = processes[number]
    settings = {
        "key": KEY,
        "about": {"plan hash": plan.hash(), "restart": 0, "jax": jax.__version__},
        "streams": 2,
        "encrypt": "auto",
        "calls_out": (),
        "relay": None,
        "silence_s": 10.0,
        "pull_timeout_s": 60.0,
        "start_timeout_s": 60.0,
        "on_failure": lambda error: None,
        "advance": lambda: None,
    }
    assert changes.keys() <= settings.keys(), changes
    chosen = SimpleNamespace(**{**settings, **changes})
    rendezvous = Rendezvous(
        me=me,
        processes=processes,
        topology=TOPOLOGY,
        ports=ports,
        look_up=lambda numbers: {number: book[number] for number in numbers},
        key=chosen.key,
        about=chosen.about,
        min_streams=chosen.streams,
        timeout_s=chosen.start_timeout_s,
        encrypt=chosen.encrypt,
        calls_out=chosen.calls_out,
        relay=chosen.relay,
    )
    return TcpTransport(
        plan,
        crossings,
        mesh or mesh_of(plan.stages[me.stage]),
        rendezvous=rendezvous,
        timeouts=Timeouts(chosen.silence_s, chosen.pull_timeout_s),
        on_failure=chosen.on_failure,
        advance=chosen.advance,
    )


def together(*calls):
    """The results of calls that wait for each other; an error in place of what it prevented."""
    results = [None] * len(calls)

    def run(i, call):
        try:
            results[i] = call()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def start_pair(plan, crossings, book_of=lambda book: book, each=({}, {}), **changes):
    """Two transports, or what went wrong; `book_of` changes what they are told of each other."""
    ports = [Ports.open(addresses()) for _ in range(2)]
    book = book_of([p.book for p in ports])
    settings = [{"crossings": crossings, **changes, **mine} for mine in each]
    return together(
        *(lambda n=n: start(n, plan, ports=ports[n], book=book, **settings[n]) for n in range(2))
    )


SHAPE = (16, 1 << 15)  # 2 MiB: more than one part
PLAN = make_plan((1, 1), (1, 1))
THERE, BACK = make_crossing("F0", SHAPE), make_crossing("B1", SHAPE, back=True)
KEYS = [Key("F0", 1, m) for m in range(40)]


def array(value, device=0):
    return jax.device_put(np.full(SHAPE, value, np.float32), jax.devices()[device])
