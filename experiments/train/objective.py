"""What training minimises: cross entropy of masked tokens at their own positions.

Each block draws a mask ratio; each of its answer tokens is masked with that probability, prompts never. A masked token
counts with weight 1 / ratio, so that a block's weight does not depend on its ratio and the sum is a bound of the
likelihood (as in masked diffusion models generally; LLaDA, arXiv 2502.09992).

Threshold decoding commits what is confident, so late in training the entropy of the predictions that are right already
is added with a small weight (LLaDA2.0's confidence-aware training, arXiv 2512.15745): several tokens of a block then
pass the threshold at once. Wrong predictions are left alone.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from forward import Rows, Weights, forward, head
from jax import lax
from presets import BLOCK, Preset, Recipe

from oled_jax.config import ModelConfig
from oled_jax.model.numerics import Array

CONFIDENT = 0.9  # the threshold that the models are decoded with


class Sums(NamedTuple):
    """What a batch adds up to, float32; rates are quotients of sums, over any number of batches.

    ``loss`` (what is minimised) and ``batches``; by kind of example, ``[kinds]``: ``masked`` tokens (the end-of-text
    fill left out), of these ``correct``, ``confident`` (a probability above ``CONFIDENT``) and ``both``; ``load [L,
    E]``; ``dropped``: share of (token, expert) pairs without room; ``gradient``: the gradient's norm.
    """

    loss: Array
    batches: Array
    masked: Array
    correct: Array
    confident: Array
    both: Array
    load: Array
    dropped: Array
    gradient: Array


def noise(key: Array, tokens: Array, answer: Array, recipe: Recipe, mask_id: int) -> tuple[Array, Array, Array]:
    """Masks some of ``tokens [B, T]``: ``(noised [B, T], masked [B, T] bool, weight [B, T] float32)``."""
    batch, length = tokens.shape
    ratios, draws = jax.random.split(key)
    ratio = jax.random.uniform(ratios, (batch, length // BLOCK), minval=recipe.noise[0], maxval=recipe.noise[1])
    ratio = jnp.repeat(ratio, BLOCK, axis=1)
    masked = answer & (jax.random.uniform(draws, (batch, length)) < ratio)
    return jnp.where(masked, mask_id, tokens), masked, 1.0 / ratio


def no_sums(config: ModelConfig, kinds: int) -> Sums:
    """Nothing added up yet, as numpy arrays."""
    zero = np.zeros((), np.float32)
    counts = [np.zeros(kinds, np.float32) for _ in range(4)]
    return Sums(zero, zero, *counts, np.zeros((len(config.moe_layers), config.num_experts), np.float32), zero, zero)


def objective(
    preset: Preset, weights: Weights, bias: Array, batch, key: Array, sharpening: Array, kinds: int
) -> tuple[Array, Sums]:
    """Loss of a ``Batch`` under the noise of ``key``, float32 ``[]``, and its sums; ``sharpening`` weighs the entropy.

    The loss is per answer token, masked or not.
    """
    config, recipe = preset.config, preset.recipe
    tokens = batch.tokens
    noised, masked, weight = noise(key, tokens, batch.answer, recipe, config.mask_token_id)
    result = forward(config, recipe, weights, bias, tokens, noised, Rows(batch.segment, batch.position))
    logits = head(weights, result.noised)
    with jax.named_scope("loss"):
        log_p = jax.nn.log_softmax(logits, axis=-1)
        # Compared, not gathered: the gradient of a gather is a scatter.
        log_likelihood = jnp.sum(jnp.where(tokens[..., None] == jnp.arange(config.vocab_size), log_p, 0.0), axis=-1)
        correct = jnp.argmax(logits, axis=-1) == tokens
        entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
        each = -log_likelihood + sharpening * jnp.where(correct, entropy, 0.0)
        answers = jnp.maximum(jnp.sum(batch.answer), 1)
        loss = jnp.sum(jnp.where(masked, weight * each, 0.0)) / answers
    confident = jnp.max(log_p, axis=-1) > jnp.log(CONFIDENT)
    counted = masked & (tokens != config.eos_token_id)
    by_kind = [
        jnp.sum((counted & also)[..., None] & (batch.kind[..., None] == jnp.arange(kinds)), axis=(0, 1))
        for also in (jnp.ones_like(correct), correct, confident, correct & confident)
    ]
    by_kind = [count.astype(jnp.float32) for count in by_kind]
    sums = Sums(loss, jnp.float32(1), *by_kind, result.load, jnp.mean(result.dropped), jnp.float32(0))
    return loss, lax.stop_gradient(sums)
