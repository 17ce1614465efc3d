"""The kernels of a plan's stages, by the run's own functions, and the layers that compute again."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from holmesjax.config.update_rules import RULES
from holmesjax.costs import work
from holmesjax.costs.layer_times import attention_in_stage
from holmesjax.planner.assembly import stage_layers, stage_seconds
from holmesjax.planner.problem import Problem, roles
from holmesjax.planner.trials import Candidate
from holmesjax.topology import catalogue
from kernels.adamw_choice import choose_optimizer
from kernels.attention.choice import CHECKED, Device, UnsupportedError


@dataclass(frozen=True, kw_only=True, slots=True)
class StageKernel:
    """The implementation of one thing on one kind of device of a stage."""

    where: str  # "stage 0, h100"
    what: str  # the implementation, and why it is this one
    step_s: float  # that it takes of a step


def _what(choice: object, is_checked: bool) -> str:
    """The choice as text; a plan counts on checks that pass."""
    return f"{choice}{', once checked there' * is_checked}"


def stage_attention(problem: Problem, candidate: Candidate) -> Iterator[StageKernel]:
    """The implementations of attention in each stage, with their predicted seconds."""
    assignment, settings = candidate.assignment, candidate.settings
    every_role = roles(len(assignment.layers))
    for i, (slot, role) in enumerate(zip(assignment.slots, every_role, strict=True)):
        blocks, again = stage_layers(problem, candidate, i)
        shape = problem.stage_costs.shape(slot.mesh, settings, role, blocks, recomputed=again)
        for kind in problem.pools[slot.pool].kinds:
            for choice, microbatch_s in attention_in_stage(
                problem.config.model, shape, kind
            ).items():
                yield StageKernel(
                    where=f"stage {i}, {kind.name}",
                    what=_what(choice, choice.implementation in CHECKED),
                    step_s=settings.microbatches * microbatch_s,
                )


def stage_recomputed(problem: Problem, candidate: Candidate) -> Iterator[StageKernel]:
    """The layers of each stage that compute again, with the seconds that this takes."""
    assignment, settings = candidate.assignment, candidate.settings
    if settings.checkpointing == "none":
        return
    plain = settings._replace(checkpointing="none")
    numbers = assignment.recomputed or assignment.layers
    every = zip(assignment.slots, roles(len(numbers)), numbers, assignment.layers, strict=True)
    for i, (slot, role, number, held) in enumerate(every):
        stage, (blocks, again) = (
            problem.stage(slot, settings, role),
            stage_layers(problem, candidate, i),
        )
        without = problem.stage(slot, plain, role)
        own, none = stage.seconds(blocks, False, again), without.seconds(blocks, False)
        told = f"the first {number} of {held} layers" if number < held else f"all {held} layers"
        yield StageKernel(
            where=f"stage {i}, {settings.checkpointing}",
            what=told if number else f"none of {held} layers",
            step_s=settings.microbatches * (own.backward - none.backward),
        )


def stage_sequences(problem: Problem, candidate: Candidate) -> Iterator[StageKernel]:
    """Whether `tensor` cuts sequences in each stage that has it, with its collectives' seconds."""
    config, settings = problem.config, candidate.settings
    for i, slot in enumerate(candidate.assignment.slots):
        tensor, length = slot.mesh.tensor, config.model.context_length // slot.mesh.context
        if tensor == 1:
            continue
        if slot.mesh.sequence_parallel:
            what = f"{tensor} parts of {length // tensor} tokens between products"
        elif config.kernels.sequence_parallel == "off":
            what = "whole, as kernels.sequence_parallel says"
        elif work.sequence_cuts(length, tensor) == 1:
            what = f"whole: {length} tokens do not divide by tensor {tensor}"
        else:
            what = "whole: no faster plan with parts was found"
        seconds = stage_seconds(problem, candidate, i)
        sent_s = seconds.forward_tensor_s + seconds.backward_tensor_s
        step_s = settings.microbatches * float(np.max(sent_s))
        yield StageKernel(where=f"stage {i}, tensor {tensor}", what=what, step_s=step_s)


def stage_update(problem: Problem, candidate: Candidate) -> Iterator[StageKernel]:
    """The implementations of AdamW's step in each stage, with the predicted seconds of its update.

    There are none for an optimizer in which no parameter has that step, nor for kinds of device
    that the catalogue does not have, nor where the run itself will refuse.
    """
    config = problem.config
    if not RULES[config.optimizer.name].has_adamw:
        return
    for i, slot in enumerate(candidate.assignment.slots):
        for kind in problem.pools[slot.pool].kinds:
            if (seen := catalogue.AS_JAX_SEES_THEM.get(kind.name)) is None:
                continue
            asked, moments = config.kernels.optimizer, config.optimizer.moments
            device, dtype = Device(*seen), config.train.param_dtype
            try:
                choice = choose_optimizer(asked, device, moments, parameters=dtype, unproven=None)
            except UnsupportedError:
                continue
            yield StageKernel(
                where=f"stage {i}, {kind.name}",
                what=_what(choice, asked == "auto" and choice.implementation == "pallas"),
                step_s=float(np.max(stage_seconds(problem, candidate, i).update_s)),
            )
