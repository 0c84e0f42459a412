"""Placement never changes results: offloaded experts against all resident, whatever N, form and starting cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oled_jax.model.experts import ExpertWeights, expert_counts
from oled_jax.offload.offloaded import LOAD_THEN_COMPUTE, STREAM, LayerState, OffloadedExperts, OffloadState
from oled_jax.offload.resident import ResidentExperts
from oled_jax.retention import RetentionPolicy, Routing, StepRecord, policy_by_name
from oled_jax.retention.frequency import StaticFrequency
from oled_jax.retention.policy import Table

EXPERTS, HIDDEN, WIDTH, TOKENS, CHOSEN, LAYER = 8, 16, 8, 6, 3, 3
LRU = policy_by_name("lru")


def pinned(tree):
    """The same arrays in pinned host memory."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    return jax.tree.map(lambda array: jax.device_put(array, sharding), tree)


@functools.cache
def weights(dtype: str) -> dict[int, ExpertWeights]:
    rng = np.random.default_rng(0)
    gate_up = rng.standard_normal((EXPERTS, 2 * WIDTH, HIDDEN)).astype(jnp.dtype(dtype))
    down = rng.standard_normal((EXPERTS, WIDTH, HIDDEN)).astype(jnp.dtype(dtype))
    return {LAYER: ExpertWeights(jnp.asarray(gate_up), jnp.asarray(down))}


def demand(seed: int, dtype: str) -> tuple[np.ndarray, Routing]:
    """Tokens and routing (some rows do not count) of one step."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((TOKENS, HIDDEN)).astype(jnp.dtype(dtype))
    ids = np.stack([rng.permutation(EXPERTS)[:CHOSEN] for _ in range(TOKENS)]).astype(np.int32)
    ids[rng.random(TOKENS) < 0.2] = -1
    row = np.where(ids[:, 0] >= 0, 0, -1).astype(np.int32)
    zeros = np.zeros(TOKENS, np.int32)
    shares = rng.random((TOKENS, CHOSEN)).astype(np.float32)
    return x, Routing(ids, shares, row, zeros.astype(np.float32), zeros, zeros)


@functools.cache
def stepper(runner, dtype: str):
    """The runner's step, compiled, and its first state."""
    store, state = runner.init(pinned(weights(dtype)) if isinstance(runner, OffloadedExperts) else weights(dtype))

    def step(state, x, routing):
        y, state, telemetry = runner.run(store, state, LAYER, x, routing, 1.5)
        seen = record(state, routing, telemetry)
        return y, runner.observe(state, seen), seen

    return state, jax.jit(step)


def record(state, routing: Routing, telemetry) -> StepRecord:
    """One forward of one layer and one sequence, which is denoising."""
    zero, before, after = jnp.zeros(1, jnp.int32), telemetry.before[None], telemetry.after[None]
    routing = routing._replace(ids=routing.ids[None], weights=routing.weights[None])
    change = (after & ~before, before & ~after, routing)
    counts = expert_counts(routing.ids, EXPERTS)
    return StepRecord(state.forward, zero, zero, zero, zero + 1, counts, before, *change)


def offloaded(capacity: int, staging: int, policy: RetentionPolicy = LRU, form: str = LOAD_THEN_COMPUTE):
    return OffloadedExperts(EXPERTS, capacity, policy, staging, form)


RUNNERS = [
    offloaded(EXPERTS, 1),
    offloaded(3, 2),
    offloaded(1, 1),
    offloaded(3, 2, form=STREAM),
    offloaded(1, 1, form=STREAM),
    offloaded(3, 1).for_prefill(),
    offloaded(3, 2, policy_by_name("ondemand")),
    offloaded(EXPERTS, 2, policy_by_name("ondemand")),
    offloaded(3, 2, policy_by_name("oled:rho_in=0.9")),
    offloaded(3, 1, policy_by_name("status"), STREAM),
    offloaded(4, 1, StaticFrequency(counts=Table(np.arange(EXPERTS)[None]))),
]


def name_of(runner: OffloadedExperts) -> str:
    return f"{'sweep' if runner.prefills else runner.form}-{runner.capacity}-{runner.policy.name}"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("runner", RUNNERS, ids=name_of)
def test_a_stream_of_steps_gives_what_full_residency_gives(runner, dtype):
    state, step = stepper(runner, dtype)
    resident_state, full = stepper(ResidentExperts(), dtype)
    seen: set[int] = set()
    after = np.asarray(state.layers[LAYER].row_of) >= 0
    for seed in range(12):
        x, routing = demand(seed, dtype)
        y, state, seen_now = step(state, x, routing)
        before = np.asarray(seen_now.resident[0])
        expected, resident_state, _ = full(resident_state, x, routing)
        tolerance = 1e-4 if dtype == "float32" else 0.05 * float(np.abs(np.asarray(expected, np.float32)).max())
        np.testing.assert_allclose(np.asarray(y, np.float32), np.asarray(expected, np.float32), atol=tolerance)
        np.testing.assert_array_equal(before, after)
        after = (before & ~np.asarray(seen_now.evicted[0])) | np.asarray(seen_now.admitted[0])
        wanted = set(np.unique(routing.ids[routing.ids >= 0]).tolist())
        assert set(np.flatnonzero(seen_now.counts[0]).tolist()) == wanted
        assert set(np.flatnonzero(after).tolist()) <= wanted | set(np.flatnonzero(before).tolist())
        if runner.capacity == EXPERTS and runner.policy.admits:
            assert set(np.flatnonzero(before).tolist()) == seen
            assert runner.rounds(jax.tree.map(np.asarray, seen_now)).tolist() == [1]
        seen |= wanted
    check_slots(runner, state, dtype)
    assert int(state.forward) == 12


def test_rounds_are_counted():
    """Six experts wanted, one slot and one staging row: two at first, then one at a time."""
    runner = offloaded(1, 1)
    state, step = stepper(runner, "float32")
    x, routing = demand(0, "float32")
    ids = np.array([[0, 1, 2], [3, 4, 5]] + [[-1] * 3] * 4, np.int32)
    _, _, seen = step(state, x, routing._replace(ids=ids))
    assert runner.rounds(jax.tree.map(np.asarray, seen)).tolist() == [5]


def test_a_policy_that_never_admits_keeps_what_it_started_with():
    runner = offloaded(4, 1, StaticFrequency(counts=Table(np.arange(EXPERTS)[None])))
    state, step = stepper(runner, "float32")
    check_slots(runner, state, "float32")
    for seed in range(4):
        assert set(np.flatnonzero(state.layers[LAYER].row_of >= 0)) == {4, 5, 6, 7}
        _, state, _ = step(state, *demand(seed, "float32"))
    _, prefill = stepper(runner.for_prefill(), "float32")
    _, state, _ = prefill(state, *demand(5, "float32"))
    assert set(np.flatnonzero(state.layers[LAYER].row_of >= 0)) == {4, 5, 6, 7}
    check_slots(runner, state, "float32")


def check_slots(runner, state, dtype: str) -> None:
    """Every resident's row holds its own weights, to the bit."""
    layer, bank = state.layers[LAYER], weights(dtype)[LAYER]
    row_of = np.asarray(layer.row_of)
    residents = np.flatnonzero(row_of >= 0)
    for expert in residents:
        np.testing.assert_array_equal(layer.slots.gate_up[row_of[expert]], bank.gate_up[expert])
        np.testing.assert_array_equal(layer.slots.down[row_of[expert]], bank.down[expert])
    assert len(residents) <= runner.capacity
    assert len(set(row_of[residents])) == len(residents)


def started(runner, dtype: str, seed: int) -> OffloadState:
    """A state with random residents in random rows."""
    rng = np.random.default_rng(seed)
    _, empty = runner.init(weights(dtype))
    own, bank = empty.layers[LAYER], weights(dtype)[LAYER]
    experts = rng.permutation(EXPERTS)[: rng.integers(0, runner.capacity + 1)]
    rows = rng.permutation(runner.capacity + runner.staging)[: len(experts)]
    gate_up, down = (np.array(a) for a in (own.slots.gate_up, own.slots.down))
    row_of = np.array(own.row_of)
    for expert, row in zip(experts, rows, strict=True):
        gate_up[row], down[row] = bank.gate_up[expert], bank.down[expert]
        row_of[expert] = row
    recency = empty.retention._replace(
        forward=jnp.int32(5), last=jnp.asarray(rng.integers(-1, 5, (1, EXPERTS)), jnp.int32)
    )
    slots = ExpertWeights(jnp.asarray(gate_up), jnp.asarray(down))
    layer = LayerState(slots, jnp.asarray(row_of))
    return OffloadState({LAYER: layer}, jnp.int32(5), recency)


@pytest.mark.parametrize("capacity", [1, 3, 6])
def test_load_then_compute_is_bit_identical_for_every_starting_cache(capacity):
    runner = offloaded(capacity, 2)
    empty, step = stepper(runner, "bfloat16")
    for seed in range(20):
        x, routing = demand(seed, "bfloat16")
        y, _, _ = step(started(runner, "bfloat16", seed), x, routing)
        expected, _, _ = step(empty, x, routing)
        np.testing.assert_array_equal(y, expected)


def test_a_sweep_is_bit_identical_for_every_capacity_and_starting_cache():
    results = []
    for capacity in (1, 5):
        runner = offloaded(capacity, 1).for_prefill()
        _, step = stepper(runner, "bfloat16")
        results.append([step(started(runner, "bfloat16", s), *demand(s, "bfloat16"))[0] for s in range(8)])
    for ours, theirs in zip(*results, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_after_a_sweep_the_experts_with_most_tokens_stay():
    runner = offloaded(3, 1).for_prefill()
    _, step = stepper(runner, "float32")
    x, routing = demand(1, "float32")
    ids = np.array([[0, 1, 2], [0, 1, 3], [0, 1, 7], [0, 6, 7], [5, 6, 7], [-1, -1, -1]], np.int32)
    _, state, _ = step(started(runner, "float32", 2), x, routing._replace(ids=ids))
    assert set(np.flatnonzero(state.layers[LAYER].row_of >= 0)) == {0, 1, 7}
