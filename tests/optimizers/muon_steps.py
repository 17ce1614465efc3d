"""Steps of Muon by NumPy in float64."""

import numpy as np


def numpy_steps(x, num_steps=5):
    """The iterations of Jordan's code, on the transpose of a tall matrix."""
    x = np.asarray(x, np.float64)
    if x.shape[0] > x.shape[1]:
        return numpy_steps(x.T, num_steps).T
    x = x / (np.sqrt(np.sum(x * x)) + 1e-7)
    for _ in range(num_steps):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x
