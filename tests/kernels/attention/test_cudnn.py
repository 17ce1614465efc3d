"""The arrays for cuDNN, computed by XLA in its place: none is installed where tests run."""

import functools

import jax
import numpy as np
import pytest

from kernels.attention.cudnn import attention_cudnn
from kernels.attention.tiles import Rule
from tests.arrays import assert_near, normal
from tests.kernels.attention.oracle import inputs, oracle

by_xla = functools.partial(attention_cudnn, implementation="xla")


@pytest.mark.parametrize("length", [37, 38])
@pytest.mark.parametrize("rule", [Rule(), Rule(window=9, scale=0.3)], ids=str)
def test_an_odd_length_gets_a_token_that_changes_nothing(length, rule, monkeypatch):
    lengths = []
    function = jax.nn.dot_product_attention

    def noted(*arrays, **told):
        lengths.extend(x.shape[1] for x in arrays)
        return function(*arrays, **told)

    monkeypatch.setattr(jax.nn, "dot_product_attention", noted)
    arrays = inputs(length, length, 4, 2, 16)
    dout = normal(3, *arrays[0].shape)
    out, pullback = jax.vjp(lambda *arrays: by_xla(*arrays, rule), *arrays)
    assert lengths == [38] * 3
    want = oracle(*arrays, dout, np.zeros((2, 4, length)), None, rule)
    for one, other in zip((out, *pullback(dout)), (want[0], *want[2:]), strict=True):
        assert_near(one, other)
    _, log_sum_BLH = by_xla(*arrays, rule, return_residual=True)
    assert_near(log_sum_BLH.swapaxes(1, 2), want[1])
