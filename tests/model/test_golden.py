"""The model against what the reference computed, at the tolerances of tests/golden/README.md."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oled_jax.checkpoint import open_checkpoint
from oled_jax.loading import load_weights
from oled_jax.model.kv_cache import KVCache
from tests.golden_fixtures import BFLOAT16, FLOAT32, GOLDEN, forward, resident_seam


@pytest.fixture(scope="module", params=(*FLOAT32, BFLOAT16))
def run(request):
    """One forward of a fixture: (name, config, fixture arrays, our logits, our Forward)."""
    name = request.param
    fixture = forward(name)
    with open_checkpoint(GOLDEN / name) as checkpoint:
        model, experts = load_weights(checkpoint, checkpoint.weight_dtype)
    config, tokens = model.config, jnp.asarray(fixture["input_ids"], jnp.int32)

    def compute(model, experts, tokens):
        batch, length = tokens.shape
        cache = KVCache.zeros(config, batch, length, model.dtype)
        start, valid = jnp.zeros(batch, jnp.int32), jnp.ones((batch, length), bool)
        seam = resident_seam(experts, tokens)
        out = model(tokens, start, valid, cache, seam, block_length=int(fixture["block_length"]), window=0)
        return model.head(out.hidden), out

    logits, out = jax.jit(compute)(model, experts, tokens)
    return name, config, fixture, np.asarray(logits), out


def test_logits(run):
    name, _, fixture, logits, _ = run
    difference = np.abs(logits - fixture["logits"])
    if name != BFLOAT16:
        assert difference.max() <= 5e-4
        return
    assert difference.mean() <= 0.13
    assert np.mean(logits.argmax(-1) == fixture["logits"].argmax(-1)) >= 0.96


def test_hidden_states_and_router(run):
    name, config, fixture, _, out = run
    if name == BFLOAT16:
        pytest.skip("a rounding may move a token to another expert: the README bounds bfloat16 at the logits")
    for index, state in enumerate([*out.states, out.hidden]):
        np.testing.assert_allclose(np.asarray(state), fixture[f"hidden_{index}"], atol=5e-4, rtol=0)
    for layer, record in zip(config.moe_layers, out.records, strict=True):
        ids = np.asarray(record.ids).reshape(-1, config.num_experts_per_tok)
        weights = np.asarray(record.weights).reshape(ids.shape) * config.routed_scaling_factor
        order = np.argsort(ids, axis=-1)
        np.testing.assert_array_equal(np.take_along_axis(ids, order, -1), fixture[f"router_idx_{layer}"])
        expected = fixture[f"router_weight_{layer}"]
        np.testing.assert_allclose(np.take_along_axis(weights, order, -1), expected, atol=1e-5, rtol=0)


def test_bfloat16_logits_are_rounded_under_jit(run):
    """Spec 3.2, 3.3: every logit is a bfloat16 value, though XLA would rather keep the wider product."""
    name, _, _, logits, _ = run
    if name != BFLOAT16:
        pytest.skip("float32 rounds nothing")
    np.testing.assert_array_equal(logits, logits.astype(jnp.bfloat16).astype(np.float32))


def test_bfloat16_first_layer_is_exact_but_for_the_fixture_s_own_rotary_rounding(run, monkeypatch):
    """The fixture's model had been cast as a whole, its inverse frequencies included (loaded through Hugging Face they
    stay float32, and so do ours). With that rounding put in, 99 % of the first layer's outputs are equal to the bit;
    without, under 70 % are. It shows that every other rounding point is where the reference has it."""
    name, config, fixture, _, out = run
    if name != BFLOAT16:
        pytest.skip("about bfloat16")
    import oled_jax.model.transformer as transformer
    from oled_jax.model.numerics import rounded

    def cast_table(positions, rotary_dim, theta, dtype):
        inverse = theta ** (-np.arange(0, rotary_dim, 2, dtype=np.float32) / rotary_dim)
        angles = positions[..., None] * rounded(jnp.asarray(inverse, jnp.float32), dtype).astype(jnp.float32)
        angles = jnp.concatenate([angles, angles], axis=-1)
        return rounded(jnp.cos(angles), dtype), rounded(jnp.sin(angles), dtype)

    def first_layer_equal(out):
        return np.mean(np.asarray(out.states[1], np.float32) == fixture["hidden_1"])

    assert first_layer_equal(out) < 0.7
    monkeypatch.setattr(transformer, "rotary_table", cast_table)
    with open_checkpoint(GOLDEN / name) as checkpoint:
        model, experts = load_weights(checkpoint, checkpoint.weight_dtype)
    tokens = jnp.asarray(fixture["input_ids"], jnp.int32)

    def compute(model, experts, tokens):
        cache = KVCache.zeros(config, *tokens.shape, model.dtype)
        start, valid = jnp.zeros(tokens.shape[0], jnp.int32), jnp.ones(tokens.shape, bool)
        seam = resident_seam(experts, tokens)
        return model(tokens, start, valid, cache, seam, block_length=8, window=0)

    assert first_layer_equal(jax.jit(compute)(model, experts, tokens)) > 0.99
