"""Faults that are injected into a lab while a job runs in it, and their notation.

    step=20 cut ib<->roce 10s            nothing gets through for ten seconds; nobody is told
    t=30s slow ib->roce to 10Mb/s 20s    one way only
    step=5 cut ib-0                      a node alone, for ever
    step=5 freeze roce-0 10s             its processes stand still
    step=5 kill ib-1                     its processes are killed

Without `step` or `t` it is done at once. Rates and times are the lab's own.
"""

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from holmesjax import units
from holmesjax.errors import ConfigError, HolmesError, Mistakes
from holmesjax.files import schema
from holmesjax.topology.machines import Topology

FaultKind = Literal["cut", "slow", "kill", "freeze"]
KINDS: dict[str, FaultKind] = {"cut": "cut", "slow": "slow", "kill": "kill", "freeze": "freeze"}
UNIT = "(?:[numµμ]?s|min|h|[kMGT]?i?[bB]/s|[kMGT]?bps)"
EXAMPLE = "write, say, 'step=20 cut ib<->roce 10s' or 't=30s freeze ib-0 10s'"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One thing that goes wrong. It is done to a node, or to a link, one way or both."""

    text: str  # as it was written, without its moment
    kind: FaultKind
    step: int | None = None  # after which it is done
    time_s: float = 0.0  # after the start at which it is done, without a step
    node: str | None = None
    ways: tuple[tuple[str, str], ...] = ()  # pairs of clusters, from and to
    rate_bytes_per_s: float = 0.0  # for `slow`
    duration_s: float | None = None  # None: for ever


def parse_all(texts: Sequence[str], topology: Topology) -> list[Fault]:
    """Raises Mistakes with all that is wrong in any of them."""
    faults, mistakes = [], []
    for text in texts:
        try:
            faults.append(parse(text, topology))
        except HolmesError as error:
            mistakes.append(error)
    if mistakes:
        raise Mistakes(mistakes)
    return faults


def parse(text: str, topology: Topology) -> Fault:
    """Reads one fault. Raises ConfigError for the first mistake in it."""
    words = _words(text)
    step, time_s = _moment(text, words.pop(0)) if words and "=" in words[0] else (None, 0.0)
    described = " ".join(words)
    if len(words) < 2:
        raise _mistake(text, "must say what is done to whom", found=described, fix=EXAMPLE)
    word, target, *rest = words
    if word not in KINDS:
        fix = f"{schema.near(word, list(KINDS))}; {EXAMPLE}"
        raise _mistake(text, "no such fault", found=word, fix=fix)
    kind = KINDS[word]
    node, ways = _target(text, kind, target, topology)
    fault = Fault(text=described, kind=kind, step=step, time_s=time_s, node=node, ways=ways)
    if kind == "slow":
        if len(rest) < 2 or rest[0] != "to":
            fix = "write, say, 'slow ib<->roce to 10Mb/s 20s'"
            raise _mistake(text, "must say how slow", found=described, fix=fix)
        rate = _quantity(text, rest[1], "b/s")
        fault = dataclasses.replace(fault, rate_bytes_per_s=rate)
        rest = rest[2:]
    if rest and kind == "kill":
        fix = "leave the time out; --max-restarts 1 behind train starts the job again"
        raise _mistake(text, "what is killed does not come back", found=rest[0], fix=fix)
    if len(rest) > 1:
        raise _mistake(text, "has words too many", found=" ".join(rest[1:]), fix=EXAMPLE)
    return dataclasses.replace(fault, duration_s=_quantity(text, rest[0], "s")) if rest else fault


def _words(text: str) -> list[str]:
    """Without the spaces around arrows, and between numbers and their units.

    >>> _words("t=30 s slow ib <-> roce to 10 Mb/s 20 s")
    ['t=30s', 'slow', 'ib<->roce', 'to', '10Mb/s', '20s']
    """
    text = re.sub(r"\s*(<->|->)\s*", r"\1", text.strip())
    return re.sub(rf"((?:^|\s|\bt=)\d[\d.]*)\s+(?={UNIT}(?:\s|$))", r"\1", text).split()


def _moment(text: str, word: str) -> tuple[int | None, float]:
    """The step, or without one the seconds."""
    name, _, value = word.partition("=")
    if name == "step":
        if not value.isdigit() or int(value) < 1:
            fix = "count steps from 1: step=20"
            raise _mistake(text, "step must be a number", found=value, fix=fix)
        return int(value), 0.0
    if name == "t":
        try:
            return None, units.parse(value, "s")
        except HolmesError as error:
            raise _mistake(text, f"t {error.problem}", found=value, fix="write t=30s") from None
    fix = "write step=20, or t=30s"
    raise _mistake(text, "no such moment", found=word, fix=fix)


def _target(
    text: str, kind: FaultKind, target: str, topology: Topology
) -> tuple[str | None, tuple[tuple[str, str], ...]]:
    """The node, or the ways of a link."""
    clusters = [cluster.name for cluster in topology.clusters]
    nodes = [node.name for node in topology.nodes]
    ends = re.split("<->|->", target)
    if len(ends) == 1:
        if kind == "slow":
            fix = "name two clusters: slow ib<->roce to 10Mb/s"
            raise _mistake(text, "only a link can be slow", found=target, fix=fix)
        if target not in nodes:
            fix = f"{schema.near(target, nodes)}; a link is written ib<->roce"
            raise _mistake(text, "no such node", found=target, fix=fix)
        return target, ()
    if kind in ("kill", "freeze"):
        fix = f"name a node: {', '.join(nodes)}"
        raise _mistake(text, f"only a node can be hit by {kind}", found=target, fix=fix)
    for end in ends:
        if end not in clusters:
            raise _mistake(text, "no such cluster", found=end, fix=schema.near(end, clusters))
    if len(ends) != 2 or ends[0] == ends[1]:
        fix = f"name two of {', '.join(clusters)}"
        raise _mistake(text, "a link joins two clusters", found=target, fix=fix)
    a, b = ends
    return None, ((a, b), (b, a)) if "<->" in target else ((a, b),)


def _quantity(text: str, word: str, unit: units.Unit) -> float:
    """Raises ConfigError also for zero."""
    try:
        value = units.parse(word, unit)
    except HolmesError as error:
        raise _mistake(
            text, f"the {error.where} {error.problem}", found=word, fix=error.fix
        ) from None
    if value == 0:
        fix = "cut the link instead" if unit == "b/s" else "leave it out: then it is for ever"
        raise _mistake(text, "must not be zero", found=word, fix=fix)
    return value


def _mistake(text: str, problem: str, *, found: object, fix: str) -> ConfigError:
    return ConfigError(f"--fault {text!r}", problem, found=found or "nothing", fix=fix)
