"""The MFU, model FLOP utilisation: the share of the peak of a plan's devices that a step uses.

The FLOP of a step are those of the model's matrix products. What a backward computes again does
not count.
"""

import math

from holmesjax.config import Config
from holmesjax.costs.products import train_flop
from holmesjax.plan.plan import Plan
from holmesjax.topology.catalogue import CPU
from holmesjax.topology.machines import Topology


def peak_step_s(plan: Plan, topology: Topology, config: Config) -> float | None:
    """Returns the seconds of a step's matrix products with each device of the plan at its peak.

    The result is None for CPUs, and for a dtype that the data sheet of a device lacks.
    """
    of_number = [node.device for node in topology.nodes for _ in range(node.num_devices)]
    kinds = [of_number[number] for stage in plan.stages for number in stage.devices]
    dtype = config.train.compute_dtype
    if any(kind.name == CPU or dtype not in kind.peak_flop_per_s for kind in kinds):
        return None
    peak = math.fsum(kind.peak_flop_per_s[dtype] for kind in kinds)
    tokens = config.train.global_batch * config.model.context_length
    return train_flop(config.model, tokens) / peak


def of_step(peak_step_s: float, step_s: float) -> float:
    """Returns the MFU of a step that took `step_s`, from its seconds at the peak."""
    return peak_step_s / step_s


def shown(peak_step_s: float | None, step_s: float) -> str:
    """Returns the MFU as it stands behind a rate on the console, or "" if the peak is not known.

    >>> shown(0.5, 2.0), shown(None, 2.0)
    (', MFU 25.0%', '')
    """
    return "" if peak_step_s is None else f", MFU {of_step(peak_step_s, step_s):.1%}"
