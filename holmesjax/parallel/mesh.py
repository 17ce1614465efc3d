"""From a plan to one `jax.sharding.Mesh` per stage.

In this code base an *axis* belongs to a mesh and a *dim* belongs to an array. The order of the axes
and of the devices was decided by `mesh_order`: neighbours along the last axis share the fastest
link.
"""

from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from holmesjax.errors import PlanError
from holmesjax.plan.plan import Plan, StagePlan


def build_meshes(plan: Plan, devices: Sequence[jax.Device]) -> tuple[Mesh, ...]:
    """One mesh per stage. `devices[i]` is device i of the topology.

    Every mesh has the axes that its stage uses, slowest link first, all of type Auto.
    """
    needed = 1 + max(device for stage in plan.stages for device in stage.devices)
    if len(devices) < needed:
        raise PlanError(
            "devices",
            f"JAX shows fewer devices than the plan needs of the topology {plan.topology!r}",
            found=f"{len(devices)} ({devices[0].platform}); the plan needs {needed}",
            fix="set run.rehearse=true to run on virtual CPU devices, or start processes on the "
            "machines of the topology with --launcher ssh, slurm or kubernetes",
        )
    numbered = dict(enumerate(devices))
    return tuple(build_mesh(stage, numbered) for stage in plan.stages)


def build_mesh(stage: StagePlan, devices: Mapping[int, jax.Device]) -> Mesh:
    """The mesh of one stage, from its devices by their numbers in the topology."""
    return Mesh(
        np.array([devices[i] for i in stage.devices]).reshape(tuple(stage.mesh.values())),
        tuple(axis.value for axis in stage.mesh),
        axis_types=(AxisType.Auto,) * len(stage.mesh),
    )
