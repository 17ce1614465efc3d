"""The outer rule of islands, plainly."""

import numpy as np


def diloco(outer, of_islands, weights, momentum):
    """The rule as papers and PyTorch's SGD have it, in float64."""
    gradient = weights - np.mean(
        [island_weights.astype(np.float64) for island_weights in of_islands], axis=0
    )
    momentum = outer.decay * momentum + gradient
    step = gradient + outer.decay * momentum if outer.nesterov else momentum
    return weights - outer.rate * step, momentum
