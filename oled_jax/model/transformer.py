"""LLaDA2.x: the block-diffusion mixture-of-experts decoder, as Flax modules.

One forward predicts, for every position it is given, the token *at that same position* (no shift). It attends to the
committed rows of a cache and, block-causally on the absolute grid, to its own tokens; with an empty cache it is the
plain full forward. The same code serves prefill (several blocks) and denoising (one block).

The routed experts are not parameters of this module: they belong to the expert runner (``oled_jax.model.experts``),
so that their placement can change without the model knowing. Layers are unrolled, not scanned, for the same reason
(a scan would copy expert slots). Training-time dropout is not implemented: the released models carry none.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from oled_jax.config import ModelConfig
from oled_jax.model.attention import Attention
from oled_jax.model.experts import ExpertRunner, LayerTelemetry
from oled_jax.model.kv_cache import KVCache
from oled_jax.model.layers import INIT_STDDEV, GatedMLP, Linear, RMSNorm, rotary_table
from oled_jax.model.numerics import Array, add
from oled_jax.model.router import Router
from oled_jax.retention.record import Routing


@dataclasses.dataclass
class Experts:
    """The runner with its arrays, for the length of one forward; ``state`` is replaced layer by layer.

    ``confidence [B, T]`` float and ``status [B, T]`` int: what is known of the tokens before this forward's sampling
    (``oled_jax.retention.Routing``). The model passes them on and uses neither.
    """

    runner: ExpertRunner
    store: Any
    state: Any
    confidence: Array
    status: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Forward:
    """Result of one forward. Whatever a caller leaves unused, the compiler removes.

    ``hidden [B, T, H]`` after the final norm; ``keys`` and ``values`` of the tokens, ``[L, B, T, KV, D]``;
    ``states`` the residual stream before each layer (L arrays); ``records`` what each MoE layer did, in order.
    """

    hidden: Array
    keys: Array
    values: Array
    states: list[Array]
    records: list[LayerTelemetry]


class Embedding(nnx.Module):
    """Token table ``weight [V, H]``."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        init = nnx.initializers.normal(INIT_STDDEV)
        self.weight = nnx.Param(init(rngs.params(), (config.vocab_size, config.hidden_size), dtype))

    def __call__(self, tokens: Array) -> Array:
        return jnp.take(self.weight[...], tokens, axis=0)


class MoE(nnx.Module):
    """Router, shared expert, and the call across the seam to the routed experts."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.gate = Router(config, dtype=dtype, rngs=rngs)
        width = config.moe_intermediate_size * config.num_shared_experts
        self.shared_experts = GatedMLP(config.hidden_size, width, dtype=dtype, rngs=rngs) if width else None
        self.scale = config.routed_scaling_factor

    def __call__(
        self, x: Array, tokens: Array, valid: Array, layer: int, experts: Experts
    ) -> tuple[Array, LayerTelemetry]:
        batch, length, hidden = x.shape
        with jax.named_scope("router"):
            ids, weights = self.gate(x, valid)
        with jax.named_scope("experts"):
            row = jnp.where(valid, jnp.arange(batch, dtype=jnp.int32)[:, None], -1)
            chosen = (a.reshape(batch * length, -1) for a in (ids, weights))
            known = (a.reshape(-1) for a in (row, experts.confidence, experts.status, tokens))
            run = (experts.store, experts.state, layer, x.reshape(-1, hidden), Routing(*chosen, *known), self.scale)
            y, experts.state, telemetry = experts.runner.run(*run)
            y = y.reshape(batch, length, hidden)
        if self.shared_experts is not None:
            with jax.named_scope("shared_experts"):
                y = add(y, self.shared_experts(x))
        return y, telemetry


class Layer(nnx.Module):
    """Attention and feed-forward part, each behind a norm, on a residual stream in the model's dtype."""

    def __init__(self, config: ModelConfig, index: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        c = config
        self.input_layernorm = RMSNorm(c.hidden_size, eps=c.rms_norm_eps, dtype=dtype)
        self.attention = Attention(c, dtype=dtype, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, eps=c.rms_norm_eps, dtype=dtype)
        if index < c.first_k_dense_replace:
            self.mlp = GatedMLP(c.hidden_size, c.intermediate_size, dtype=dtype, rngs=rngs)
        else:
            self.mlp = MoE(c, dtype=dtype, rngs=rngs)
        self.index = index

    def __call__(
        self, h: Array, rotary, cached, masks, tokens: Array, valid: Array, experts: Experts
    ) -> tuple[Array, Array, Array, LayerTelemetry | None]:
        with jax.named_scope("attention"):
            attended, keys, values = self.attention(self.input_layernorm(h), rotary, cached, masks)
            h = add(h, attended)
        x = self.post_attention_layernorm(h)
        if isinstance(self.mlp, MoE):
            y, record = self.mlp(x, tokens, valid, self.index, experts)
        else:
            y, record = self.mlp(x), None
        return add(h, y), keys, values, record


class LLaDA2(nnx.Module):
    """The whole model but for its routed experts. ``dtype``: bfloat16 or float32, of all weights and activations."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype = jnp.bfloat16, rngs: nnx.Rngs):
        self.word_embeddings = Embedding(config, dtype=dtype, rngs=rngs)
        self.layers = nnx.List([Layer(config, i, dtype=dtype, rngs=rngs) for i in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, dtype=dtype, rngs=rngs)
        self.config = config
        self.dtype = dtype

    @classmethod
    def abstract(cls, config: ModelConfig, dtype: jnp.dtype) -> "LLaDA2":
        """The model with shapes in place of arrays: no memory, no initialisation."""
        return nnx.eval_shape(lambda: cls(config, dtype=dtype, rngs=nnx.Rngs(0)))

    def __call__(
        self,
        tokens: Array,
        start: Array,
        valid: Array,
        cache: KVCache,
        experts: Experts,
        *,
        block_length: int,
        window: int,
    ) -> Forward:
        """Runs ``tokens [B, T]`` int32 at positions ``start[b] ..`` against the committed rows before ``start``.

        ``valid [B, T]`` marks the tokens that count: others are seen by no query and route nowhere. ``window``
        (static) is how many cache rows are looked at; it must reach ``max(start)``. ``start`` must
        lie on the block grid (and, with block routing, on the window grid).
        """
        positions = start[:, None] + jnp.arange(tokens.shape[1])
        rotary = rotary_table(positions, self.config.rotary_dim, self.config.rope_theta, self.dtype)
        block = positions // block_length
        own_mask = (block[:, :, None] >= block[:, None, :]) & valid[:, None, :]
        cached_mask = jnp.arange(window) < start[:, None]
        h = self.word_embeddings(tokens)
        states, records, keys, values = [], [], [], []
        for index, layer in enumerate(self.layers):
            states.append(h)
            cached = (cache.keys[index, :, :window], cache.values[index, :, :window])
            h, k, v, record = layer(h, rotary, cached, (cached_mask, own_mask), tokens, valid, experts)
            keys.append(k)
            values.append(v)
            if record is not None:
                records.append(record)
        return Forward(self.norm(h), jnp.stack(keys), jnp.stack(values), states, records)

    def head(self, hidden: Array) -> Array:
        """Logits ``[..., V]`` float32 of ``hidden [..., H]``, each a value of the model's dtype (ties are common)."""
        with jax.named_scope("lm_head"):
            return self.lm_head(hidden).astype(jnp.float32)
