"""The plan says what a run sends and writes beside its steps."""

import dataclasses
import math
from collections import Counter

import jax
import pytest

from holmesjax import job as jobs, training_setup
from holmesjax.checkpoints import writing
from holmesjax.config import DistributedConfig
from holmesjax.parallel.mesh import build_meshes
from holmesjax.plan import save_costs
from holmesjax.plan.plan import MeetingCost
from tests.clusters import make_config
from tests.stated_plans import IB_ROCE, plan_of

RUN = "configs/runs/quickstart.yaml"
SMALL = ["model.num_layers=2", "model.width=64", "model.num_heads=4", "parallel=null"]
LORA = ["model.lora.targets=[query,value]"]


@pytest.mark.parametrize(
    "settings",
    [
        [],
        [*LORA, "train.compute_dtype=bfloat16"],
        [*LORA, "train.param_dtype=bfloat16", "optimizer.moments=int8"],
        ["model.frozen=[embed/*]", "model.tied_embeddings=true"],
    ],
)
def test_a_part_of_a_checkpoint_has_the_bytes_of_what_is_written(settings):
    job = jobs.load(RUN, [*SMALL, "topology=configs/topologies/two_cpus.yaml", *settings])
    meshes = build_meshes(job.plan, jax.devices())
    written = Counter()
    for part, chunk in enumerate(training_setup.make_chunks(job, dict(enumerate(meshes)))):
        for array in writing.owned(chunk, chunk.state_shapes).values():
            written[part] += array.dtype.itemsize * math.prod(array.shape)
    for part, num_bytes in enumerate(save_costs.part_bytes(job.config, job.plan)):
        assert 0 <= written[part] - num_bytes < 64


def test_a_node_without_nics_saves_to_a_url_at_an_unknown_rate():
    one_node = ["topology=configs/topologies/one_node.yaml", "parallel=null"]
    job = jobs.load(RUN, [*one_node, "run.dir=s3://bucket/run"])
    [line] = save_costs.describe(job.config, job.topology, job.plan)
    assert line.endswith("stage: to s3://bucket/run, at an unknown rate, beside steps")


A, B, C = (("ib", ("ib-0",), (0,)), ("ib", ("ib-1",), (1,)), ("roce", ("roce-0",), (2,)))
BOTH = [("ib", ("ib-0", "ib-1"), (0, 1)), ("roce", ("roce-0", "roce-1"), (2, 3))]


@pytest.mark.parametrize(
    "encrypt, stages, seconds",
    [
        ("always", (A, B, C), "2 s"),  # B has a boundary on each side
        ("auto", (A, B, C), "1 s"),
        ("always", (A, C, C), "1 s"),
        ("auto", BOTH, "500 ms"),  # each node has half of the boundary
    ],
)
def test_encryption_is_charged_to_the_node_that_has_most_of_it(encrypt, stages, seconds):
    """A boundary takes one second of a core at each end."""
    plan = dataclasses.replace(plan_of(*stages), boundary_bytes=save_costs.TLS_BYTES_PER_S / 2)
    config = dataclasses.replace(make_config(), distributed=DistributedConfig(encrypt=encrypt))
    line = save_costs.describe(config, IB_ROCE, plan)[-1]
    assert line.endswith(f": {seconds} of a core of the busiest node; nothing on one machine")


def test_what_islands_exchange_is_encrypted_too():
    """The one node of each sends and receives, once in two steps, what takes it a second each."""
    meeting = MeetingCost(every=2, bytes=(save_costs.TLS_BYTES_PER_S,) * 2, seconds=1.0)
    islands = plan_of(A), plan_of(C)
    plan = dataclasses.replace(plan_of(A, C), islands=islands, meeting=meeting)
    line = save_costs.describe(make_config(), IB_ROCE, plan)[-1]
    assert "between islands: 1 s of a core of the busiest node" in line
