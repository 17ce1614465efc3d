"""Copies are in other clusters, and each node there has about as many as the others."""

from collections import Counter

from holmesjax.plan.partners import SHARE, copy_bytes_per_s, partners
from holmesjax.plan.processes import make_processes
from tests.stated_plans import IB_ROCE, plan_of

STAGES = [
    ("ib", ("ib-0",), (0, 1)),
    ("ib", ("ib-1",), (2, 3)),
    ("roce", ("roce-0",), (4,)),
    ("roce", ("roce-0",), (5,)),
]


def test_each_part_has_a_copy_in_the_other_cluster_and_one_process_a_node_has_it():
    plan = plan_of(*STAGES)
    processes = make_processes(plan, IB_ROCE, "device")
    found = partners(plan, processes)
    assert [partner.part for partner in found] == [0, 1, 2, 3]
    assert all(partner.writer.cluster != partner.holder.cluster for partner in found)
    held = Counter(partner.holder.node for partner in found)
    assert held == {"roce-0": 2, "ib-0": 1, "ib-1": 1}
    assert len({partner.holder.number for partner in found}) == len(held)
    link = IB_ROCE.boundary_link("ib-0", "roce-0")
    assert copy_bytes_per_s(IB_ROCE, found) == SHARE * link.bandwidth_bytes_per_s


def test_a_plan_in_one_cluster_has_no_partners():
    plan = plan_of(*STAGES[:2])
    assert partners(plan, make_processes(plan, IB_ROCE, "node")) == []
