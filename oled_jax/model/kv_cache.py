"""Keys and values of committed blocks: one pair of arrays for all layers.

A forward reads the rows before ``start``, which are committed, and returns the keys and values of its own tokens beside
them. Those are written when the block is committed, which is right exactly when the forward's input was the block's
final tokens; the decoding loop sees to that.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from oled_jax.config import ModelConfig
from oled_jax.model.numerics import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """``keys`` and ``values``, each ``[L, B, N, KV, D]`` in the model's dtype; N positions."""

    keys: Array
    values: Array

    @classmethod
    def zeros(cls, config: ModelConfig, batch: int, length: int, dtype: jnp.dtype) -> "KVCache":
        """An empty cache for ``batch`` sequences of up to ``length`` positions."""
        shape = (config.num_hidden_layers, batch, length, config.num_key_value_heads, config.head_dim)
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    def write(self, keys: Array, values: Array, start: Array, valid: Array) -> "KVCache":
        """Writes ``keys``, ``values`` ``[L, B, T, KV, D]`` at rows ``start[b]``, only where ``valid [B, T]``.

        One in-place update per sequence; the caller guarantees ``start + T <= N`` (an update past the end would be
        shifted back silently by XLA).
        """
        return KVCache(
            _write_rows(self.keys, keys, start, valid),
            _write_rows(self.values, values, start, valid),
        )


def _write_rows(cache: Array, new: Array, start: Array, valid: Array) -> Array:
    layers, batch, tokens = new.shape[:3]
    for b in range(batch):
        origin = (0, b, start[b], 0, 0)
        size = (layers, 1, tokens, *cache.shape[3:])
        old = lax.dynamic_slice(cache, origin, size)
        rows = jnp.where(valid[b][None, None, :, None, None], new[:, b : b + 1], old)
        cache = lax.dynamic_update_slice(cache, rows, origin)
    return cache
