"""Attention kernels that are right, and wrong in all the ways in which a check has to see it."""

import dataclasses
import itertools
import os
import signal
import time

import jax
import jax.numpy as jnp

from kernels.attention.reference import attention_reference

CALLS = itertools.count()


def right(*args, deterministic):
    return attention_reference(*args)


def wrong(*args, deterministic):
    """Off by a thirtieth, in one gradient alone."""

    @jax.custom_vjp
    def longer(x):
        return x

    longer.defvjp(lambda x: (x, None), lambda _, dx: (dx * (1 + 1 / 30),))
    q, k, v, *rest = args
    return attention_reference(q, longer(k), v, *rest)


def without(name):
    """Kernels that leave a part of the rule out."""

    def attention(q, k, v, segments, rule, *, deterministic):
        return attention_reference(q, k, v, segments, dataclasses.replace(rule, **{name: None}))

    return attention


def without_documents(q, k, v, segments, rule, *, deterministic):
    return attention_reference(q, k, v, None, rule)


def wrong_where_all_is_seen(q, k, v, segments, rule, *, deterministic):
    one = right if rule.causal else wrong
    return one(q, k, v, segments, rule, deterministic=deterministic)


def wrong_where_wide(q, *args, deterministic):
    return (wrong if q.shape[-1] > 8 else right)(q, *args, deterministic=deterministic)


def wrong_in_float16(q, *args, deterministic):
    return (wrong if q.dtype == "float16" else right)(q, *args, deterministic=deterministic)


def not_a_number(*args, deterministic):
    out, log_sum = attention_reference(*args)
    return out + jnp.zeros_like(out).at[0, 3].set(float("nan")), log_sum


def changing(*args, deterministic):
    """Its value has other last bits in each call."""
    out, log_sum = attention_reference(*args)
    noise = jax.pure_callback(lambda: next(CALLS) * 1e-6, jax.ShapeDtypeStruct((), "float32"))
    return out, log_sum + jax.lax.stop_gradient(noise)


def hanging(*args, deterministic):
    time.sleep(600)


def crashing(*args, deterministic):
    os.kill(os.getpid(), signal.SIGSEGV)


def raising(*args, deterministic):
    raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access")
