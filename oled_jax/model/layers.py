"""The small parts: linear maps, RMSNorm, rotary tables, the gated feed-forward part.

Weights keep the published layout ``[out, in]`` and the published names, so a parameter's path in the module is its name
in the checkpoint without the ``model.`` prefix; there is no key table to maintain.
"""

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from oled_jax.model.numerics import Array, linear, rounded, swiglu

INIT_STDDEV = 0.02


class Linear(nnx.Module):
    """``y = x W^T (+ b)`` with ``weight [out, in]``."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False, dtype: jnp.dtype, rngs: nnx.Rngs):
        init = nnx.initializers.normal(INIT_STDDEV)
        self.weight = nnx.Param(init(rngs.params(), (out_features, in_features), dtype))
        self.bias = nnx.Param(jnp.zeros((out_features,), dtype)) if bias else None

    def __call__(self, x: Array) -> Array:
        return linear(x, self.weight[...], None if self.bias is None else self.bias[...])


class RMSNorm(nnx.Module):
    """Root mean square norm over the last axis: rounded once before and once after the weight (spec section 3)."""

    def __init__(self, features: int, *, eps: float, dtype: jnp.dtype):
        self.weight = nnx.Param(jnp.ones((features,), dtype))
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        x32 = x.astype(jnp.float32)
        normed = x32 * lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.eps)
        scaled = self.weight[...].astype(jnp.float32) * rounded(normed, x.dtype).astype(jnp.float32)
        return rounded(scaled, x.dtype)


class GatedMLP(nnx.Module):
    """SwiGLU feed-forward part: the dense layers' and the shared experts' form."""

    def __init__(self, hidden: int, width: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.gate_proj = Linear(hidden, width, dtype=dtype, rngs=rngs)
        self.up_proj = Linear(hidden, width, dtype=dtype, rngs=rngs)
        self.down_proj = Linear(width, hidden, dtype=dtype, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


def rotary_table(positions: Array, rotary_dim: int, theta: float, dtype: jnp.dtype) -> tuple[Array, Array]:
    """Cosines and sines ``[..., rotary_dim]`` for integer ``positions [...]``, rounded to ``dtype``.

    Angles are float32 products of position and inverse frequency (an outer product: a dot might run in TF32).
    """
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    inverse = (np.float32(1.0) / np.float32(theta) ** exponents).astype(np.float32)
    angles = positions.astype(jnp.float32)[..., None] * inverse
    angles = jnp.concatenate([angles, angles], axis=-1)
    return rounded(jnp.cos(angles), dtype), rounded(jnp.sin(angles), dtype)


def rotate(v: Array, cos: Array, sin: Array) -> Array:
    """Rotates the leading ``cos.shape[-1]`` dimensions of each head of ``v [B, T, heads, D]``; halves, not pairs.

    ``cos``, ``sin``: ``[B, T, rotary_dim]``. Each product and the sum are rounded (spec section 3).
    """
    rotary_dim = cos.shape[-1]
    turning, rest = v[..., :rotary_dim], v[..., rotary_dim:]
    half = rotary_dim // 2
    swapped = jnp.concatenate([-turning[..., half:], turning[..., :half]], axis=-1)
    cos, sin = cos[:, :, None, :].astype(jnp.float32), sin[:, :, None, :].astype(jnp.float32)
    a = rounded(turning.astype(jnp.float32) * cos, v.dtype).astype(jnp.float32)
    b = rounded(swapped.astype(jnp.float32) * sin, v.dtype).astype(jnp.float32)
    return jnp.concatenate([rounded(a + b, v.dtype), rest], axis=-1)
