"""A run before it starts, as lines for the console: its machines, its plan and its numbers."""

import bisect
import math

from holmesjax import units
from holmesjax.config import PlanConfig, update_rules
from holmesjax.costs.parameters import parameter_counts
from holmesjax.files import places
from holmesjax.job import Job
from holmesjax.layer_specs.distinct_kinds import kind_names
from holmesjax.plan import mfu, pins, plan_description, save_costs
from holmesjax.plan.device_pool import DevicePool
from holmesjax.plan.island_shares import allotted
from holmesjax.plan.outer_rule import kept_bytes, trained_sizes
from holmesjax.plan.plan import Axis
from holmesjax.topology import description
from holmesjax.topology.catalogue import CPU
from holmesjax.units import counted

SHORTER = 0.95  # times a step with equal shares: then others are worth a word
PARTS = (Axis.FSDP, Axis.CONTEXT, Axis.EXPERT)  # the axes that cut a replica's parameters


def describe(job: Job, pool: DevicePool | None = None) -> list[str]:
    """The machines, the plan and the run folder, for the console.

    `pool` is that of the GPUs; None: there are none, or it is not known here.
    """
    pinned, kind_of = pins.pins(job.config.parallel), kind_names(job.config.model)
    by_dollars = job.config.plan.objective == "tokens_per_dollar"
    return [
        *description.describe(job.topology),
        *plan_description.describe(job.plan, kind_of, is_pinned=bool(pinned)),
        *pins.describe(job.plan, pinned, job.unpinned, by_dollars=by_dollars, place=job.pinned_at),
        *([job.choice.describe()] if job.choice else _unused(job)),
        *_equal_shares(job),
        *_active(job),
        *([f"memory      {pool.describe(job.plan.stages, job.topology)}"] if pool else []),
        *_on_hosts(job),
        _rate(job),
        *_schedule(job),
        *_numbers(job),
        *_price(job),
        *save_costs.describe(job.config, job.topology, job.plan),
        f"run folder  {_places(job)}",
    ]


def _unused(job: Job) -> list[str]:
    """A line about settings of the planner's choice of islands, where it has none."""
    own, across = job.config.plan, job.config.parallel.across
    is_set = {
        "plan.allow": bool(own.allow),
        "plan.islands_more_tokens": across == "pipeline"
        and own.islands_more_tokens != PlanConfig().islands_more_tokens,
    }
    names = " and ".join(name for name, value in is_set.items() if value)
    why = f"not used, since parallel.across is {across} and not auto"
    return [f"choice      {names}: {why}"] if names else []


def _equal_shares(job: Job) -> list[str]:
    """A line about islands of unlike speed that take equal shares of the batch."""
    plan, parallel = job.plan, job.config.parallel
    if not plan.islands or parallel.shares is not None or parallel.is_mailbox:
        return []
    times_s = [island.step_time_s for island in plan.islands]
    speeds = [island.global_batch / island.step_time_s for island in plan.islands]
    count = plan.global_batch // (parallel.microbatches or 1)
    shares = zip(allotted(speeds, count), speeds, strict=True)
    slowest_s = max(plan.global_batch * number / count / speed for number, speed in shares)
    if slowest_s > SHORTER * max(times_s):
        return []
    fast, slow, better = (units.show(x, "s") for x in (min(times_s), max(times_s), slowest_s))
    return [
        f"shares      equal, and islands take {fast} to {slow} for theirs:",
        f"            parallel.shares=speed may take about {better}",
    ]


def _on_hosts(job: Job) -> list[str]:
    """A line about what islands keep between meetings, where hosts have it."""
    parallel, sizes = job.config.parallel, trained_sizes(job.config.model)
    if parallel.outer_memory != "host" or not job.plan.islands:
        return []
    kept = kept_bytes(sizes, len(job.plan.islands), parallel.outer_rule)
    texts = ", ".join(units.show(num_bytes, "B") for num_bytes in kept)
    return [f"hosts       {texts} of each island between meetings, beside devices for them alone"]


def _places(job: Job) -> str:
    own = job.config.run.dir
    return f"{own}, and {job.run_dir} here" if places.is_url(own) else own


def _rate(job: Job) -> str:
    """Returns the text of the predicted rate and the predicted time of the run."""
    step_s, steps = job.plan.step_time_s, job.config.train.steps
    if utilisation := mfu.shown(job.peak_step_s, step_s):
        utilisation += " (attention counted whole, not half as its causal mask)"
    whose = " of these machines, which are rehearsed" if job.config.run.rehearse else ""
    return (
        f"rate        {job.step_tokens / step_s:,.0f} tokens/s{utilisation} predicted{whose}; "
        f"{counted(steps, 'step', form=',')} in {_at_most(job)}{units.duration(steps * step_s)}"
    )


def _at_most(job: Job) -> str:
    """The words before what a run takes whose first batches are smaller: all count as whole."""
    return "at most " if job.config.train.rampup else ""


def _schedule(job: Job) -> list[str]:
    """Returns the text of a learning rate that follows tokens, with its steps."""
    optimizer, train = job.config.optimizer, job.config.train
    if optimizer.schedule_by == "steps":
        return []
    total, name, parts = job.config.tokens_after(train.steps), optimizer.schedule, []
    if warmup := optimizer.warmup_tokens:
        steps = bisect.bisect_left(range(train.steps), warmup, key=job.config.tokens_after)
        parts.append(f"warm-up {warmup:,} ({counted(steps, 'step', form=',')})")
    if decay := optimizer.decay_tokens:
        parts.append(f"decay the last {decay:,}")
    return [f"schedule    {name} by tokens: {', '.join([*parts, f'{total:,} in all'])}"]


def _active(job: Job) -> list[str]:
    """Returns the text of the model's size, where a token uses a part of the parameters."""
    everything, active = parameter_counts(job.config.model)
    lines = []
    if active < everything:
        lines.append(f"model       {everything:,} parameters, {active:,} active")
    shares = any(stage.mesh.get(Axis.EXPERT, 1) > 1 for stage in job.plan.stages)
    if shares and job.config.parallel.expert_placement == "load":
        lines.append("experts     placed by their loads at the begin and after each checkpoint,")
        lines.append("            with less memory than gradients take, which are not there then")
    return lines


def _numbers(job: Job) -> list[str]:
    """Returns the lines of the number formats; gradients are float32 on every plan."""
    train, optimizer = job.config.train, job.config.optimizer
    return [
        f"numbers     products in {train.compute_dtype}, gradients summed in float32, "
        f"{_sent(job)}"
        f"{'' if train.param_dtype == 'float32' else f'parameters in {train.param_dtype}, '}"
        f"{update_rules.describe(optimizer)}",
        *_fp8(job),
    ]


def _sent(job: Job) -> str:
    """Returns the words about gradients that are to be rounded before they are sent."""
    if (dtype := job.config.train.reduction_dtype) == "float32":
        return ""
    of_data = lambda mesh: mesh.get(Axis.DATA, 1)
    meshes = [stage.mesh for stage in job.plan.stages if of_data(stage.mesh) > 1]
    if not meshes:
        return "none sent between replicas, "
    parts = lambda mesh: math.prod(mesh.get(axis, 1) for axis in PARTS)  # of a replica
    if all(job.config.model.width // parts(mesh) % of_data(mesh) for mesh in meshes):
        return "sent between replicas in float32 (`data` does not divide the model width), "
    if set(job.device_kinds) == {CPU}:
        return f"rounded to {dtype} and sent between replicas in float32 (by CPUs), "
    return f"sent between replicas in {dtype}, "


def _fp8(job: Job) -> list[str]:
    """Returns the lines about products in fp8, if there are any."""
    if (fp8 := job.config.model.fp8) is None:
        return []
    scales = f"{fp8.scaling} scales of activations"
    scales += f" over {counted(fp8.history, 'step', form=',')}" if fp8.scaling == "delayed" else ""
    lines = [f"fp8         products of blocks in e4m3, their gradients in e5m2, {scales}"]
    ends = {"start": fp8.exclude_first, "end": fp8.exclude_last}
    excluded = [f"{counted(n, 'block', form=',')} at the {name}" for name, n in ends.items() if n]
    if excluded := excluded + ["down"] * fp8.exclude_down:
        lines.append(f"  in {job.config.train.compute_dtype}: {', '.join(excluded)}")
    if CPU in job.device_kinds:
        lines.append("  emulated on CPUs: the numbers are those of fp8, and no step is faster")
    if job.topology.device_kinds - {CPU}:
        lines.append("  predicted from the data sheet and one model that an H200 has trained")
    return lines


def _price(job: Job) -> list[str]:
    """Returns the text of the cost of the run, where the topology has prices."""
    train, items = job.config.train, job.plan.step_dollars
    if not (dollars := sum(items.values())):
        return []
    tokens = job.step_tokens
    parts = ", ".join(f"{name} {part:.3g}" for name, part in items.items())
    return [
        f"price       {dollars:.3g} dollars a step ({parts}), {tokens / dollars:,.0f} tokens a "
        f"dollar; {_at_most(job)}{dollars * train.steps:,.2f} for "
        f"{counted(train.steps, 'step', form=',')}"
    ]
