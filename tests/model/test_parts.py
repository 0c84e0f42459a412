"""The parts against plain numpy: norm, rotary positions, router, expert products, attention's masks, cache writes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from oled_jax.config import ModelConfig
from oled_jax.model.experts import ExpertWeights, combine_chosen, expert_outputs, gather_chosen
from oled_jax.model.kv_cache import KVCache
from oled_jax.model.layers import RMSNorm, rotary_table, rotate
from oled_jax.model.numerics import add, linear, rounded
from oled_jax.model.router import Router
from tests.golden_fixtures import GOLDEN

BF16 = jnp.bfloat16


def bf(x) -> np.ndarray:
    """Rounds to bfloat16 and back, in numpy."""
    return np.asarray(x, np.float32).astype(BF16).astype(np.float32)


def test_rounding_survives_jit():
    """An add followed by an upcast is what XLA would leave unrounded."""
    a, b = (np.random.default_rng(i).standard_normal(4096).astype(BF16) for i in range(2))
    out = jax.jit(lambda a, b: add(a, b).astype(jnp.float32) * 3)(a, b)
    np.testing.assert_array_equal(np.asarray(out), bf(a.astype(np.float32) + b.astype(np.float32)) * 3)


def test_linear_rounds_once_from_a_float32_sum():
    rng = np.random.default_rng(0)
    x, w, b = (rng.standard_normal(shape).astype(BF16) for shape in ((5, 64), (7, 64), (7,)))
    out = jax.jit(lambda *args: linear(*args).astype(jnp.float32))(x, w, b)
    exact = x.astype(np.float64) @ w.astype(np.float64).T + b.astype(np.float64)
    assert np.all(bf(out) == out)
    np.testing.assert_allclose(out, exact, rtol=2**-8, atol=1e-4)


def test_rms_norm_rounds_before_and_after_the_weight():
    rng = np.random.default_rng(1)
    x, w = rng.standard_normal((6, 64)).astype(BF16), rng.standard_normal(64).astype(BF16)
    norm = RMSNorm(64, eps=1e-6, dtype=BF16)
    norm.weight[...] = jnp.asarray(w)
    x32 = x.astype(np.float32)
    normed = x32 / np.sqrt(np.mean(x32**2, axis=-1, keepdims=True) + 1e-6)
    expected = bf(w.astype(np.float32) * bf(normed))
    out = np.asarray(jax.jit(lambda x: norm(x).astype(jnp.float32))(x))
    assert np.mean(out == expected) > 0.99  # a last bit of rsqrt may turn a rounding
    np.testing.assert_allclose(out, expected, rtol=2**-7)


def test_rotary_turns_halves_of_the_leading_dimensions():
    v = np.random.default_rng(2).standard_normal((1, 3, 2, 8)).astype(np.float32)
    positions = np.array([[0, 5, 1000]])
    cos, sin = rotary_table(jnp.asarray(positions), 4, 10000.0, jnp.float32)
    out = np.asarray(rotate(jnp.asarray(v), cos, sin))
    for t, position in enumerate(positions[0]):
        for j, inverse in enumerate((1.0, 10000.0**-0.5)):
            c, s = np.cos(position * inverse), np.sin(position * inverse)
            np.testing.assert_allclose(out[0, t, :, j], v[0, t, :, j] * c - v[0, t, :, j + 2] * s, atol=2e-4)
            np.testing.assert_allclose(out[0, t, :, j + 2], v[0, t, :, j + 2] * c + v[0, t, :, j] * s, atol=2e-4)
    np.testing.assert_array_equal(out[..., 4:], v[..., 4:])


def numpy_route(config: ModelConfig, x, weight, bias) -> list[tuple[list[int], list[float]]]:
    """Spec 3.1 token by token, in float64."""
    scores = 1 / (1 + np.exp(-(x.astype(np.float64) @ weight.astype(np.float64).T)))
    biased = scores + bias
    out = []
    if config.block_routing:
        windows = biased.reshape(-1, config.block_size, config.num_experts).max(axis=1)
        allowed = [set(np.argsort(-w)[: config.expert_capacity]) for w in windows]
    for t, row in enumerate(biased):
        if config.block_routing:
            keep = allowed[t // config.block_size]
        else:
            groups = row.reshape(config.n_group, -1)
            best = np.argsort(-np.sort(groups, axis=1)[:, -2:].sum(axis=1))[: config.topk_group]
            size = groups.shape[1]
            keep = {e for g in best for e in range(g * size, (g + 1) * size)}
        chosen = sorted(keep, key=lambda e: -row[e])[: config.num_experts_per_tok]
        picked = scores[t, chosen]
        out.append((chosen, picked / picked.sum()))
    return out


@pytest.mark.parametrize("name", ["llada2-tiny-wide-f32", "llada22-tiny-f32"])
def test_router_against_numpy(name):
    config = ModelConfig.from_hf(GOLDEN / name)
    router = Router(config, dtype=jnp.float32, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(3)
    bias = rng.standard_normal(config.num_experts).astype(np.float32) * 0.1
    router.expert_bias[...] = jnp.asarray(bias)
    x = rng.standard_normal((2, 16, config.hidden_size)).astype(np.float32) * 5
    valid = np.ones((2, 16), bool)
    ids, weights = router(jnp.asarray(x), jnp.asarray(valid))
    for b in range(2):
        expected = numpy_route(config, x[b], np.asarray(router.weight[...]), bias)
        for t, (chosen, picked) in enumerate(expected):
            assert np.asarray(ids)[b, t].tolist() == [int(e) for e in chosen]
            np.testing.assert_allclose(np.asarray(weights)[b, t], picked, atol=1e-5)


def test_rows_that_do_not_count_route_nowhere_and_have_no_say_in_a_window():
    config = ModelConfig.from_hf(GOLDEN / "llada22-tiny-f32")
    router = Router(config, dtype=jnp.float32, rngs=nnx.Rngs(0))
    x = np.random.default_rng(4).standard_normal((1, 8, config.hidden_size)).astype(np.float32) * 5
    valid = np.arange(8)[None] < 5
    ids, weights = router(jnp.asarray(x), jnp.asarray(valid))
    other = x.copy()
    other[:, 5:] = 100.0
    same_ids, same_weights = router(jnp.asarray(other), jnp.asarray(valid))
    assert np.all(np.asarray(ids)[0, 5:] == -1)
    assert np.all(np.asarray(weights)[0, 5:] == 0)
    np.testing.assert_array_equal(ids, same_ids)
    np.testing.assert_array_equal(weights, same_weights)
    assert len(np.unique(np.asarray(ids)[0, :5])) <= config.expert_capacity


@settings(max_examples=15)  # every shape compiles
@given(st.integers(0, 2**31), st.integers(1, 9), st.integers(1, 6), st.integers(1, 4))
def test_experts_sum_in_top_k_order_and_ignore_rows_without_demand(seed, tokens, experts, chosen):
    rng = np.random.default_rng(seed)
    hidden, width = 8, 4
    x = rng.standard_normal((tokens, hidden)).astype(np.float32)
    weights = ExpertWeights(
        rng.standard_normal((experts, 2 * width, hidden)).astype(np.float32),
        rng.standard_normal((experts, width, hidden)).astype(np.float32),
    )
    ids = rng.integers(-1, experts, (tokens, chosen)).astype(np.int32)
    gates = rng.random((tokens, chosen)).astype(np.float32)
    chosen = gather_chosen(expert_outputs(x, jax.tree.map(jnp.asarray, weights)), jnp.asarray(ids))
    y = combine_chosen(chosen, jnp.asarray(ids), jnp.asarray(gates))
    expected = np.zeros((tokens, hidden))
    for t in range(tokens):
        for e, g in zip(ids[t], gates[t], strict=True):
            if e >= 0:
                gate, up = weights.gate_up[e, :width] @ x[t], weights.gate_up[e, width:] @ x[t]
                expected[t] += g * ((gate / (1 + np.exp(-gate)) * up) @ weights.down[e])
    np.testing.assert_allclose(np.asarray(y), expected, atol=1e-3)


def test_expert_rounding_points_in_bfloat16():
    """One token, one expert, step by step as spec section 3 rounds."""
    rng = np.random.default_rng(5)
    x, gate_up, down = (rng.standard_normal(s).astype(BF16) for s in ((1, 16), (1, 8, 16), (1, 4, 16)))
    ids = jnp.zeros((1, 1), jnp.int32)
    run = jax.jit(lambda x, e: combine_chosen(gather_chosen(expert_outputs(x, e), ids), ids, jnp.ones((1, 1))))
    y = run(x, ExpertWeights(jnp.asarray(gate_up), jnp.asarray(down)))
    f = lambda a: np.asarray(a, np.float32)  # noqa: E731
    projected = bf(f(x) @ f(gate_up[0]).T)
    gate, up = projected[:, :4], projected[:, 4:]
    expected = bf(bf(bf(gate / (1 + np.exp(-gate))) * up) @ f(down[0]))
    assert np.mean(f(y) == expected) > 0.9


def test_cache_writes_only_valid_rows_at_each_start():
    config = dataclasses.replace(ModelConfig.from_hf(GOLDEN / "llada2-tiny-f32"), num_hidden_layers=2)
    cache = KVCache.zeros(config, 2, 16, jnp.float32)
    new = jnp.stack([jnp.full((2, 4, 2, 16), layer + 1.0) for layer in range(2)])
    valid = jnp.asarray([[True, True, False, True], [False] * 4])
    out = cache.write(new, new, jnp.asarray([8, 3]), valid)
    rows = np.asarray(out.keys)[:, :, :, 0, 0]
    expected = np.zeros((2, 2, 16))
    expected[:, 0, [8, 9, 11]] = [[1, 1, 1], [2, 2, 2]]
    np.testing.assert_array_equal(rows, expected)
    np.testing.assert_array_equal(np.asarray(out.values)[:, :, :, 0, 0], expected)


def test_rounded_is_the_identity_in_float32():
    x = np.random.default_rng(6).standard_normal(100).astype(np.float32)
    np.testing.assert_array_equal(jax.jit(lambda x: rounded(x, jnp.float32))(x), x)
