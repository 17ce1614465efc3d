"""Orders of a layer's experts over the devices that share them, in which loads are even.

Every device has as many experts, whose arrays are of one shape. An order has the number of an
expert for each slot, and the slots of a device lie side by side.
"""

from collections.abc import Sequence

EXACT = 12  # experts at most for which the best order is searched


def placed(loads: Sequence[float], num_devices: int) -> list[int]:
    """The order of experts by load: the best one of few experts, else the greedy one.

    Experts stay in the order by number where that has no larger peak.

    >>> placed([8, 7, 1, 2], 2)
    [0, 2, 1, 3]
    """
    by_number = list(range(len(loads)))
    search = best if len(loads) <= EXACT else greedy
    order = search(loads, num_devices)
    is_better = peak(loads, order, num_devices) < peak(loads, by_number, num_devices)
    return order if is_better else by_number


def peak(loads: Sequence[float], order: Sequence[int], num_devices: int) -> float:
    """The load of the fullest device over the mean one; 1 where there are no loads."""
    each, total = len(order) // num_devices, sum(loads)
    groups = (order[i : i + each] for i in range(0, len(order), each))
    fullest = max(sum(loads[e] for e in group) for group in groups)
    return fullest * num_devices / total if total else 1.0


def greedy(loads: Sequence[float], num_devices: int) -> list[int]:
    """Each expert, the one with most first, goes to the device with least that has a free slot.

    >>> greedy([9, 5, 4, 2], 2)
    [0, 3, 1, 2]
    """
    each = len(loads) // num_devices
    groups: list[list[int]] = [[] for _ in range(num_devices)]
    sums = [0.0] * num_devices
    for expert in _by_load(loads):
        free = (i for i in range(num_devices) if len(groups[i]) < each)
        device = min(free, key=sums.__getitem__)
        groups[device].append(expert)
        sums[device] += loads[expert]
    return _order(groups)


def best(loads: Sequence[float], num_devices: int) -> list[int]:
    """An order whose fullest device has the least load, by branch and bound.

    Experts are dealt out as `greedy` does, but each to every device that could be better than the
    best order so far. It ends where the mean load, or the largest of an expert, is reached.
    """
    each = len(loads) // num_devices
    found = greedy(loads, num_devices)
    mean = sum(loads) / num_devices
    bound = max(mean, max(loads, default=0.0)) * (1 + 1e-12)
    least = peak(loads, found, num_devices) * mean
    groups: list[list[int]] = [[] for _ in range(num_devices)]
    sums = [0.0] * num_devices
    in_turn = _by_load(loads)

    def deal(number: int) -> None:
        nonlocal found, least
        if number == len(in_turn):
            if max(sums) < least:
                found, least = _order(groups), max(sums)
            return
        expert, seen = in_turn[number], set[tuple[float, int]]()
        for device in sorted(range(num_devices), key=sums.__getitem__):
            alike = sums[device], len(groups[device])  # devices that differ in their numbers alone
            if len(groups[device]) == each or alike in seen:
                continue
            if least <= bound or sums[device] + loads[expert] >= least:
                return
            seen.add(alike)
            groups[device].append(expert)
            sums[device] += loads[expert]
            deal(number + 1)
            groups[device].pop()
            sums[device] = alike[0]

    deal(0)
    return found


def _by_load(loads: Sequence[float]) -> list[int]:
    return sorted(range(len(loads)), key=lambda expert: -loads[expert])


def _order(groups: Sequence[Sequence[int]]) -> list[int]:
    """The slots of all devices; those with the same experts have them in one order."""
    return [expert for group in sorted(map(sorted, groups)) for expert in group]
