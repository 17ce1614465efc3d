"""Jobs on GPUs that are described, and not there."""

from holmesjax import job as jobs
from tests.jobs import write_run

CLUSTERS = {"a": (1, 1), "b": (1,)}


GPUS = """
name: gpus
clusters:
  - {name: hopper, fabric: infiniband, nodes: 2, devices: {kind: h100, count: 8},
     nics: [{kind: infiniband_400, count: 8}, {kind: ethernet_25}]}
  - {name: ampere, fabric: roce, nodes: 2, devices: {kind: a100_80gb, count: 4},
     nics: [{kind: roce_200, count: 4}, {kind: ethernet_25}]}
links:
  - {between: [hopper, ampere], fabric: ethernet, bandwidth: 25 Gb/s, latency: 50 us}
"""


def gpu_job(tmp_path, *settings):
    run_file = write_run(tmp_path, CLUSTERS)
    (tmp_path / "run_topology.yaml").write_text(GPUS)
    # Large enough for replicas on every device to pay.
    model = ["model.width=4096", "model.num_heads=32", "model.context_length=2048"]
    own = ["train.global_batch=64", "run.rehearse=false", "parallel.clusters=[hopper, ampere]"]
    return jobs.load(run_file, [*model, *own, *settings])
