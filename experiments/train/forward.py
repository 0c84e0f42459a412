"""LLaDA2's forward for training: clean and noised tokens in one pass, over the engine's parameters.

A row is run twice side by side, as it is and with some tokens masked, both at the same positions. The mask has three
parts: clean tokens attend block-causally to clean ones; a noised block attends to the clean blocks before it and to
itself. So one pass gives, for every block at once, what denoising that block after its clean context gives. Keys are
therefore the clean tokens and, for a noised token, those of its own block; nothing else is ever computed.

Promises: the parameters are the engine's arrays under the engine's names (``oled_jax.checkpoint.layout``), and in
float32 the hidden states are those of ``oled_jax.model`` (tested). Products come out in the operands' dtype, so that
the backward pass multiplies bfloat16 by bfloat16: with float32 outputs, as inference has them, it would multiply
float32 cotangents.

Deliberately not here: a KV cache, LLaDA2.2's routing by windows, biases of linear maps, dropout.
"""

import functools
from typing import NamedTuple

import expert_products
import jax
import jax.numpy as jnp
from expert_products import precision_of
from jax import lax
from presets import BLOCK, Recipe
from routing import Choice, route, slots_per_expert

from oled_jax.checkpoint import layout
from oled_jax.config import ModelConfig
from oled_jax.errors import OledError
from oled_jax.model.attention import MASKED
from oled_jax.model.layers import rotary_table, rotate
from oled_jax.model.numerics import Array, swiglu

# Arrays by their names in the engine, expert_bias apart.
Weights = dict[str, Array]


class Rows(NamedTuple):
    """Where tokens stand, int32 ``[B, T]``: ``segment`` (0 is padding) and ``position`` within it.

    Segments start and end on multiples of the block length, so that a row's own blocks are the segments' blocks.
    """

    segment: Array
    position: Array


class Result(NamedTuple):
    """``clean``, ``noised [B, T, H]``: hidden states after the final norm; ``load [L, E]`` float32: tokens per expert
    of each MoE layer, both halves together, padding not counted; ``dropped [L]``: share of pairs without room."""

    clean: Array
    noised: Array
    load: Array
    dropped: Array


def check_config(config: ModelConfig) -> None:
    """Raises OledError for what this forward does not implement."""
    if config.block_routing:
        raise OledError("expert_capacity is set: training routes by groups of experts only")
    if config.use_bias or config.use_qkv_bias:
        raise OledError("use_bias or use_qkv_bias is set: training has no biases of linear maps")


def forward(
    config: ModelConfig, recipe: Recipe, weights: Weights, bias: Array, clean: Array, noised: Array, rows: Rows
) -> Result:
    """Runs ``clean`` and ``noised`` tokens, int32 ``[B, T]``; ``weights`` in the dtype to compute in, ``bias [L, E]``
    float32 of the MoE layers' routers."""
    c = config
    length = clean.shape[1]
    table = weights[layout.EMBEDDING]
    rotary = rotary_table(rows.position, c.rotary_dim, c.rope_theta, table.dtype)
    rotary = jax.tree.map(lambda a: jnp.concatenate([a, a], axis=1), rotary)
    visible = visible_clean(rows)
    counted = jnp.tile(rows.segment > 0, (1, 2)).reshape(-1)
    with jax.named_scope("embedding"):
        h = embed(table, jnp.concatenate([clean, noised], axis=1), recipe.embedding)
    load, dropped = [], []
    for index in range(c.num_hidden_layers):
        own = _Layer(weights, f"layers.{index}")
        with jax.named_scope("attention"):
            x = norm(h, own["input_layernorm.weight"], c.rms_norm_eps)
            h = h + attention(c, own, x, rotary, visible)
        x = norm(h, own["post_attention_layernorm.weight"], c.rms_norm_eps)
        if index < c.first_k_dense_replace:
            with jax.named_scope("dense_mlp"):
                h = h + gated(own, "mlp", x)
            continue
        flat = x.reshape(-1, c.hidden_size)
        with jax.named_scope("router"):
            choice = route(c, flat, own["mlp.gate.weight"], bias[len(load)])
            load.append(jnp.sum(choice.chosen & counted[:, None], axis=0, dtype=jnp.float32))
        with jax.named_scope("experts"):
            y, lost = experts(c, recipe, own, flat, choice)
            dropped.append(lost)
            y = y.reshape(h.shape)
        if c.num_shared_experts:
            with jax.named_scope("shared_experts"):
                y = y + gated(own, "mlp.shared_experts", x)
        h = h + y
    h = norm(h, weights["norm.weight"], c.rms_norm_eps)
    return Result(h[:, :length], h[:, length:], jnp.stack(load), jnp.stack(dropped))


def head(weights: Weights, hidden: Array) -> Array:
    """Logits ``[..., V]`` in float32, each a value of the compute dtype."""
    with jax.named_scope("lm_head"):
        return linear(hidden, weights[layout.LM_HEAD]).astype(jnp.float32)


class _Layer:
    """The weights of one layer, by the rest of their names."""

    def __init__(self, weights: Weights, prefix: str):
        self._weights, self._prefix = weights, prefix

    def __getitem__(self, name: str) -> Array:
        return self._weights[f"{self._prefix}.{name}"]


def linear(x: Array, weight: Array) -> Array:
    """``x [..., in]`` times ``weight [out, in]`` transposed, in ``x``'s dtype."""
    return jnp.einsum("...i,oi->...o", x, weight, precision=precision_of(x.dtype))


def embed(table: Array, tokens: Array, way: str) -> Array:
    """Rows of ``table [V, H]``; in the way "matmul", its gradient is a product with one-hot rows.

    The same token stands thousands of times in a batch (the mask, the end of a text), and a scatter adds those one
    after the other.
    """
    if way == "scatter":
        return jnp.take(table, tokens, axis=0)
    one_hot = (tokens[..., None] == jnp.arange(len(table))).astype(table.dtype)
    return jnp.einsum("btv,vh->bth", one_hot, table, precision=precision_of(table.dtype))


@functools.partial(jax.checkpoint, static_argnums=2)
def norm(x: Array, weight: Array, eps: float) -> Array:
    """RMSNorm over the last axis, computed in float32 and again in the backward pass."""
    x32 = x.astype(jnp.float32)
    normed = x32 * lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (normed.astype(x.dtype).astype(jnp.float32) * weight.astype(jnp.float32)).astype(x.dtype)


def gated(own: _Layer, name: str, x: Array) -> Array:
    """SwiGLU: the dense layers' and the shared experts' form."""
    gate, up = linear(x, own[f"{name}.gate_proj.weight"]), linear(x, own[f"{name}.up_proj.weight"])
    return linear(jax.checkpoint(swiglu)(gate, up), own[f"{name}.down_proj.weight"])


def experts(c: ModelConfig, recipe: Recipe, own: _Layer, x: Array, choice: Choice) -> tuple[Array, Array]:
    """The routed experts of one layer over ``x [N, H]``, as the recipe wants them computed: ``(y, dropped share)``."""
    weights = own["mlp.experts.gate_up"], own["mlp.experts.down"]
    gates = choice.gates * c.routed_scaling_factor
    if recipe.experts == "dense":
        return expert_products.dense(x, gates, *weights), jnp.zeros(())
    return expert_products.gathered(x, choice.ids, gates, *weights, slots_per_expert(len(x), c, recipe.capacity))


def visible_clean(rows: Rows) -> Array:
    """Which clean keys each query sees, bool ``[B, 2T, T]``: first the clean queries, then the noised ones."""
    block = rows.position // BLOCK
    together = rows.segment[:, :, None] == rows.segment[:, None, :]
    upto = together & (block[:, :, None] >= block[:, None, :])
    before = together & (block[:, :, None] > block[:, None, :])
    return jnp.concatenate([upto, before], axis=1)


def attention(c: ModelConfig, own: _Layer, x: Array, rotary: tuple[Array, Array], visible: Array) -> Array:
    """Attends ``x [B, 2T, H]``, clean then noised, under the three-part mask."""
    batch, both, _ = x.shape
    length, blocks = both // 2, both // 2 // BLOCK
    heads, kv_heads, precision = c.num_attention_heads, c.num_key_value_heads, precision_of(x.dtype)
    qkv = linear(x, own["attention.query_key_value.weight"])
    qkv = qkv.reshape(batch, both, heads + 2 * kv_heads, c.head_dim)
    q, k, v = jnp.split(qkv, [heads, heads + kv_heads], axis=2)
    q = rotate(norm(q, own["attention.query_layernorm.weight"], c.rms_norm_eps), *rotary)
    k = rotate(norm(k, own["attention.key_layernorm.weight"], c.rms_norm_eps), *rotary)
    q = (q * c.head_dim**-0.5).reshape(batch, both, kv_heads, heads // kv_heads, c.head_dim)

    # Scores are [b, k, t, g, n], the order in which a batched product leaves them; nothing large is transposed.
    scores = jnp.einsum("btkgd,bnkd->bktgn", q, k[:, :length], precision=precision)
    seen = visible[:, None, :, None, :]
    clean = _softmax(scores[:, :, :length], seen[:, :, :length])
    y_clean = jnp.einsum("bktgn,bnkd->btkgd", clean, v[:, :length], precision=precision)

    own_q, own_k, own_v = (a[:, length:].reshape(batch, blocks, BLOCK, *a.shape[2:]) for a in (q, k, v))
    own_scores = jnp.einsum("bstkgd,bsnkd->bkstgn", own_q, own_k, precision=precision)
    own_scores = own_scores.reshape(batch, kv_heads, length, -1, BLOCK)
    seen = jnp.concatenate([seen[:, :, length:], jnp.ones((batch, 1, length, 1, BLOCK), bool)], axis=-1)
    noised = _softmax(jnp.concatenate([scores[:, :, length:], own_scores], axis=-1), seen)
    y_noised = jnp.einsum("bktgn,bnkd->btkgd", noised[..., :length], v[:, :length], precision=precision)
    of_own = noised[..., length:].reshape(batch, kv_heads, blocks, BLOCK, -1, BLOCK)
    y_own = jnp.einsum("bkstgn,bsnkd->bstkgd", of_own, own_v, precision=precision)
    y = jnp.concatenate([y_clean, y_noised + y_own.reshape(y_noised.shape)], axis=1)
    return linear(y.reshape(batch, both, heads * c.head_dim), own["attention.dense.weight"])


@jax.checkpoint
def _softmax(scores: Array, visible: Array) -> Array:
    """Probabilities over the visible keys, in float32 and rounded once; recomputed in the backward pass."""
    return jax.nn.softmax(jnp.where(visible, scores.astype(jnp.float32), MASKED), axis=-1).astype(scores.dtype)
