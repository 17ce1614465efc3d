"""A process of two stages, as tests start it: python -m tests.transport_process NUMBER '{...}'

It prints what others must know of it, reads what they said from standard input, and then offers and
fetches arrays until it is done, or something fails.
"""

import json
import os
import sys

import jax
import numpy as np


def content(step, shape):
    """The arrays that cross in a step, the same wherever it is computed."""
    return np.random.default_rng(step).normal(size=shape).astype(np.float32)


def main(number, about):
    from holmesjax.errors import HolmesError
    from holmesjax.parallel.sharding import from_axes
    from holmesjax.plan.processes import make_processes
    from holmesjax.transport.crossings import Key
    from holmesjax.transport.ports import Ports
    from tests.jobs import free_listen
    from tests.two_stages import TOPOLOGY, addresses, make_crossing, make_plan, mesh_of, start

    plan = make_plan(*about["meshes"])
    processes = make_processes(plan, TOPOLOGY, "node")
    me = processes[number]
    domain = [p for p in processes if p.stage == me.stage]
    ports = Ports.open(addresses())
    print(json.dumps({"book": ports.book, "coordinator": free_listen()}), flush=True)
    others = json.loads(sys.stdin.readline())
    if len(domain) > 1:
        coordinator = others[domain[0].number]["coordinator"]
        jax.distributed.initialize(
            coordinator,
            coordinator_bind_address=coordinator,
            num_processes=len(domain),
            process_id=me.rank,
            heartbeat_timeout_seconds=100,
        )
    devices = dict(zip(plan.stages[me.stage].devices, jax.devices(), strict=True))
    mesh = mesh_of(plan.stages[me.stage], devices)
    shape = tuple(about["shape"])
    specs = [tuple(map(tuple, spec)) for spec in about["specs"]]
    crossings = [
        make_crossing("F0", shape, "float32", *specs),
        make_crossing("B1", shape, "float32", *reversed(specs), back=True),
    ]

    def failed(error):
        print(json.dumps({"failed": str(error)}), flush=True)
        os._exit(75)

    def put(host, spec):
        where = from_axes(mesh, spec)
        return jax.make_array_from_callback(shape, where, lambda index: host[index])

    try:
        transport = start(
            number,
            plan,
            crossings,
            ports,
            [other["book"] for other in others],
            processes=processes,
            mesh=mesh,
            silence_s=about["silence_s"],
            on_failure=failed,
        )
        print(json.dumps({"connected": True}), flush=True)
        takes = crossings[1 - me.stage]
        steps = [Key(takes.name, step, 0) for step in range(about["steps"])]
        transport.expect(steps)
        for key in steps:
            if me.stage == 0:
                transport.offer(
                    key._replace(crossing="F0"), put(content(key.step, shape), specs[0])
                )
            got = transport.fetch(key)
            assert got.sharding.is_equivalent_to(from_axes(mesh, takes.target_spec), len(shape))
            for shard in got.addressable_shards:
                want = content(key.step, shape)[shard.index] * (1 if me.stage else 2)
                np.testing.assert_array_equal(np.asarray(shard.data), want)
            if me.stage == 1:
                double = jax.jit(lambda x: x * 2, out_shardings=from_axes(mesh, specs[1]))
                transport.offer(key._replace(crossing="B1"), double(got))
        received = transport.take_bytes()
        transport.close()
    except HolmesError as error:
        failed(error)
    if len(domain) > 1:
        jax.distributed.shutdown()
    print(json.dumps({"done": received}), flush=True)


if __name__ == "__main__":
    settings = json.loads(sys.argv[2])
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", settings["devices"][int(sys.argv[1])])
    main(int(sys.argv[1]), settings)
