"""Models whose texts show a fault, and their logits of a text in pieces."""

import jax
import numpy as np

WINDOWS = {"pattern": ("block", "window_block"), "window": 5}


def loud(params):
    """Larger weights, so that the likeliest token changes from place to place."""
    return jax.tree.map(lambda x: x * np.float32(8) if x.ndim > 1 else x, params)


def extended(decoder, token_BL, cuts, *, most=16):
    """Logits of all tokens, some of each row at a time; the caches at last."""
    caches = decoder.empty_caches(len(token_BL), most)
    start, found = 0, []
    for cut in cuts:
        position = np.arange(start, start + cut, dtype=np.int32) + np.zeros_like(token_BL[:, :1])
        new_BL = token_BL[:, start : start + cut]
        logits_BLV, caches = decoder.extend(caches, new_BL, position)
        found.append(np.asarray(logits_BLV))
        start += cut
    return np.concatenate(found, axis=1), caches
