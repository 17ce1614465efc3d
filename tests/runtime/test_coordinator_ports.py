"""Ports of JAX's coordinators: one for each stage of a node, held until it listens."""

import contextlib
import socket

import pytest
from jax._src.lib import _jax  # its coordinator by itself, without a job

from holmesjax.config import DistributedConfig
from holmesjax.errors import HolmesError
from holmesjax.runtime.domain import hold_coordinator_port
from holmesjax.transport import connections
from tests.distributed.joined_members import DEADLINE_S
from tests.jobs import own_address


def test_the_coordinators_of_a_node_do_not_share_a_port():
    address = own_address()  # neighbouring ports are free
    with connections.listen(address) as taken:
        config = DistributedConfig(port=connections.address_of(taken)[1] - 2)
        with (
            hold_coordinator_port(address, config, 0) as first,
            hold_coordinator_port(address, config, 1) as second,
        ):
            assert connections.address_of(first) != connections.address_of(second)
        with pytest.raises(HolmesError, match="the coordinator of stage 2 cannot listen") as error:
            hold_coordinator_port(address, config, 2)
    assert error.value.where == f"distributed.port, {address}:{config.port + 2}"
    assert "choose another distributed.port" in error.value.fix


@pytest.mark.parametrize("port", [0, 7421])
def test_a_port_that_is_held_is_for_the_coordinator_alone(port):
    """JAX 0.10.2 would end the process with a segmentation fault."""
    address = own_address()
    with hold_coordinator_port(address, DistributedConfig(port=port), 0) as held:
        place = connections.address_of(held)
        with pytest.raises(HolmesError, match="cannot listen here"):
            connections.listen(*place)
        if port:  # a second job of this user, before the coordinator listens
            with pytest.raises(HolmesError, match="cannot listen there"):
                hold_coordinator_port(address, DistributedConfig(port=port), 0)
        with _coordinator(place):
            if port:
                with pytest.raises(HolmesError, match="cannot listen there"):
                    hold_coordinator_port(address, DistributedConfig(port=port), 0)


@contextlib.contextmanager
def _coordinator(place):
    """JAX's own, which listens at an address."""
    service = _jax.get_distributed_runtime_service("{}:{}".format(*place), 1)
    with socket.create_connection(place, timeout=DEADLINE_S):
        yield
    service.shutdown()
