"""The outer rule of islands, plainly."""

import numpy as np


def diloco(outer, of_islands, weights, momentum, shares=()):
    """The rule as papers and PyTorch's SGD have it, in float64; the mean has these weights."""
    wide = [island_weights.astype(np.float64) for island_weights in of_islands]
    gradient = weights - np.average(wide, axis=0, weights=shares or None)
    momentum = outer.decay * momentum + gradient
    step = gradient + outer.decay * momentum if outer.nesterov else momentum
    return weights - outer.rate * step, momentum
