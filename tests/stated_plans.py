"""Plans on two clusters of two nodes, of stages that a test states."""

from holmesjax.layer_specs.model_layers import EMBED, HEAD, block_name
from holmesjax.plan.plan import Axis, Plan, StagePlan
from holmesjax.topology import loading

IB_ROCE = loading.load("configs/topologies/ib_roce.yaml")  # 2 clusters x 2 nodes x 2 devices


def plan_of(*stages):
    """Stages as (cluster, nodes, devices)."""
    layers = [[block_name(i)] for i in range(len(stages))]
    layers[0].insert(0, EMBED)
    layers[-1].append(HEAD)
    return Plan(
        topology="ib_roce",
        topology_hash="",
        stages=tuple(
            StagePlan(
                cluster=cluster,
                nodes=nodes,
                chunks=(tuple(names),),
                devices=devices,
                mesh={Axis.DATA: len(devices), Axis.TENSOR: 1},
                fabrics={},
                memory_bytes={},
                seconds={},
            )
            for (cluster, nodes, devices), names in zip(stages, layers, strict=True)
        ),
        global_batch=8,
        microbatches=1,
        schedule="1f1b",
        activation_checkpointing="none",
        boundary_bytes=0.0,
        step_time_s=0.0,
        bound_s=0.0,
        shares={},
    )
