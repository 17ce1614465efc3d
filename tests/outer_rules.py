"""The outer rules of papers, plainly, in float64: each goes through the rounds of all islands."""

import numpy as np

from holmesjax.plan.gossip import pairs


def nesterov(rate, momentum, gradient, velocity):
    """A step of PyTorch's SGD with Nesterov's momentum, and the velocity behind it."""
    velocity = momentum * velocity + gradient
    return rate * (gradient + momentum * velocity), velocity


def eager(outer, first, moves, shares=()):
    """Yields what islands begin with after each meeting, and the weights when all has landed.

    arXiv 2502.12996: each island steps along its own new difference, and the old ones of others.

    Args:
      outer: the rule.
      first: the first weights.
      moves: by round, by island, by which its steps change its weights.
      shares: the weights of islands in a mean; empty: equal ones.
    """
    count, mean_of_old = len(moves[0]), 0.0
    part = np.array(shares or [1] * count) / sum(shares or [1] * count)
    weights, velocities, old = [first] * count, [0.0] * count, [0.0] * count
    whole, of_whole = first, 0.0
    for of_islands in moves:
        new = [-move for move in of_islands]
        for k in range(count):
            mixed = part[k] * new[k] + mean_of_old - part[k] * old[k]
            step, velocities[k] = nesterov(outer.rate, outer.decay, mixed, velocities[k])
            weights[k] = weights[k] - step
        old, mean_of_old = new, np.average(new, axis=0, weights=part)
        step, of_whole = nesterov(outer.rate, outer.decay, mean_of_old, of_whole)
        whole = whole - step
        yield list(weights), whole


def co2(outer, first, moves, shares=()):
    """Yields as `eager`. arXiv 2401.16265, with the clip and the penalty of this project."""
    most, velocity = outer.largest, 0.0
    old, now, sent = first, first, None

    def after(velocity, old, now, sent):
        mean = np.average(sent, axis=0, weights=shares or None)
        velocity = np.clip(outer.decay * velocity + old - mean, -most, most)
        gap = 1 + outer.shortens * np.abs(now - old) / most
        return now - outer.rate * velocity / gap, velocity

    for of_islands in moves:
        new = [now + move for move in of_islands]
        following = now
        if sent is not None:
            following, velocity = after(velocity, old, now, sent)
        old, now, sent = now, following, new
        yield [now] * len(of_islands), after(velocity, old, now, sent)[0]


def noloco(outer, first, moves, steps):
    """Yields as `eager`, the mean in place of the last. arXiv 2506.10911, Eq. 2 and 3.

    `steps` are those after which the rounds end.
    """
    count = len(moves[0])
    slow, velocities = [first] * count, [0.0] * count
    for of_islands, step in zip(moves, steps, strict=True):
        before, differences = list(slow), [-move for move in of_islands]
        for group in pairs(count, step):
            for k in group:
                velocities[k] = (
                    outer.decay * velocities[k]
                    - outer.rate * np.mean([differences[n] for n in group], axis=0)
                    - outer.pulls / len(group) * sum(before[k] - before[n] for n in group)
                )
                slow[k] = before[k] + velocities[k]
        yield list(slow), np.mean(slow, axis=0)
