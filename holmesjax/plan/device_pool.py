"""The share of a GPU's memory that JAX takes, and what of it a plan may fill. Does not import JAX.

JAX takes a pool of each GPU as it starts, and its arrays and the temporaries of its programs lie in
it. A plan that fills more than the pool has dies in its first step.

The share is one of the memory that CUDA shows, which is up to 1.1% less than that of a data sheet
(`topology.catalogue`). What a plan leaves free of its pool is more than that.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from holmesjax.errors import ConfigError
from holmesjax.plan.plan import StagePlan
from holmesjax.topology.machines import Topology
from holmesjax.units import show

# JAX reads the share from either, and refuses both at once. Its own messages call the first one
# deprecated; every version that is supported here reads it.
NAME, OTHER_NAME = "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"
ALLOCATOR, PLATFORM = "XLA_PYTHON_CLIENT_ALLOCATOR", "platform"
# Of a GPU's memory. The rest is for what no pool has: CUDA's context, the code of programs, and the
# buffers of NCCL and cuDNN.
SHARE = 0.93
JAX_SHARE = 0.75  # where nobody sets one
# Share of a device's memory that a plan may fill, unless its pool is smaller than SHARE. The rest
# of the pool is for temporaries inside a layer.
USABLE_MEMORY = 0.9


@dataclass(frozen=True, kw_only=True)
class DevicePool:
    """The share of each GPU's memory that a process of a run has for its arrays.

    `XLA_PYTHON_CLIENT_PREALLOCATE` does not change it: a pool that grows ends at the same size.

    Args:
      share: of the memory of a GPU; without a limit, what a plan may count with.
      name: the variable that says so.
      is_own: whether the user has set it.
      processes: how many share a GPU, each with such a pool.
      has_limit: False for the allocator `platform`, which takes of the driver what it needs.
    """

    share: float = SHARE
    name: str = NAME
    is_own: bool = False
    processes: int = 1
    has_limit: bool = True

    @classmethod
    def of_run(cls, env: Mapping[str, str]) -> "DevicePool":
        """The pool of the processes that are started from this environment.

        Raises ConfigError for a share that makes no sense.
        """
        return cls._read(env, SHARE)

    @classmethod
    def of_process(cls, env: Mapping[str, str]) -> "DevicePool":
        """The pool of a process with this environment. Raises as `of_run`."""
        return cls._read(env, JAX_SHARE)

    @classmethod
    def _read(cls, env: Mapping[str, str], default: float) -> "DevicePool":
        given = {name: text for name in (NAME, OTHER_NAME) if (text := env.get(name, ""))}
        if len(given) > 1:
            found = ", ".join(f"{name}={text}" for name, text in given.items())
            fix = f"unset one of the two, such as {NAME}"
            raise ConfigError(OTHER_NAME, f"is set beside {NAME}", found=found, fix=fix)
        if env.get(ALLOCATOR, "").lower() == PLATFORM:
            return cls(name=ALLOCATOR, is_own=True, has_limit=False)
        for name, text in given.items():
            return cls(share=_share(name, text), name=name, is_own=True)
        return cls(share=default)

    @property
    def usable_memory(self) -> float:
        """The share of a device's memory that a plan may fill.

        >>> DevicePool().usable_memory, round(DevicePool(share=0.31).usable_memory, 3)
        (0.9, 0.3)
        """
        return min(USABLE_MEMORY, self.share / SHARE * USABLE_MEMORY)

    @property
    def variables(self) -> dict[str, str]:
        """The variables with which JAX takes this pool.

        >>> DevicePool().variables
        {'XLA_PYTHON_CLIENT_MEM_FRACTION': '0.93'}
        """
        if not self.has_limit:
            return {ALLOCATOR: PLATFORM}
        # Rounded down: the parts of a GPU must not be more than the whole.
        return {self.name: f"{math.floor(1e6 * self.share + 1e-3) / 1e6:g}"}

    def among(self, processes: int) -> "DevicePool":
        """The pool of each of several processes on one GPU."""
        return replace(self, share=self.share / processes, processes=processes)

    def describe(self, stages: Sequence[StagePlan], topology: Topology) -> str:
        """The pool, and how much of it the stage fills that fills most."""
        stage = max(stages, key=lambda stage: _filled(stage, topology))
        needed = show(sum(stage.memory_bytes.values()), "B")
        room = show(self.share * _memory_bytes(stage, topology), "B")
        part = _filled(stage, topology) / self.share
        return f"{self}; the plan fills up to {part:.0%} of it ({needed} of {room})"

    def refuse_hopeless(self, parameter_bytes: float, topology: Topology) -> None:
        """Raises ConfigError if the pools of all devices together do not hold the parameters.

        No plan can be then, and to search for one takes long.
        """
        memory_bytes = sum(node.device.memory_bytes * node.num_devices for node in topology.nodes)
        room_bytes = self.usable_memory * memory_bytes
        if parameter_bytes <= room_bytes:
            return
        needed, room = show(parameter_bytes, "B"), show(room_bytes, "B")
        raise ConfigError(
            self.name,
            f"leaves too little of all GPUs together: the parameters alone need {needed}, and a "
            f"plan may fill {room}",
            found=str(self),
            fix=f"set {NAME} to {SHARE:g}, or to nothing, or use a smaller model or more GPUs",
        )

    def refuse_too_small(self, stages: Sequence[StagePlan], topology: Topology) -> None:
        """Raises ConfigError if the devices of a stage need more than this pool has for a plan."""
        if not stages:
            return
        stage = max(stages, key=lambda stage: _filled(stage, topology))
        filled = _filled(stage, topology)
        if filled <= self.usable_memory * (1 + 1e-9):  # as many digits as a share is written with
            return
        needed = show(sum(stage.memory_bytes.values()), "B")
        room = show(self.usable_memory * _memory_bytes(stage, topology), "B")
        least = math.ceil(100 * SHARE * filled / USABLE_MEMORY) / 100
        if self.processes > 1 or least > 1:
            fix = "start fewer processes for each GPU, or use a smaller model or train.global_batch"
        else:
            fix = (
                f"set {NAME} to {least:g} or more before JAX starts, or to nothing: "
                f"`python -m launch` then sets {SHARE:g}; or make the plan again"
            )
        raise ConfigError(
            self.name,
            f"leaves too little of each GPU: a stage needs {needed}, and a plan may fill {room}",
            found=str(self),
            fix=fix,
        )

    def __str__(self) -> str:
        own = f" ({self.name})" * self.is_own
        shared = f", which {self.processes} processes share" * (self.processes > 1)
        if not self.has_limit:
            counted = f"JAX takes what it needs{own}, and a plan counts with"
            return f"{counted} {100 * self.share:.3g}% of each GPU{shared}"
        return f"JAX's pool is {100 * self.share:.3g}% of each GPU{own}{shared}"


def with_node_variables(variables: Mapping[str, str], of_node: Mapping[str, str]) -> dict[str, str]:
    """The variables of a process, of which those of a node win; JAX refuses two names of one share.

    >>> of_node = {"XLA_CLIENT_MEM_FRACTION": "0.5"}
    >>> with_node_variables({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.93"}, of_node)
    {'XLA_CLIENT_MEM_FRACTION': '0.5'}
    """
    names = (NAME, OTHER_NAME)
    is_set = any(map(of_node.get, names))
    ours = {} if is_set else {n: variables[n] for n in names if n in variables}
    return {n: text for n, text in variables.items() if n not in names} | ours | dict(of_node)


def _share(name: str, text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0 < share <= 1:  # NaN is neither
        fix = f"use a number such as {SHARE:g}, or unset it"
        problem = "must be the share of a GPU's memory that JAX takes, above 0 and up to 1"
        raise ConfigError(name, problem, found=text, fix=fix)
    return share


def _filled(stage: StagePlan, topology: Topology) -> float:
    """The share of a device's memory that a stage fills, of the smallest device that it has."""
    return sum(stage.memory_bytes.values()) / _memory_bytes(stage, topology)


def _memory_bytes(stage: StagePlan, topology: Topology) -> float:
    return min(topology.node(name).device.memory_bytes for name in stage.nodes)
