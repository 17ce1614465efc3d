"""The settings of `parallel` that a run has: choices that the planner does not make.

A setting that the run file or the command line has is a pin. The planner keeps it, so that a plan
is the best of those with the pins, and the best of all may be another one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields

from holmesjax.config import ParallelConfig
from holmesjax.config.island_checks import OF_ISLANDS, OF_LOCAL_UPDATES
from holmesjax.plan.plan import Axis, Plan
from holmesjax.units import show

# Settings that say what a run does, and no choices of the planner's.
NO_PINS = (
    *("across", "meet", "expert_placement"),
    *(*OF_ISLANDS, *OF_LOCAL_UPDATES),
)
LEAST_SHARE = 0.0005  # of a step, to be worth a word
WIDTH = 110  # of a line

Value = int | str | tuple[int, ...] | tuple[str, ...]


def pins(parallel: ParallelConfig) -> dict[str, Value]:
    """The settings that a config sets, by name.

    >>> pins(ParallelConfig(stages=2, schedule="1f1b"))
    {'stages': 2, 'schedule': '1f1b'}
    """
    values = {field.name: getattr(parallel, field.name) for field in fields(parallel)}
    values = {name: value for name, value in values.items() if name not in NO_PINS}
    return {name: value for name, value in values.items() if value is not None}


def without_pins(parallel: ParallelConfig) -> ParallelConfig:
    """The settings that say what a run does, without those that the planner may choose.

    >>> settings = ParallelConfig(stages=2, expert_placement="load")
    >>> without_pins(settings) == ParallelConfig(expert_placement="load")
    True
    """
    return ParallelConfig(**{name: getattr(parallel, name) for name in NO_PINS})


def chosen(plan: Plan, name: str) -> Value | None:
    """The value of a setting in a plan; None if its stages, or their layers, have several."""
    if name == "activation_checkpointing" and plan.recomputed_layers:
        return None
    if name == "recomputed_layers":
        again = plan.activation_checkpointing != "none"
        return plan.recomputed_layers or tuple(again * stage.num_blocks for stage in plan.stages)
    if name in ("microbatches", "activation_checkpointing", "schedule"):
        return getattr(plan, name)
    if name == "chunks":
        return plan.num_chunks
    if name == "expert_chunks":
        numbers = {stage.expert_chunks for stage in plan.stages}
        return numbers.pop() if len(numbers) == 1 else None
    if name == "clusters":
        return tuple(stage.cluster for stage in plan.stages)
    if name in ("stages", "layers"):
        layers = tuple(stage.num_blocks for stage in plan.stages)
        return len(layers) if name == "stages" else layers
    sizes = {dict(stage.mesh).get(Axis(name), 1) for stage in plan.stages}
    return sizes.pop() if len(sizes) == 1 else None


def keeps(plan: Plan, pinned: Mapping[str, Value]) -> bool:
    """Whether a plan has all settings that are pinned."""
    own = {name: chosen(plan, name) for name in pinned}
    if "recomputed_layers" in own and "activation_checkpointing" in own:
        own["activation_checkpointing"] = plan.activation_checkpointing
    return own == pinned


def differences(before: Plan, now: Plan) -> list[str]:
    """The settings in which two plans differ, each with both values; none with islands.

    `several` stands for what stages have differently. What each stage has is left out where their
    number differs.
    """
    if before.islands or now.islands:
        return []
    texts = []
    for name in (field.name for field in fields(ParallelConfig)):
        is_by_stage = name in ("layers", "recomputed_layers")
        if name in NO_PINS or (is_by_stage and len(before.stages) != len(now.stages)):
            continue
        was, is_now = (chosen(plan, name) for plan in (before, now))
        if was != is_now:
            shown = ["several" if x is None else _text(x) for x in (was, is_now)]
            texts.append(f"parallel.{name} {shown[0]} -> {shown[1]}")
    return texts


def setting(name: str, value: Value) -> str:
    """A setting as a command line has it.

    >>> setting("clusters", ("ib", "roce"))
    'parallel.clusters=[ib,roce]'
    """
    return f"parallel.{name}={_text(value)}"


def _text(value: Value) -> str:
    return f"[{','.join(map(str, value))}]" if isinstance(value, tuple) else str(value)


def describe(
    plan: Plan,
    pinned: Mapping[str, Value],
    unpinned: Plan | None,
    *,
    by_dollars: bool = False,
    place: str = "",
) -> list[str]:
    """Lines about pins for the console; none where nothing is pinned.

    Args:
      plan: the best that was found with the pins.
      pinned: the pins.
      unpinned: the best that was found without them; None: none was looked for.
      by_dollars: whether the best plan is the cheapest, and not the fastest.
      place: where the pins are set, for whoever wants to change them; empty: not known.
    """
    if not pinned:
        return []
    lines = _wrapped("  pinned    ", [setting(*pin) for pin in pinned.items()])
    if plan.islands:
        words = "each island keeps these settings; nothing was searched without them"
        return [*lines, f"            {words}"]
    if unpinned is None:
        return lines
    cost = lambda own: sum(own.step_dollars.values()) if by_dollars else own.step_time_s
    less = 1.0 - cost(unpinned) / cost(plan)
    if less < LEAST_SHARE:
        worse = "cheaper" if by_dollars else "faster"
        return [*lines, f"            the search without these settings finds no {worse} plan"]
    found = f"{cost(unpinned):.3g} dollars" if by_dollars else show(cost(unpinned), "s")
    changes, left_out = [], []
    for name, value in pinned.items():
        own = chosen(unpinned, name)
        if own is None:
            left_out.append(f"parallel.{name}")
        elif own != value:
            changes.append(setting(name, own))
    if left_out:
        changes.append(f"without {', '.join(left_out)}")
    return [
        *lines,
        f"            the search without these settings finds a step of {found}, {less:.1%} less",
        *_wrapped("            it has ", changes),
        *([f"            to change: {place}"] if place else []),
        "            the planner decides what is left out, and all with parallel=null",
    ]


def _wrapped(start: str, texts: Sequence[str]) -> list[str]:
    """Texts with commas between them, on as many lines as it takes.

    >>> _wrapped("it has ", ["a", "b"])
    ['it has a, b']
    """
    lines = [start]
    for number, text in enumerate(texts, start=1):
        text += ", " * (number < len(texts))
        if len(lines[-1]) + len(text) > WIDTH and number > 1:
            lines.append(" " * len(start))
        lines[-1] += text
    return [line.rstrip() for line in lines]
