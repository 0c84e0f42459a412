"""The router as training needs it: the engine's rule, without sorting, and the balancing of its load.

Promises: the same experts and weights as ``oled_jax.model.router.Router``; gradients through the weights of the chosen
experts only. Selection is by repeated maxima: a general top-k of 256 values becomes a sort on a GPU, and eight maxima
are a few fused passes.

Balancing knows no auxiliary loss: an expert's selection bias rises by a fixed step while it gets fewer tokens than the
mean, and falls while it gets more (Wang et al. 2024, arXiv 2408.15664, as the family does it).

Deliberately not here: LLaDA2.2's routing by windows.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from oled_jax.config import ModelConfig
from oled_jax.model.numerics import Array

DEAD_SHARE = 0.1  # of an even share: an expert with less is called dead


class Choice(NamedTuple):
    """Experts per token: ``ids [N, K]`` int32, the same as a mask, ``chosen [N, E]``, and ``gates [N, E]`` float32."""

    ids: Array
    chosen: Array
    gates: Array


def route(config: ModelConfig, x: Array, weight: Array, bias: Array) -> Choice:
    """Routes ``x [N, H]`` with ``weight [E, H]`` and ``bias [E]``.

    ``gates`` are the weights of the chosen experts, which sum to 1, and 0 elsewhere. Operands are used in float32 as
    they are: of bfloat16 values every product is then exact, as in the engine.
    """
    c = config
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    logits = jnp.einsum("nh,eh->ne", x.astype(jnp.float32), weight.astype(jnp.float32), precision=precision)
    scores = jax.nn.sigmoid(logits)
    ids, chosen = select(lax.stop_gradient(scores) + bias, c.num_experts_per_tok, c.n_group, c.topk_group)
    gates = jnp.where(chosen, scores, 0.0)
    return Choice(ids, chosen, gates / (jnp.sum(gates, axis=-1, keepdims=True) + 1e-20))


def select(biased: Array, count: int, groups: int, kept: int) -> tuple[Array, Array]:
    """``count`` best of ``biased [..., E]`` in the ``kept`` best of ``groups`` groups, as ``largest`` (spec 3.1)."""
    grouped = biased.reshape(*biased.shape[:-1], groups, -1)
    _, best_two = largest(grouped, 2)
    _, keep = largest(jnp.sum(jnp.where(best_two, grouped, 0.0), axis=-1), kept)
    return largest(jnp.where(keep[..., None], grouped, -jnp.inf).reshape(biased.shape), count)


def largest(values: Array, count: int) -> tuple[Array, Array]:
    """Indices ``[..., count]`` int32 of the largest along the last axis, descending, the lower first among equals; and
    the same as a mask. The largest must not be -inf."""
    index = jnp.arange(values.shape[-1])
    chosen = jnp.zeros(values.shape, bool)
    ids = []
    for _ in range(count):
        ids.append(jnp.argmax(jnp.where(chosen, -jnp.inf, values), axis=-1))
        chosen = chosen | (index == ids[-1][..., None])
    return jnp.stack(ids, axis=-1), chosen


def balanced(bias: Array, load: Array, step: Array) -> Array:
    """``bias [L, E]`` moved by ``step`` towards an even load; ``load [L, E]``: tokens that each expert got."""
    return bias + step * jnp.sign(jnp.mean(load, axis=-1, keepdims=True) - load)


def load_report(load: np.ndarray) -> dict[str, list]:
    """What ``load [L, E]`` (tokens per expert) says, per layer, in units of an even share of the tokens.

    ``min``, ``max``: of any expert; ``cv``: standard deviation over mean; ``dead``: experts below ``DEAD_SHARE``.
    """
    share = load / np.maximum(load.mean(axis=1, keepdims=True), 1e-9)
    return {
        "min": [round(float(v), 3) for v in share.min(axis=1)],
        "max": [round(float(v), 3) for v in share.max(axis=1)],
        "cv": [round(float(v), 3) for v in share.std(axis=1)],
        "dead": [int(v) for v in (share < DEAD_SHARE).sum(axis=1)],
    }


def slots_per_expert(tokens: int, config: ModelConfig, capacity: float) -> int:
    """Rows that a gathered dispatch of ``tokens`` tokens has for each expert: a multiple of 8."""
    even = tokens * config.num_experts_per_tok / config.num_experts
    return min(tokens, 8 * math.ceil(capacity * even / 8))
