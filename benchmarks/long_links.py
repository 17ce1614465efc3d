"""TCP over a long link, beside what is said of it: python -m benchmarks.long_links

Builds a lab of two nodes with a link of a rate and a round trip (docs/lab.md), and sends one way:

    one           a connection with the buffers that the kernel gives by itself
    run           as many connections as a run has, with the windows that it asks for
    up to N MiB   as many, where both nodes let buffers grow only so far, and nobody asks for more
    asks          the same with 0.5 MiB, and asks as a run does, which net.core.wmem_max and
                  rmem_max limit

    ahead         bytes that a connection had on their way: rate times round trip, over connections
    doctor        what `launch doctor` says that the connections carry with these limits

Rates are those of the second half of each turn, when windows have opened; medians of the turns,
each with its range. All take turns. Needs what `launch lab` needs, and a minute.
"""

import argparse
import contextlib
import functools
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.lab_rows import load_topology
from benchmarks.pipeline_overhead import count
from benchmarks.provenance import RESULTS, provenance
from holmesjax.errors import HolmesError
from holmesjax.lab import scaled_topology
from holmesjax.lab.scaled_topology import Share
from holmesjax.lab.shell import Commands
from holmesjax.topology import windows
from holmesjax.transport import socket_buffers
from launch.lab_machine import namespaces

STREAMS = 4  # of a run, at least
LIMITS_MIB = (1, 0.5)  # of buffers
CONNECT_S = 20.0
Result = dict[str, Any]


def topology_text(rate_mbit_per_s: float, round_trip_ms: float) -> str:
    """Two clusters of a node each, whose NICs are twice as fast as the link."""
    cluster = (
        "  - name: {0}\n    fabric: ethernet\n    nodes: 1\n    devices: {{kind: cpu, count: 1}}\n"
        f"    nics: [{{{{kind: ethernet_25, rate: {2 * rate_mbit_per_s:g} Mb/s}}}}]\n"
    )
    speed = f"bandwidth: {rate_mbit_per_s:g} Mb/s, latency: {round_trip_ms / 2:g} ms"
    link = f"  - {{between: [a, b], fabric: ethernet, {speed}}}\n"
    return f"name: far\nclusters:\n{cluster.format('a')}{cluster.format('b')}links:\n{link}"


def limit_buffers(commands: Commands, limit_bytes: int | None) -> None:
    """Lets the kernel's buffers of both nodes grow so far; None: as far as Linux does by itself."""
    most = {"wmem": limit_bytes or 4 << 20, "rmem": limit_bytes or 6 << 20}
    for node in commands.lab.nodes:
        for name, usual in (("wmem", 16384), ("rmem", 131072)):
            setting = f"net.ipv4.tcp_{name}='4096 {min(usual, most[name])} {most[name]}'"
            enter = f"ip netns exec {commands.namespace(node)}"
            namespaces.run_line(f"{enter} sysctl -qw {setting}")


def window_within_limits(commands: Commands, *, asks: bool) -> int:
    """The bytes that a connection may have on their way from the first node, as the doctor says."""
    limits = namespaces.in_network(commands, commands.lab.nodes[0], socket_buffers.limits)
    assert limits is not None, "Linux says its limits"
    grown = min(windows.window_of(limit.grown) for limit in limits)
    return min(limit.window_bytes for limit in limits) if asks else grown


def rate_bytes_per_s(
    commands: Commands, streams: int, window_bytes: int | None, seconds: float
) -> float:
    """Sends from the first node to the second, and counts there in the second half."""
    a, b = commands.lab.nodes
    received = [0] * streams
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(2 * streams) as pool:
        listener = stack.enter_context(namespaces.socket_on(commands, b))
        listener.bind((b.slow_address, 0))
        listener.listen()
        callers, answerers = [], []
        for _ in range(streams):
            caller = stack.enter_context(namespaces.socket_on(commands, a))
            caller.settimeout(CONNECT_S)
            caller.connect(listener.getsockname())
            answerer, _ = listener.accept()
            if window_bytes:
                for node, sock in ((a, caller), (b, answerer)):
                    widen = functools.partial(socket_buffers.widen, sock, window_bytes)
                    namespaces.in_network(commands, node, widen)
            answerer.settimeout(CONNECT_S)
            callers.append(caller)
            answerers.append(stack.enter_context(answerer))
        is_over, chunk = threading.Event(), bytes(1 << 18)

        def send(i: int) -> None:
            while not is_over.is_set():
                callers[i].sendall(chunk)
            callers[i].close()

        def receive(i: int) -> None:
            buffer = bytearray(1 << 20)
            while num_bytes := answerers[i].recv_into(buffer):
                received[i] += num_bytes

        work = [pool.submit(call, i) for i in range(streams) for call in (send, receive)]
        time.sleep(seconds / 2)
        before, start_s = sum(received), time.monotonic()
        time.sleep(seconds / 2)
        found = (sum(received) - before) / (time.monotonic() - start_s)
        is_over.set()
        for each in work:
            each.result()
    return found


def cases_of(rate_bytes_per_s: float, round_trip_s: float) -> dict[str, Result]:
    """Connections, their windows and the limit of buffers of each case."""
    streams = max(STREAMS, windows.streams_that_fill(rate_bytes_per_s, round_trip_s))
    window = windows.window_bytes(rate_bytes_per_s, round_trip_s, streams)
    one = {"streams": 1, "window_bytes": None, "limit_bytes": None}
    run = {"streams": streams, "window_bytes": window, "limit_bytes": None}
    limited = {
        f"up to {mib:g} MiB": {**run, "window_bytes": None, "limit_bytes": round(mib * 2**20)}
        for mib in LIMITS_MIB
    }
    least = round(min(LIMITS_MIB) * 2**20)
    return {"one": one, "run": run, **limited, "asks": {**run, "limit_bytes": least}}


def measure(rate_mbit_per_s: float, round_trip_ms: float, turns: int, seconds: float) -> Result:
    """All cases on one link. Raises HolmesError where no lab can be built."""
    rate, round_trip_s = rate_mbit_per_s * 1e6 / 8, round_trip_ms / 1e3
    with tempfile.TemporaryDirectory(prefix="long_links_") as folder:
        text = topology_text(rate_mbit_per_s, round_trip_ms)
        topology = load_topology(text, Path(folder) / "far.yaml")
    cores = sorted(os.sched_getaffinity(0))
    shares = [Share(quota=1.0, cores=tuple(cores))] * 2
    commands = namespaces.commands_for(scaled_topology.make_lab(topology, shares, 1.0))
    cases = cases_of(rate, round_trip_s)
    says: dict[str, float] = {}
    rates: dict[str, list[float]] = {name: [] for name in cases}
    with namespaces.built(commands):
        found_s = namespaces.round_trip_s(commands, *commands.lab.nodes)
        for turn in range(turns):
            for name, case in cases.items():
                limit_buffers(commands, case["limit_bytes"])
                window = window_within_limits(commands, asks=case["window_bytes"] is not None)
                says[name] = windows.carried_bytes_per_s(
                    rate, round_trip_s, case["streams"], window
                )
                found = rate_bytes_per_s(commands, case["streams"], case["window_bytes"], seconds)
                rates[name].append(found)
                print(f"{turn + 1}/{turns}  {name}: {8e-6 * found:.0f} Mb/s", flush=True)
    lines = {}
    for name, case in cases.items():
        median = statistics.median(rates[name])
        lines[name] = {
            **case,
            "bytes_per_s": rates[name],
            "median_bytes_per_s": median,
            "ahead_bytes": median * found_s / case["streams"],
            "doctor_bytes_per_s": says[name],
        }
    return {
        "rate_bytes_per_s": rate,
        "round_trip_s": round_trip_s,
        "measured_round_trip_s": found_s,
        "cases": lines,
    }


def table(links: Sequence[Mapping[str, Any]]) -> str:
    """In Markdown."""
    out = ["| link | round trip | buffers | connections | measured | ahead, each | doctor says |"]
    out.append("| --- | ---: | --- | ---: | ---: | ---: | ---: |")
    mbit = lambda rate: f"{8e-6 * rate:.0f}"
    for link in links:
        for name, case in link["cases"].items():
            low, high = min(case["bytes_per_s"]), max(case["bytes_per_s"])
            cells = [
                f"{mbit(link['rate_bytes_per_s'])} Mb/s",
                f"{1e3 * link['measured_round_trip_s']:.1f} ms",
                name,
                str(case["streams"]),
                f"{mbit(case['median_bytes_per_s'])} Mb/s ({mbit(low)} to {mbit(high)})",
                f"{case['ahead_bytes'] / 2**20:.2f} MiB",
                f"{mbit(case['doctor_bytes_per_s'])} Mb/s",
            ]
            out.append("| " + " | ".join(cells) + " |")
    return "\n".join(out)


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("long_links", description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("--rate", type=float, default=1000.0, help="of the link, in Mb/s (1000)")
    add("--round-trips", type=float, nargs="+", default=[50.0], metavar="MS", help="(50)")
    add("--turns", type=count, default=3, help="of each case (3)")
    add("--seconds", type=float, default=6.0, help="of a turn (6)")
    add("--out", type=Path, default=RESULTS, help="folder of table and JSON (results/)")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    try:
        namespaces.refuse_without_means(delays=True)
        links = [measure(args.rate, ms, args.turns, args.seconds) for ms in args.round_trips]
    except HolmesError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    averages = {"before": load, "after": os.getloadavg()[0]}
    result = {**provenance("long_links"), "load_average": averages, "links": links}
    path = args.out / "long_links.json"
    args.out.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    cores = f"{result['device']['cores']} cores of {result['device']['cpu']}"
    source = f"commit {result['commit']}, {result['date']}, {cores}, load {load:.1f} before"
    text = f"{table(links)}\n\n{source}: `{result['command']}`\n"
    path.with_suffix(".md").write_text(text)
    print("", text, path, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
