"""Connections between processes that were lost and made anew, as records of steps tell of them.

link_losses    connections of each link that were made anew
link_lost_s    seconds for which one of them was lost, at most
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from holmesjax.report.process_step import ProcessStep


def of_step(reports: Iterable[ProcessStep]) -> dict[str, dict[str, Any]]:
    """Returns the two entries of a step's record, from the reports of all processes.

    The longest seconds of several processes count: all were lost at one time.

    >>> of_step([{}, {"link_losses": {"a -> b": 2}, "link_lost_s": {"a -> b": 9.0}},
    ...     {"link_losses": {"a -> b": 1}, "link_lost_s": {"a -> b": 8.5}}])
    {'link_losses': {'a -> b': 3}, 'link_lost_s': {'a -> b': 9.0}}
    >>> of_step([{}])
    {}
    """
    counts: Counter[str] = Counter()
    lost_s: dict[str, float] = {}
    for report in reports:
        counts.update(report.get("link_losses", {}))
        for link, seconds in report.get("link_lost_s", {}).items():
            lost_s[link] = max(lost_s.get(link, 0.0), seconds)
    return {"link_losses": dict(counts), "link_lost_s": lost_s} if counts else {}


def lines(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """Returns a line for each link whose connections were lost in these steps.

    >>> loss = {"link_losses": {"a -> b": 4}, "link_lost_s": {"a -> b": 9.1}}
    >>> lines([{}, loss, loss])
    ['a -> b: 8 connections were lost and made anew, in 18.2 s']
    """
    counts: Counter[str] = Counter()
    lost_s: Counter[str] = Counter()
    for record in records:
        counts.update(record.get("link_losses", {}))
        lost_s.update(record.get("link_lost_s", {}))
    return [
        f"{link}: {count:.0f} connections were lost and made anew, in {lost_s[link]:.1f} s"
        for link, count in counts.items()
    ]
