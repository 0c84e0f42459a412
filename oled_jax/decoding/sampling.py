"""From logits to one candidate token and its confidence per position.

Greedy is greedy: the largest logit, lowest id on ties, with its float32 softmax probability over the whole vocabulary.
(The published 2.0 code samples at temperature 0; that is a defect we do not reproduce)
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from oled_jax.model.numerics import Array


class Sampler(NamedTuple):
    """Traced sampling parameters: ``temperature`` > 0, ``top_k`` >= 1 (off: the vocabulary), ``top_p`` (off: 1)."""

    temperature: Array
    top_k: Array
    top_p: Array


def exclude(logits: Array, token: Array) -> Array:
    """``logits [..., V]`` with ``token`` (a scalar id) impossible."""
    return jnp.where(jnp.arange(logits.shape[-1]) == token, -jnp.inf, logits)


def greedy(logits: Array) -> tuple[Array, Array]:
    """Best token and its probability, ``[T]`` int32 and float32, of ``logits [T, V]``."""
    best = jnp.max(logits, axis=-1, keepdims=True)
    confidence = 1.0 / jnp.sum(jnp.exp(logits - best), axis=-1)
    return jnp.argmax(logits, axis=-1).astype(jnp.int32), confidence


def sample(logits: Array, sampler: Sampler, key: Array) -> tuple[Array, Array]:
    """A drawn token ``[T]`` and its probability under the filtered distribution, of ``logits [T, V]``.

    Logits are divided by the temperature, cut to the ``top_k`` largest (ties at the edge stay), then to the smallest
    set whose mass exceeds ``top_p``, the crossing token included.
    """
    scaled = logits / sampler.temperature
    descending = jnp.sort(scaled, axis=-1, descending=True)
    edge = jnp.take(descending, sampler.top_k - 1, axis=-1)[..., None]
    descending = jnp.where(descending < edge, -jnp.inf, descending)
    mass_before = jnp.cumsum(jax.nn.softmax(descending, axis=-1), axis=-1) - jax.nn.softmax(descending, axis=-1)
    kept = jnp.where(mass_before <= sampler.top_p, descending, jnp.inf)
    edge = jnp.maximum(edge, jnp.min(kept, axis=-1, keepdims=True))
    filtered = jnp.where(scaled < edge, -jnp.inf, scaled)
    drawn = jax.random.categorical(key, filtered, axis=-1).astype(jnp.int32)
    return drawn, probability(filtered, drawn)


def probability(logits: Array, tokens: Array) -> Array:
    """Softmax probability ``[T]`` of ``tokens [T]`` under ``logits [T, V]``."""
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    return jnp.exp(chosen - jax.nn.logsumexp(logits, axis=-1))


def top_positions(confidence: Array, among: Array, count: Array) -> Array:
    """Mask ``[T]`` of the ``count`` most confident positions ``among [T]``; the lowest index first on ties."""
    order = jnp.argsort(jnp.where(among, -confidence, jnp.inf), stable=True)
    rank = jnp.argsort(order, stable=True)
    return among & (rank < count)
