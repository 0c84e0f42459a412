"""Decisions are equal in numpy and in a jitted program, for every policy, bit by bit, state included."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oled_jax.retention import demand_counts, static_keep_rank, step
from oled_jax.retention.arrays import best, ranks
from oled_jax.retention.fixed_point import FACTOR_ONE, evidence_table, hashed, scaled, shares, to_fixed
from tests.retention.policies import POLICIES
from tests.retention.streams import EXPERTS, LAYERS, capacities, make_stream, run, streams


def assert_same(left, right):
    left, right = jax.tree.leaves(left), jax.tree.leaves(right)
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert np.asarray(a).dtype == np.asarray(b).dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@settings(max_examples=12)
@given(stream=streams(), capacity=capacities)
def test_a_jitted_program_decides_as_numpy_does(policy, stream, capacity):
    for host, device in zip(run(policy, stream, capacity), run(policy, stream, capacity, jnp), strict=True):
        assert_same(host, device)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_new_batch_starts_with_arrays_that_can_all_be_donated(policy):
    state = policy.init(LAYERS, EXPERTS, 4, jnp, sequences=2)
    state = jax.tree.map(jnp.copy, state)  # as the engine does before the first step
    *_, (known, _, _) = run(policy, make_stream(0, 3), 4)
    for before, rows in ((state, 1), (jax.tree.map(jnp.asarray, known), 3)):
        started = policy.for_batch(before, rows, jnp)
        leaves = jax.tree.leaves(started)
        assert len({id(leaf) for leaf in leaves}) == len(leaves)
        fresh = policy.init(LAYERS, EXPERTS, 4, jnp, sequences=rows)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), started) == jax.tree.map(lambda x: (x.shape, x.dtype), fresh)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@settings(max_examples=10)
@given(stream=streams(), capacity=capacities)
def test_layers_one_at_a_time_or_together(policy, stream, capacity):
    whole = run(policy, stream, capacity)
    for together, single in zip(whole, run(policy, stream, capacity, by_layer=True), strict=True):
        assert_same(together, single)


def test_a_traced_layer_index_decides_as_a_python_one():
    policy, stream = POLICIES["oled:rho_in=0.9,w_jc=0.3"], make_stream(3, 6, grid=4)
    *_, (state, _, (gates, _, outcome)) = run(policy, stream, 5)
    counts = demand_counts(stream[-1].before.ids, EXPERTS, np)

    def rankings(state, layer, xp):
        here = (counts > 0, counts, gates, outcome.resident)
        return policy.plan(state, layer, *(xp.asarray(x)[layer] for x in here), xp)

    traced = jax.jit(functools.partial(rankings, xp=jnp))
    for layer in range(LAYERS):
        assert_same(traced(state, layer), rankings(state, layer, np))


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@settings(max_examples=25)
@given(stream=streams(), capacity=capacities)
def test_a_static_ranking_decides_as_the_full_one(policy, stream, capacity):
    if not policy.static_keep:
        return
    state = policy.init(LAYERS, EXPERTS, capacity, np, sequences=2)
    for after, resident, (_, plan, outcome) in run(policy, stream, capacity):
        before = plan._replace(keep_rank=static_keep_rank(policy, state, np, LAYERS, EXPERTS))
        demand = outcome.hits | outcome.misses
        assert_same(step(resident, demand, before, capacity, np, mode=policy.mode), outcome)
        state = after


def test_static_rankings_are_offered_where_they_can_be():
    offered = {name for name, policy in POLICIES.items() if policy.static_keep}
    assert offered == {
        "ondemand",
        "lru",
        "fifo:tie=hash",
        "random:seed=7",
        "lfru:weight=token",
        "lfuda:tie=load",
        "static-frequency",
        "static-uniform:seed=3",
        "mixtral-tide:mode=protect,tie=hash",
        "hybrimoe:alpha=0.3",
        "oled",
        "oled-steps:aggregation=max",
        "lfu-incache",
        "status:mode=protect,tie=load,others=popular",
        "status with successors",
    }


keys = st.lists(st.integers(-3, 3), min_size=16, max_size=16)


@given(st.lists(keys, min_size=1, max_size=3))
def test_ranks_sort_by_keys_then_by_smaller_id(columns):
    order = sorted(range(16), key=lambda e: (*(column[e] for column in columns), -e))
    expected = np.argsort(order)
    arrays = tuple(np.asarray(column, np.int32) for column in columns)
    np.testing.assert_array_equal(ranks(arrays, np), expected)
    np.testing.assert_array_equal(ranks(arrays, jnp), expected)


wide = st.one_of(st.integers(-(2**31), 2**31 - 1), st.sampled_from([-(2**31), -1, 0, 1, 2**31 - 1]))


@given(st.lists(st.lists(wide, min_size=5, max_size=5), min_size=1, max_size=4), st.integers(0, 2**31))
def test_ranks_by_one_sort_are_those_of_lexsort_however_wide_the_keys(columns, seed):
    rng = np.random.default_rng(seed)
    keys = [rng.choice(column, (3, 11)).astype(np.int32) for column in columns]
    keys.append(rng.random(11) < 0.5)  # one for all lists
    by_id = np.broadcast_to(-np.arange(11), (3, 11))
    order = np.lexsort((by_id, *(np.broadcast_to(key, (3, 11)) for key in reversed(keys))), axis=-1)
    np.testing.assert_array_equal(ranks(tuple(keys), np), np.argsort(order, axis=-1))


@given(st.integers(0, 2**31), st.integers(0, 9))
def test_the_best_members(seed, count):
    rng = np.random.default_rng(seed)
    members, score = rng.random((2, 8)) < 0.6, rng.integers(0, 4, (2, 8)).astype(np.int32)
    counts = np.array([[count], [rng.integers(0, 9)]], np.int32)
    expected = np.zeros((2, 8), bool)
    for row, most in enumerate(counts[:, 0]):
        ordered = sorted(np.flatnonzero(members[row]), key=lambda e: (-score[row, e], e))
        expected[row, ordered[:most]] = True
    np.testing.assert_array_equal(best(members, score, counts, np), expected)
    np.testing.assert_array_equal(best(members, score, counts, jnp), expected)
    np.testing.assert_array_equal(best(members[0], score[0], count, np), expected[0])


def test_shares_are_parts_of_the_sum_to_24_bits():
    rng = np.random.default_rng(0)
    small, large = rng.integers(0, 1 << 18, (5, 16)), rng.integers(0, 1 << 27, (5, 256))
    for votes in (small, np.zeros((2, 4), int), np.eye(4, dtype=int) << 27, np.full((1, 256), 1 << 27), large):
        total = np.maximum(votes.sum(-1, keepdims=True), 1)
        expected = (votes << 24) // total  # in int64
        host = shares(votes.astype(np.int32), np)
        assert host.dtype == np.int32
        np.testing.assert_array_equal(jax.jit(functools.partial(shares, xp=jnp))(votes.astype(np.int32)), host)
        # Sums of more than 22 bits lose their last ones.
        assert np.abs(host - expected).max() <= (12 if votes.sum(-1).max() >> 22 else 0)


def test_every_float16_keeps_its_value_and_float32_rounds_to_it():
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    rng = np.random.default_rng(0)
    floats = np.concatenate([rng.random(20_000), 2.0 ** -rng.uniform(0, 28, 20_000), [0, 1, 1.0000001]])
    floats = floats.astype(np.float32)
    for bits in (14, 16):
        for values, stored in ((halves, halves), (floats, floats.astype(np.float16))):
            exact = np.clip(np.nan_to_num(stored.astype(np.float64), nan=0, posinf=1, neginf=0), 0, 1)
            expected = np.rint(exact * 2**bits).astype(np.int32)
            with np.errstate(invalid="ignore", over="ignore"):
                np.testing.assert_array_equal(to_fixed(values, bits, np), expected)
            jitted = jax.jit(lambda x, bits=bits: to_fixed(x, bits, jnp))
            np.testing.assert_array_equal(jitted(values), expected)


def test_uint8_counts_in_255ths():
    units = np.arange(256, dtype=np.uint8)
    expected = [round(u * 65536 / 255) for u in range(256)]
    np.testing.assert_array_equal(to_fixed(units, 16, np), expected)
    np.testing.assert_array_equal(to_fixed(jnp.asarray(units), 16, jnp), expected)


@given(st.integers(0, 2**27), st.integers(0, FACTOR_ONE))
def test_scaling_is_exact_where_the_product_overflows_int32(x, by):
    expected = (x * by + FACTOR_ONE // 2) // FACTOR_ONE
    assert scaled(np.asarray([x], np.int32), by).tolist() == [expected]
    assert scaled(jnp.asarray([x], jnp.int32), by).tolist() == [expected]


def test_evidence_ranks_as_the_chance_that_any_asks_again():
    table = evidence_table()
    assert table[0] == 0 and table[512] == 4096 and table[1024] == 65536
    assert (np.diff(table) > 0).all()
    both = 1 - (1 - 0.5) * (1 - 0.25)
    assert table[512] + table[256] == pytest.approx(table[round(both * 1024)], abs=2)


def test_the_hash_is_pinned_equal_in_jax_and_spread_evenly():
    layers = np.arange(LAYERS, dtype=np.int32)
    host = hashed(3, np.int32(5), layers, 256, 2, np)
    device = jax.jit(lambda forward: hashed(3, forward, layers, 256, 2, jnp))(5)
    np.testing.assert_array_equal(host, device)
    assert host.shape == (LAYERS, 256) and host.dtype == np.int32 and host.min() >= 0
    # A change of these numbers changes every recorded run with random choices.
    assert hashed(0, 0, np.asarray(0), 4, 1, np).tolist() == [1132631848, 812985543, 1534053753, 1574975568]
    draws = np.stack([hashed(seed, forward, layers, 64, 2, np) for seed in range(20) for forward in range(20)])
    assert len(np.unique(draws)) > 0.999 * draws.size
    assert draws.mean() / 2**31 == pytest.approx(0.5, abs=0.01)
    first = ranks((draws,), np).argmax(-1)
    assert np.bincount(first.reshape(-1), minlength=64).max() < 40  # 12.5 expected of 800
