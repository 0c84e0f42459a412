"""Weights, confidences and factors as integers, and a counter-based hash, bit-equal in numpy and jax.numpy.

A policy that ranks floats decides one way on the host and another on the device as soon as two sums are nearly equal.
So floats are rounded once, as traces store them (float16, or uint8 in units of 1/255), turned into fixed point, and
from there on only integers are added, multiplied and compared.

Votes count in units of 2^-16 (``VOTE_ONE``), factors such as a decay in units of 2^-14 (``FACTOR_ONE``): their product
fits an int32.
"""

import math
from typing import Any

import numpy as np

from oled_jax.retention.arrays import Array

VOTE_BITS = 16
VOTE_ONE = 1 << VOTE_BITS
FACTOR_BITS = 14
FACTOR_ONE = 1 << FACTOR_BITS
PRIORITY_LIMIT = 1 << 27  # where sums saturate, so that fifteen sequences can still be added up in an int32


def factor(value: float) -> int:
    """A float in [0, 1] as a factor in units of 2^-14."""
    return round(value * FACTOR_ONE)


def to_fixed(values: Array, bits: int, xp: Any) -> Array:
    """Weights or confidences in units of ``2**-bits``, int32; ``bits`` at most 16.

    Floats are clipped to [0, 1], NaN to 0, after rounding to float16; uint8 counts in units of 1/255.
    """
    if values.dtype == np.uint8:
        return (values.astype(xp.int32) * (1 << bits) + 127) // 255
    half = values.astype(xp.float32)
    if values.dtype != np.float16:
        half = _rounded_to_half(half, xp)
    clipped = xp.where(half > 0, xp.minimum(half, 1.0), 0.0).astype(xp.float32)
    return xp.rint(clipped * float(1 << bits)).astype(xp.int32)


def _rounded_to_half(x: Array, xp: Any) -> Array:
    """``x`` float32, of magnitude at most 1, as a float16 would hold it; still float32.

    In integers on purpose: XLA may drop a conversion to float16 that is followed by one back to float32.
    """
    bits = x.view(xp.int32)
    normal = ((bits + 0xFFF + ((bits >> 13) & 1)) & -0x2000).view(xp.float32)
    subnormal = xp.rint(x * 2.0**24) * 2.0**-24
    return xp.where(xp.abs(x) < 2.0**-14, subnormal, normal)


def scaled(x: Array, by: Array | int) -> Array:
    """``x * by / 2^14``, rounded half up; ``x`` int32 from 0 to 2^27, ``by`` a factor from 0 to ``FACTOR_ONE``.

    The product is taken in two halves because it does not fit an int32.
    """
    high, low = x >> FACTOR_BITS, x & (FACTOR_ONE - 1)
    return high * by + ((low * by + FACTOR_ONE // 2) >> FACTOR_BITS)


def shares(votes: Array, xp: Any) -> Array:
    """``votes`` over their sum along the last axis, in units of 2^-24, rounded down; 0 where nobody voted.

    ``votes`` int32 ``[..., E]`` from 0 to 2^27. Where the sum has more than 22 bits, all are halved first until it has
    not: what a vote loses is below a two-millionth of the sum. Then a long division, eight bits at a time.
    """
    coarse = max(0, (votes.shape[-1] - 1).bit_length() + 28 - 31)
    total = (votes >> coarse).sum(-1, keepdims=True, dtype=xp.int32)
    beyond = total >> (22 - coarse)
    excess = sum((beyond >> bit > 0).astype(xp.int32) for bit in range(31 - (22 - coarse)))
    rest = votes >> excess
    total = xp.maximum(rest.sum(-1, keepdims=True, dtype=xp.int32), 1)
    quotient = xp.zeros_like(rest)
    for _ in range(3):
        rest = rest << 8
        digit = rest // total
        quotient, rest = (quotient << 8) + digit, rest - digit * total
    return quotient


def evidence_table() -> np.ndarray:
    """``-log2(1 - w)`` in units of 2^-12, capped at 16 bits, for w in units of 1/1024: int32 ``[1025]``.

    Adding these ranks experts as the noisy-or ``1 - prod(1 - w)`` does. The cap makes a certainty worth ``VOTE_ONE``.
    """
    bits = [min(16.0, -math.log2(1 - step / 1024)) if step < 1024 else 16.0 for step in range(1025)]
    return np.asarray([round(value * 4096) for value in bits], np.int32)


def hashed(seed: int, forward: Array | int, layer: Array, num_experts: int, salt: int, xp: Any) -> Array:
    """Pseudo-random int32 from 0 to 2^31-1, shape ``[*layer, E]``: a pure function of all arguments.

    ``layer`` int32 ``[...]``. The finaliser of MurmurHash3, chained over the arguments, in uint32 arithmetic.
    """
    # Never zero-dimensional: numpy warns when a scalar wraps round, and not when an array does.
    state = xp.full((1,), (seed * 0x9E3779B9 + salt) & 0xFFFFFFFF, dtype=xp.uint32)
    state = _mixed(state ^ xp.asarray(forward).reshape(1).astype(xp.uint32), xp)
    state = _mixed(state ^ xp.asarray(layer)[..., None].astype(xp.uint32), xp)
    state = _mixed(state ^ xp.arange(num_experts, dtype=xp.uint32), xp)
    return (state >> xp.uint32(1)).astype(xp.int32)


def _mixed(x: Array, xp: Any) -> Array:
    x = (x ^ (x >> xp.uint32(16))) * xp.uint32(0x85EBCA6B)
    x = (x ^ (x >> xp.uint32(13))) * xp.uint32(0xC2B2AE35)
    # Added before the last step, because the bare finaliser maps 0 to 0 for ever.
    return (x ^ (x >> xp.uint32(16))) + xp.uint32(0x9E3779B9)
