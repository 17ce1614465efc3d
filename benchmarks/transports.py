"""Boundaries between two processes on this machine: python -m benchmarks.transports

What is timed goes from the source's call to an array that is ready at the target:

    tcp        `TcpTransport`: offer -> fetched and ready; expected before, as in training
    bare       `sendall` into `recv_into`, the least that Python can do: memory to memory, nothing
               else. Over one connection and over as many as tcp has; the faster of the two counts
    tcp+tls    the same, encrypted as between sites
    gloo       `ppermute` inside jit, both processes in one `jax.distributed` job

Both ends share this machine's processors, so encryption takes time from the copies, which it would
not at two sites. `--rate-gbps` limits each connection of both kinds of tcp, so that all together
have the rate of a link.

A share is the time of the bare copy over that of tcp or gloo. Bar: tcp >= 80% at 16 MiB. All of
them take turns, so that what disturbs the machine disturbs all; times are medians, and the
spread is the middle half over the median.
"""

import argparse
import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from benchmarks.pipeline_overhead import middle
from benchmarks.provenance import RESULTS, provenance
from holmesjax.config.sections import Encrypt
from holmesjax.plan.plan import Axis, Plan, StagePlan
from holmesjax.plan.processes import make_processes
from holmesjax.topology import loading
from holmesjax.transport import connections
from holmesjax.transport.crossings import Crossing, Key
from holmesjax.transport.handshake import Entered
from holmesjax.transport.ports import Ports
from holmesjax.transport.rendezvous import Rendezvous
from holmesjax.transport.tcp import TcpTransport, Timeouts

SIZES_BYTES = (64 << 10, 1 << 20, 16 << 20, 128 << 20)
WARM_UP = 5
BAR, BAR_BYTES = 0.8, 16 << 20
TOPOLOGY = loading.load(Path(__file__).parent.parent / "configs/topologies/ib_roce.yaml")
ADDRESS = "127.0.0.1"
ENCRYPT: dict[str, Encrypt] = {"tcp": "never", "tcp+tls": "always"}
SO_MAX_PACING_RATE = 47  # of Linux, in bytes per second; Python has no name for it
KEY = bytes(32)  # nobody else is on this machine's loopback

Result = dict[str, Any]
Turn = Callable[[], object]  # the source's part of a transfer, or the target's


# ---- a process -----------------------------------------------------------------------------------


def serve(
    number: int,
    port: int,
    sizes: Sequence[int],
    rounds: int,
    streams: int,
    rate_gbps: float | None = None,
) -> dict[int, dict[str, list[float]]]:
    """Runs the source or the target; the target returns the seconds of every turn.

    Args:
      number: 0 for the source, 1 for the target.
      port: the port at which the two find each other.
      sizes: bytes of the arrays.
      rounds: turns of each size that are measured.
      streams: connections between the two.
      rate_gbps: of all connections of a transport together; None: not limited.
    """
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    control_sock, *socks = _connections(number, port, 1 + streams)
    control = connections.Connection(control_sock, Entered())
    with connections.listen(ADDRESS) as probe:
        coordinator = connections.address_of(probe)[1]
    ports = [Ports.open({"ethernet": [ADDRESS]}) for _ in ENCRYPT]
    mine = {"coordinator": coordinator, "books": [one.book for one in ports]}
    control.send(mine)
    ends = [mine, control.receive()][:: 1 if number == 0 else -1]
    jax.distributed.initialize(f"{ADDRESS}:{ends[0]['coordinator']}", 2, number)
    transports = {}
    for i, (name, encrypt) in enumerate(ENCRYPT.items()):
        book = [end["books"][i] for end in ends]
        transports[name] = _transport(number, sizes, ports[i], book, streams, encrypt)
        _pace(transports[name], rate_gbps)
    found = {}
    with ThreadPoolExecutor(streams) as pool:
        for size in sizes:
            x = jax.device_put(np.ones(size // 4, np.float32), jax.local_devices()[0])
            turns = {
                **{
                    name: _offer_or_fetch(number, transport, x, WARM_UP + rounds)
                    for name, transport in transports.items()
                },
                "bare, 1 stream": _bare(number, socks[:1], pool, x),
                f"bare, {streams} streams": _bare(number, socks, pool, x),
                "gloo": _gloo(x),
            }
            found[size] = _take_turns(number, control, turns, rounds)
    for transport in transports.values():
        transport.close()
    jax.distributed.shutdown()
    return found


def _connections(number: int, port: int, count: int) -> list[socket.socket]:
    if number == 0:
        with socket.create_server((ADDRESS, port)) as listener:
            found = [listener.accept()[0] for _ in range(count)]
    else:
        found = []
        while len(found) < count:
            try:
                found.append(socket.create_connection((ADDRESS, port)))
            except ConnectionRefusedError:  # the other process is not there yet
                time.sleep(0.05)
    for sock in found:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return found


def _take_turns(
    number: int, control: connections.Connection[Entered], turns: dict[str, Turn], rounds: int
) -> dict[str, list[float]]:
    """Seconds from the start at the source to the end at the target: one clock serves both."""
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(WARM_UP + rounds):
        for name, turn in turns.items():
            control.send({})  # both are ready
            control.receive()
            start_s = time.perf_counter()
            turn()
            end_s = time.perf_counter()
            control.send({"start_s": start_s})
            seconds[name].append(end_s - control.receive()["start_s"])
    return {name: times_s[WARM_UP:] for name, times_s in seconds.items()}


def _transport(
    number: int,
    sizes: Sequence[int],
    ports: Ports,
    book: Sequence[Any],
    streams: int,
    encrypt: Encrypt,
) -> TcpTransport:
    """Between two stages of one device each, in two clusters."""
    stages = tuple(
        StagePlan(
            cluster=cluster.name,
            nodes=(cluster.nodes[0].name,),
            chunks=((),),
            devices=TOPOLOGY.devices((cluster.nodes[0].name,))[:1],
            mesh={Axis.DATA: 1},
            fabrics={},
            memory_bytes={},
            seconds={},
        )
        for cluster in TOPOLOGY.clusters[:2]
    )
    plan = Plan(
        topology=TOPOLOGY.name,
        topology_hash="",
        stages=stages,
        global_batch=1,
        microbatches=1,
        schedule="1f1b",
        activation_checkpointing="none",
        boundary_bytes=0.0,
        step_time_s=0.0,
        bound_s=0.0,
        shares={},
    )
    crossings = tuple(
        Crossing(
            name=str(size),
            source=0,
            target=1,
            link=" -> ".join(stage.cluster for stage in stages),
            shape=(size // 4,),
            dtype="float32",
            source_spec=((),),
            target_spec=((),),
        )
        for size in sizes
    )
    processes = make_processes(plan, TOPOLOGY, "node")
    rendezvous = Rendezvous(
        me=processes[number],
        processes=processes,
        topology=TOPOLOGY,
        ports=ports,
        look_up=lambda numbers: {number: book[number] for number in numbers},
        key=KEY,
        about={},
        min_streams=streams,
        timeout_s=60.0,
        encrypt=encrypt,
    )
    mesh = Mesh(np.array(jax.local_devices()), ("data",), axis_types=(AxisType.Auto,))
    timeouts = Timeouts(silence_s=60.0, pull_s=60.0)
    return TcpTransport(plan, crossings, mesh, rendezvous=rendezvous, timeouts=timeouts)


def _pace(transport: TcpTransport, rate_gbps: float | None) -> None:
    """Limits the rate at which the kernel sends on the connections of a transport."""
    if rate_gbps is None:
        return
    for peer in transport._peers.values():
        for channel in peer.channels.values():
            rate = struct.pack("Q", int(1e9 * rate_gbps / 8 / len(peer.channels)))
            channel._sock.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, rate)


def _offer_or_fetch(number: int, transport: TcpTransport, x: jax.Array, count: int) -> Turn:
    keys = [Key(str(x.nbytes), 0, i) for i in range(count)]
    left = iter(keys)
    if number == 0:
        return lambda: transport.offer(next(left), x)
    transport.expect(keys)
    return lambda: transport.fetch(next(left)).block_until_ready()


def _bare(number: int, socks: Sequence[socket.socket], pool: Executor, x: jax.Array) -> Turn:
    parts = [np.split(np.array(x).view(np.uint8), len(socks))[i].data for i in range(len(socks))]

    def receive(sock: socket.socket, part: memoryview) -> None:
        while part:
            part = part[sock.recv_into(part) :]

    move = socket.socket.sendall if number == 0 else receive
    if len(socks) == 1:
        return lambda: move(socks[0], parts[0])
    return lambda: list(pool.map(move, socks, parts))


def _gloo(x: jax.Array) -> Turn:
    mesh = Mesh(np.array(jax.devices()), ("end",), axis_types=(AxisType.Auto,))
    where = NamedSharding(mesh, P("end"))
    both = jax.make_array_from_single_device_arrays((2, *x.shape), where, [x[None]])
    send = jax.jit(
        jax.shard_map(
            lambda y: jax.lax.ppermute(y, "end", [(0, 1)]),
            mesh=mesh,
            in_specs=P("end"),
            out_specs=P("end"),
        )
    )
    return lambda: send(both).block_until_ready()


# ---- both, and the table -------------------------------------------------------------------------


def measure(
    sizes: Sequence[int] = SIZES_BYTES,
    rounds: int = 21,
    streams: int = 4,
    rate_gbps: float | None = None,
) -> dict[str, Result]:
    """For each size: milliseconds, bandwidth and share of the bare copy, of each way."""
    with connections.listen(ADDRESS) as probe:
        port = connections.address_of(probe)[1]
    command = [sys.executable, "-m", "benchmarks.transports", "--port", str(port)]
    command += ["--rounds", str(rounds), "--streams", str(streams), "--sizes", *map(str, sizes)]
    command += ["--rate-gbps", str(rate_gbps)] if rate_gbps else []
    ends = [
        subprocess.Popen([*command, "--serve", str(i)], stdout=subprocess.PIPE, text=True)
        for i in range(2)
    ]
    try:
        _, out = [end.communicate(timeout=600)[0] for end in ends]
    finally:
        for end in ends:
            end.kill()
    *_, last = out.splitlines() or [""]  # gloo talks too
    if any(end.returncode for end in ends):
        raise SystemExit("error: a process ended; its message is above")
    return {size: _summary(int(size), times) for size, times in json.loads(last).items()}


def _summary(size: int, times: dict[str, list[float]]) -> Result:
    found = {}
    for name, seconds in times.items():
        median = middle(seconds)
        found[name] = {
            "ms": 1e3 * median["median"],
            "spread": median["spread"],
            "gb_per_s": size / median["median"] / 1e9,
            "times_ms": [round(1e3 * s, 4) for s in seconds],
        }
    bare_ms = min(x["ms"] for name, x in found.items() if name.startswith("bare"))
    for x in found.values():
        x["share"] = bare_ms / x["ms"]
    return found


def show(result: dict[str, Result]) -> None:
    print(f"{'size':>9}  {'transport':<16} {'ms':>9}  spread   GB/s  share of the bare copy")
    for size, by_transport in result.items():
        for name, x in by_transport.items():
            print(
                f"{int(size) >> 10:>5} KiB  {name:<16} {x['ms']:9.3f}  {x['spread']:6.0%} "
                f"{x['gb_per_s']:6.2f}  {x['share']:6.0%}"
            )
    if (at := found_at(result)) is not None:
        print(f"tcp at {BAR_BYTES >> 20} MiB: {at:.0%} of the bare copy (bar: >= {BAR:.0%})")
        tcp, secure = (result[str(BAR_BYTES)][name]["ms"] for name in ENCRYPT)
        print(f"tcp+tls at {BAR_BYTES >> 20} MiB: {tcp / secure:.0%} of tcp")


def found_at(result: dict[str, Result]) -> float | None:
    """The share that the bar is about."""
    found = result.get(str(BAR_BYTES))
    return found["tcp"]["share"] if found else None


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("transports", description=__doc__, formatter_class=raw)
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES_BYTES, help="bytes")
    parser.add_argument("--rounds", type=int, default=21, help="turns of each, after warm-up (21)")
    parser.add_argument("--streams", type=int, default=4, help="connections of tcp (4)")
    parser.add_argument("--rate-gbps", type=float, help="of a link, in Gb/s (not limited)")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        seconds = serve(
            args.serve, args.port, args.sizes, args.rounds, args.streams, args.rate_gbps
        )
        if args.serve == 1:
            print(json.dumps(seconds))
        return
    load = os.getloadavg()[0]
    found = measure(args.sizes, args.rounds, args.streams, args.rate_gbps)
    show(found)
    result = {
        **provenance("transports", network="loopback"),
        "load_average": {"before": load, "after": os.getloadavg()[0]},
        "rounds": args.rounds,
        "streams": args.streams,
        "rate_gbps": args.rate_gbps,
        "bar": {"bytes": BAR_BYTES, "share": BAR},
        "sizes": found,
    }
    RESULTS.mkdir(exist_ok=True)
    link = f"_{args.rate_gbps:g}gbps" if args.rate_gbps else ""
    path = RESULTS / f"transports{link}_{jax.__version__}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
