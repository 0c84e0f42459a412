"""Attention of a run of tokens over the committed cache and over itself, block-causal.

The keys are two parts kept apart until the softmax: the cache's first ``window`` rows (those before ``start`` count)
and the tokens' own. Scores and probabilities round where the reference's eager kernel rounds; with float32 weights
nothing rounds.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from oled_jax.config import ModelConfig
from oled_jax.model.layers import Linear, RMSNorm, rotate
from oled_jax.model.numerics import Array, product, rounded

# Far below any score, yet finite, so that a row that may see nothing (padding) stays a number.
MASKED = float(jnp.finfo(jnp.float32).min)


class Attention(nnx.Module):
    """Grouped-query attention with normalised queries and keys and partial rotary positions."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        c = config
        heads = c.num_attention_heads + 2 * c.num_key_value_heads
        self.query_key_value = Linear(c.hidden_size, heads * c.head_dim, bias=c.use_qkv_bias, dtype=dtype, rngs=rngs)
        self.query_layernorm = RMSNorm(c.head_dim, eps=c.rms_norm_eps, dtype=dtype)
        self.key_layernorm = RMSNorm(c.head_dim, eps=c.rms_norm_eps, dtype=dtype)
        self.dense = Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=c.use_bias, dtype=dtype, rngs=rngs)
        self.config = c

    def __call__(
        self, x: Array, rotary: tuple[Array, Array], cached: tuple[Array, Array], masks: tuple[Array, Array]
    ) -> tuple[Array, Array, Array]:
        """Attends ``x [B, T, H]``; returns ``(y [B, T, H], keys [B, T, KV, D], values [B, T, KV, D])``.

        ``rotary``: cosines and sines ``[B, T, R]``. ``cached``: keys and values ``[B, W, KV, D]`` of the cache's first
        W positions. ``masks``: which of them count, ``[B, W]``, and which own key each query sees, ``[B, T, T]``.
        """
        c = self.config
        batch, tokens, _ = x.shape
        heads, kv_heads = c.num_attention_heads, c.num_key_value_heads
        qkv = self.query_key_value(x).reshape(batch, tokens, heads + 2 * kv_heads, c.head_dim)
        q, k, v = jnp.split(qkv, [heads, heads + kv_heads], axis=2)
        q = rotate(self.query_layernorm(q), *rotary)
        k = rotate(self.key_layernorm(k), *rotary)

        q = q.reshape(batch, tokens, kv_heads, heads // kv_heads, c.head_dim)
        cached_mask, own_mask = masks
        cached_keys, cached_values = cached
        window = cached_keys.shape[1]
        cached_scores = _scores(q, cached_keys, cached_mask[:, None, None, None, :])
        own_scores = _scores(q, k, own_mask[:, None, None, :, :])
        p = jax.nn.softmax(jnp.concatenate([cached_scores, own_scores], axis=-1), axis=-1)
        p = rounded(p, x.dtype)
        y = product("bkgtn,bnkd->btkgd", p[..., :window], cached_values)
        y = y + product("bkgtn,bnkd->btkgd", p[..., window:], v)
        y = rounded(y, x.dtype).reshape(batch, tokens, heads * c.head_dim)
        return self.dense(y), k, v


def _scores(q: Array, k: Array, visible: Array) -> Array:
    """Scaled, masked scores ``[B, KV, G, T, N]`` in float32, rounded as eager attention rounds them."""
    s = rounded(product("btkgd,bnkd->bkgtn", q, k), q.dtype).astype(jnp.float32)
    s = rounded(s * q.shape[-1] ** -0.5, q.dtype).astype(jnp.float32)
    return jnp.where(visible, s, MASKED)
