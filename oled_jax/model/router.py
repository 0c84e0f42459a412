"""Which experts a token goes to, and with what weight; float32 throughout.

Two rules: LLaDA2.0 and 2.1 limit each token to the best groups of experts, LLaDA2.2 limits
each absolute window of ``block_size`` tokens to its ``expert_capacity`` best experts. The bias takes part in selection
only; weights come from the unbiased scores, normalised (and scaled where they are used).
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from oled_jax.config import ModelConfig
from oled_jax.model.layers import INIT_STDDEV
from oled_jax.model.numerics import Array, product


class ExpertBias(nnx.Variable):
    """Selection bias ``[E]`` float32: set by load balancing, not by gradients, hence no ``nnx.Param``."""


class Router(nnx.Module):
    """Scores experts and selects ``num_experts_per_tok`` of them for each token."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        init = nnx.initializers.normal(INIT_STDDEV)
        self.weight = nnx.Param(init(rngs.params(), (config.num_experts, config.hidden_size), dtype))
        self.expert_bias = ExpertBias(jnp.zeros((config.num_experts,), jnp.float32))
        self.config = config

    def __call__(self, x: Array, valid: Array) -> tuple[Array, Array]:
        """Routes ``x [B, T, H]`` to ``ids [B, T, K]`` int32 (-1 where not ``valid [B, T]``) and ``weights`` float32.

        A token's weights sum to 1; what scales them is the caller's affair. The order is that of descending biased
        score. With block routing, token 0 of each sequence must be the first of a window, and T a multiple of
        ``block_size``; tokens that are not valid have no say in a window's experts.
        """
        c = self.config
        scores = jax.nn.sigmoid(product("bth,eh->bte", x, self.weight[...]))
        biased = scores + self.expert_bias[...]
        if c.block_routing:
            biased = limit_to_window(biased, valid, c.block_size, c.expert_capacity)
        else:
            biased = limit_to_groups(biased, c.n_group, c.topk_group)
        _, ids = lax.top_k(biased, c.num_experts_per_tok)
        weights = jnp.take_along_axis(scores, ids, axis=-1)
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
        return jnp.where(valid[..., None], ids, -1), jnp.where(valid[..., None], weights, 0.0)


def limit_to_groups(biased: Array, groups: int, kept: int) -> Array:
    """-inf outside the ``kept`` best of ``groups`` runs of consecutive experts; a group scores its top two's sum."""
    grouped = biased.reshape(*biased.shape[:-1], groups, -1)
    group_score = jnp.sum(lax.top_k(grouped, 2)[0], axis=-1)
    _, best = lax.top_k(group_score, kept)
    keep = jnp.any(best[..., None] == jnp.arange(groups), axis=-2)
    return jnp.where(keep[..., None], grouped, -jnp.inf).reshape(biased.shape)


def limit_to_window(biased: Array, valid: Array, window: int, capacity: int) -> Array:
    """-inf outside the ``capacity`` experts whose best score among the valid tokens of each window is largest."""
    batch, tokens, experts = biased.shape
    windows = biased.reshape(batch, tokens // window, window, experts)
    counted = jnp.where(valid.reshape(batch, tokens // window, window, 1), windows, -jnp.inf)
    _, best = lax.top_k(jnp.max(counted, axis=2), capacity)
    keep = jnp.any(best[..., None] == jnp.arange(experts), axis=-2)
    return jnp.where(keep[:, :, None, :], windows, -jnp.inf).reshape(biased.shape)
