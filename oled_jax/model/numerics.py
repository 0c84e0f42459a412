"""Rounding and products, in one place, so that every layer rounds where the reference rounds.

The reference computes in bfloat16 and rounds after each operation; whether a value was rounded decides ties among
logits and which expert a token goes to. XLA may keep a wider value wherever a bfloat16 one is upcast again ("excess
precision"), so a plain ``astype`` is no rounding. ``rounded`` is: it goes through
``lax.reduce_precision``, which XLA does not remove. With float32 weights every rounding here is the identity, and
products run at the highest precision (a GPU would otherwise take TF32, a TPU bfloat16).
"""

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array


def rounded(x: Array, dtype: jnp.dtype) -> Array:
    """``x`` rounded to ``dtype`` (bfloat16: nearest even) and of that dtype; the rounding survives compilation."""
    if dtype == jnp.bfloat16:
        return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7).astype(dtype)
    return x.astype(dtype)


def product(spec: str, a: Array, b: Array) -> Array:
    """``einsum(spec, a, b)`` accumulated and returned in float32; exact products of bfloat16 operands."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32, precision=precision)


def linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """``x [..., in]`` times ``weight [out, in]`` transposed, plus ``bias [out]``, rounded once to ``x``'s dtype."""
    y = product("...i,oi->...o", x, weight)
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    return rounded(y, x.dtype)


def add(a: Array, b: Array) -> Array:
    """``a + b`` rounded once to ``a``'s dtype (the residual stream has no wider copy)."""
    return rounded(a.astype(jnp.float32) + b.astype(jnp.float32), a.dtype)


def swiglu(gate: Array, up: Array) -> Array:
    """``silu(gate) * up``, rounded after each of the two operations, as the reference does."""
    activated = rounded(jax.nn.silu(gate.astype(jnp.float32)), gate.dtype)
    return rounded(activated.astype(jnp.float32) * up.astype(jnp.float32), gate.dtype)
