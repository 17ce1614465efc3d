"""`launch plan`: prints the plan of a run and its reasons; starts nothing."""

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path

from holmesjax import config as configs, job_description
from holmesjax.checkpoints import resume
from holmesjax.errors import ConfigError, HolmesError
from holmesjax.job import Job
from holmesjax.layer_specs.distinct_kinds import kind_names
from holmesjax.plan import forecast, pins, plan_description
from holmesjax.plan.device_pool import USABLE_MEMORY
from holmesjax.plan.plan import Plan
from holmesjax.planner.explain import Explanation
from holmesjax.planner.islands_explained import IslandsExplanation, describe_run, explain_run
from holmesjax.planner.planner import make_changed_plan
from holmesjax.planner.selection import Saying
from holmesjax.report import trace
from holmesjax.topology import description, loading
from holmesjax.units import show
from launch.progress_message import ProgressMessage


def run(args: argparse.Namespace) -> int:
    job: Job = args.job
    if args.trace:
        _write_trace(job.plan, args.trace)
    pool = job.pool(os.environ)
    usable_memory = pool.usable_memory if pool else USABLE_MEMORY
    with ProgressMessage("planning") as say:
        changed = explained = None
        if args.what_if:
            changed = _changed(job, Path(args.target), args.what_if, say, usable_memory)
        if args.explain:
            explained = explain_run(job.config, job.topology, say, usable_memory, job.choice)
    if args.json:
        print(_as_json(job, changed, explained))
        return 0
    lines = [*job_description.describe(job, pool), *_resume(job)]
    if explained:
        lines += describe_run(explained)
    if changed:
        is_pinned = bool(pins.pins(job.config.parallel))
        described = plan_description.describe(
            changed.plan, kind_names(job.config.model), is_pinned=is_pinned
        )
        lines += [f"what if     {', '.join(args.what_if)}", *described]
        lines.append(f"            {_difference(job, changed)}")
        by_device = job.config.distributed.processes == "device"
        lines += description.changed_ways(job.topology, changed.topology, by_device=by_device)
    print("\n".join(lines))
    return 0


def _resume(job: Job) -> list[str]:
    """Lines about a run that has begun: what `train` would say, or why it would refuse."""
    warnings = list[str]()
    try:
        start = resume.find(job, (), warnings.append, fetches=True)
    except HolmesError as refusal:
        told = ["refused by train:", *str(refusal).splitlines()]
    else:
        is_done = start.step >= job.config.train.steps
        told = start.finished() if is_done else start.describe()
    lines = [line for text in (*warnings, *told) for line in text.splitlines()]
    return [f"{'' if n else 'resume':12}{line}" for n, line in enumerate(lines)]


def _changed(
    job: Job, target: Path, overrides: list[str], say: Saying, usable_memory: float
) -> Job:
    """Plans the same run on changed machines. Raises as `loading.load` and `make_plan`."""
    topology = loading.load(configs.topology_path(job.config, target), overrides)
    asked = job.choice.asked if job.choice else job.config
    plan = make_changed_plan(asked, job.topology, topology, say, usable_memory)
    return Job(config=job.config, topology=topology, plan=plan)


def _write_trace(plan: Plan, path: str) -> None:
    """Writes the simulated step. Raises ConfigError if the file cannot be written."""
    found = trace.events("predicted", 1, forecast.tasks(plan), forecast.transfers(plan))
    try:
        Path(path).write_text(trace.text(found), encoding="utf-8")
    except OSError as error:
        fix = "name a file in a folder that can be written"
        raise ConfigError("--trace", "cannot be written", found=error, fix=fix) from None


def _difference(job: Job, changed: Job) -> str:
    before_s, after_s = job.plan.step_time_s, changed.plan.step_time_s
    factor = after_s / before_s
    change = "as long as" if factor == 1 else f"{abs(factor - 1):.1%} "
    change += "" if factor == 1 else "longer than" if factor > 1 else "shorter than"
    return f"a step of {show(after_s, 's')}, {change} the {show(before_s, 's')} of the plan above"


def _as_json(
    job: Job, changed: Job | None, explained: Explanation | IslandsExplanation | None
) -> str:
    """Returns the plan as `Plan.to_json`; additions have keys of their own."""
    if not changed and not explained:
        return job.plan.to_json()
    values = {"plan": json.loads(job.plan.to_json())}
    if explained:
        values["explanation"] = asdict(explained)
    if changed:
        values["what_if"] = json.loads(changed.plan.to_json())
    return json.dumps(values, indent=2)
