"""The implementations of attention in the stages of a plan, by the function of the run itself."""

from collections.abc import Iterator
from dataclasses import dataclass

from holmesjax.costs.stage_times import attention_in_stage
from holmesjax.planner.assembly import chunk_blocks
from holmesjax.planner.layer_ranges import add
from holmesjax.planner.problem import Problem
from holmesjax.planner.step_time import roles
from holmesjax.planner.trials import Candidate
from kernels.attention.choice import CHECKED


@dataclass(frozen=True, kw_only=True, slots=True)
class StageAttention:
    """The implementation of attention on one kind of device of a stage."""

    where: str  # "stage 0, h100"
    what: str  # the implementation, and why it is this one
    step_s: float  # that it takes of a step


def stage_attention(problem: Problem, candidate: Candidate) -> Iterator[StageAttention]:
    """The implementations of each stage, with their predicted seconds."""
    assignment, settings = candidate.assignment, candidate.settings
    every_role = roles(len(assignment.layers))
    for i, (slot, role) in enumerate(zip(assignment.slots, every_role, strict=True)):
        blocks = add(chunk_blocks(problem, candidate, i))
        shape = problem.stage_costs.shape(slot.mesh, settings, role, blocks)
        for kind in problem.pools[slot.pool].kinds:
            for choice, microbatch_s in attention_in_stage(
                problem.config.model, shape, kind
            ).items():
                if_checked = ", once checked there" * (choice.implementation in CHECKED)
                yield StageAttention(
                    where=f"stage {i}, {kind.name}",
                    what=f"{choice}{if_checked}",
                    step_s=settings.microbatches * microbatch_s,
                )
