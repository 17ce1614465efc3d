"""Exchanges of tokens: their rounds against routers drawn at random, and their seconds."""

import numpy as np
import pytest

from holmesjax.config import ExpertsConfig
from holmesjax.costs.collective_times import Group, Groups, all_to_all_s
from holmesjax.costs.expert_exchange import LOAD_VARIATION, peak_load, rounds
from holmesjax.topology.machines import Link
from kernels.expert_slots import slots_of_each


@pytest.mark.parametrize(
    "count, active, num_tokens, n", [(128, 8, 4096, 8), (128, 8, 4096, 32), (8, 2, 4096, 4)]
)
def test_loads_are_those_of_drawn_routers(count, active, num_tokens, n):
    """Experts have loads that vary, and each device draws the choices of its tokens."""
    rng, peaks, found = np.random.default_rng(0), [], []
    for _ in range(200):
        share = np.maximum(rng.normal(1, LOAD_VARIATION, count), 0)
        choices = rng.multinomial(num_tokens * active, share / share.sum(), size=n)
        sent = choices.reshape(n, n, -1).sum(-1)  # from each device to each
        peaks.append(sent.sum(0).max() / (num_tokens * active))
        found.append(np.ceil(sent.max() / slots_of_each(num_tokens * active, n)))
    experts = ExpertsConfig(count=count, active=active)
    assert float(peak_load(experts, n)) == pytest.approx(np.mean(peaks), rel=0.02)
    assert float(rounds(experts, num_tokens, n)) == pytest.approx(np.mean(found), abs=0.12)


def test_an_exchange_between_nodes_shares_their_links():
    """Each of 8 devices on two nodes sends a half of its bytes to the other node."""
    inside = Link(fabric="nvlink", bandwidth_bytes_per_s=200e9, latency_s=0.0)
    between = Link(fabric="infiniband", bandwidth_bytes_per_s=50e9, latency_s=0.0)
    near = Group(size=8, nodes=1, inside=inside, between=None)
    far = Group(size=8, nodes=2, inside=inside, between=between)
    start_s = all_to_all_s(0.0, near), all_to_all_s(0.0, far)
    found = [all_to_all_s(1e9, near) - start_s[0], all_to_all_s(1e9, far) - start_s[1]]
    assert found == pytest.approx([1e9 * 7 / 8 / 200e9, 4 * 1e9 / 2 / 50e9])
    both = all_to_all_s(1e9, Groups.of([None, near, far]))
    np.testing.assert_allclose(both, [0.0, all_to_all_s(1e9, near), all_to_all_s(1e9, far)])
