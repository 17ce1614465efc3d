"""Who runs what: every device of a plan has one process, and names are unique."""

import pytest

from holmesjax.plan.processes import domain_fabric, fabric_between, make_processes
from tests.stated_plans import IB_ROCE, plan_of

TWO = plan_of(("ib", ("ib-0", "ib-1"), (2, 3, 0, 1)), ("roce", ("roce-0", "roce-1"), (4, 5, 6, 7)))
SHARED = plan_of(("ib", ("ib-0",), (0,)), ("ib", ("ib-0", "ib-1"), (1, 2, 3)))


@pytest.mark.parametrize("per", ["node", "device"])
@pytest.mark.parametrize("plan", [TWO, SHARED])
def test_every_device_has_one_process(plan, per):
    processes = make_processes(plan, IB_ROCE, per)
    assert [p.number for p in processes] == list(range(len(processes)))
    assert len({p.name for p in processes}) == len(processes)
    for s, stage in enumerate(plan.stages):
        domain = [p for p in processes if p.stage == s]
        assert [p.rank for p in domain] == list(range(len(domain)))
        assert [p.leads for p in domain] == [True] + [False] * (len(domain) - 1)
        # Ranks follow the numbers of devices, as `jax.devices()` does.
        assert [d for p in domain for d in p.devices] == sorted(stage.devices)
        for p in domain:
            assert {IB_ROCE.node_of(d).name for d in p.devices} == {p.node}
            first = IB_ROCE.devices((p.node,))[0]
            assert [d - first for d in p.devices] == list(p.local_devices)
            assert per == "node" or len(p.devices) == 1


def test_names_say_where():
    names = [p.name for p in make_processes(TWO, IB_ROCE, "node")]
    assert names == ["ib/ib-0", "ib/ib-1", "roce/roce-0", "roce/roce-1"]
    assert [p.name for p in make_processes(SHARED, IB_ROCE, "node")] == [
        "ib/ib-0.s0",
        "ib/ib-0.s1",
        "ib/ib-1",
    ]
    assert [p.name for p in make_processes(SHARED, IB_ROCE, "device")][:2] == [
        "ib/ib-0:0",
        "ib/ib-0:1",
    ]


def test_clusters_use_their_own_fabric_and_ethernet_between():
    a, b, c, _ = make_processes(TWO, IB_ROCE, "node")
    assert fabric_between(IB_ROCE, a, b) == "infiniband"
    assert fabric_between(IB_ROCE, a, c) == "ethernet"
    assert fabric_between(IB_ROCE, c, c) == "roce"
    assert domain_fabric(IB_ROCE, [a, b]) == "infiniband"
    assert domain_fabric(IB_ROCE, [a, b, c]) == "ethernet"
