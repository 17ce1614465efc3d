"""Attention by its formula."""

import numpy as np

from kernels.attention.reference import CAUSAL
from tests.kernels.attention.oracle import oracle


def causal(q, k, v, rule=CAUSAL):
    """In float64."""
    zeros = np.zeros((q.shape[0], q.shape[2], q.shape[1]))
    return oracle(q, k, v, np.zeros(q.shape), zeros, None, rule)[0]
