"""Placement never changes results: offloaded experts against all resident, whatever N, form and starting cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oled_jax import Engine
from oled_jax.checkpoint import open_checkpoint
from oled_jax.loading import load_weights
from oled_jax.model.experts import ExpertWeights
from oled_jax.offload.offloaded import FORMS, PREFILL, LayerState, OffloadedExperts, OffloadState
from oled_jax.offload.placement import SlotMap
from oled_jax.offload.resident import ResidentExperts
from tests.golden_fixtures import CONTEXT, GOLDEN, cases, engine, forward, rule_of

EXPERTS, HIDDEN, WIDTH, TOKENS, CHOSEN = 8, 16, 8, 6, 3


def pinned(tree):
    """The same arrays in pinned host memory."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    return jax.tree.map(lambda array: jax.device_put(array, sharding), tree)


@functools.cache
def weights(dtype: str) -> dict[int, ExpertWeights]:
    rng = np.random.default_rng(0)
    gate_up = rng.standard_normal((EXPERTS, 2 * WIDTH, HIDDEN)).astype(jnp.dtype(dtype))
    down = rng.standard_normal((EXPERTS, WIDTH, HIDDEN)).astype(jnp.dtype(dtype))
    return {3: ExpertWeights(jnp.asarray(gate_up), jnp.asarray(down))}


def demand(seed: int, dtype: str):
    """Tokens, ids (some rows that do not count) and weights of one step."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((TOKENS, HIDDEN)).astype(jnp.dtype(dtype))
    ids = np.stack([rng.permutation(EXPERTS)[:CHOSEN] for _ in range(TOKENS)]).astype(np.int32)
    ids[rng.random(TOKENS) < 0.2] = -1
    return x, ids, rng.random((TOKENS, CHOSEN)).astype(np.float32)


@functools.cache
def stepper(runner, dtype: str):
    """The runner's step, compiled, with its store."""
    store, state = runner.init(pinned(weights(dtype)) if isinstance(runner, OffloadedExperts) else weights(dtype))
    return state, jax.jit(lambda state, x, ids, w: runner.run(store, state, 3, x, ids, w))


RUNNERS = [
    OffloadedExperts(EXPERTS, EXPERTS, 1),
    OffloadedExperts(EXPERTS, 3, 2),
    OffloadedExperts(EXPERTS, 1, 1),
    OffloadedExperts(EXPERTS, 3, 2, "stream", "select"),
    OffloadedExperts(EXPERTS, 1, 1, "stream", "select"),
    OffloadedExperts(EXPERTS, 3, 1, PREFILL, "select"),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("runner", RUNNERS, ids=lambda r: f"{r.form}-{r.capacity}")
def test_a_stream_of_steps_gives_what_full_residency_gives(runner, dtype):
    state, step = stepper(runner, dtype)
    _, full = stepper(ResidentExperts(), dtype)
    seen: set[int] = set()
    for seed in range(12):
        x, ids, w = demand(seed, dtype)
        y, state, telemetry = step(state, x, ids, w)
        expected, _, _ = full((), x, ids, w)
        tolerance = 1e-4 if dtype == "float32" else 0.05 * float(np.abs(np.asarray(expected, np.float32)).max())
        np.testing.assert_allclose(np.asarray(y, np.float32), np.asarray(expected, np.float32), atol=tolerance)
        wanted = {int(e) for e in np.unique(ids) if e >= 0}
        resident = set(np.flatnonzero(telemetry.resident).tolist())
        assert int(telemetry.loads) == len(wanted - resident)
        if runner.capacity == EXPERTS:
            assert resident == seen
            assert int(telemetry.rounds) == 1
        seen |= wanted
    check_slots(runner, state, dtype)


def check_slots(runner, state, dtype: str) -> None:
    """Every resident's row holds its own weights, to the bit."""
    layer, bank = state.layers[3], weights(dtype)[3]
    for row, expert in enumerate(np.asarray(layer.map.expert_in)):
        if expert >= 0:
            np.testing.assert_array_equal(layer.slots.gate_up[row], bank.gate_up[expert])
            np.testing.assert_array_equal(layer.slots.down[row], bank.down[expert])
    assert int(np.sum(np.asarray(layer.map.expert_in) >= 0)) <= runner.capacity


def started(runner, dtype: str, seed: int) -> OffloadState:
    """A state with random residents in random rows."""
    rng = np.random.default_rng(seed)
    _, empty = runner.init(weights(dtype))
    own, bank = empty.layers[3], weights(dtype)[3]
    experts = rng.permutation(EXPERTS)[: rng.integers(0, runner.capacity + 1)]
    rows = rng.permutation(runner.capacity + runner.staging)[: len(experts)]
    gate_up, down = (np.array(a) for a in (own.slots.gate_up, own.slots.down))
    row_of, expert_in = (np.array(a) for a in (own.map.row_of, own.map.expert_in))
    for expert, row in zip(experts, rows, strict=True):
        gate_up[row], down[row] = bank.gate_up[expert], bank.down[expert]
        row_of[expert], expert_in[row] = row, expert
    last = rng.integers(-1, 5, EXPERTS).astype(np.int32)
    slots = ExpertWeights(jnp.asarray(gate_up), jnp.asarray(down))
    layer = LayerState(slots, SlotMap(jnp.asarray(row_of), jnp.asarray(expert_in)), jnp.asarray(last))
    return OffloadState({3: layer}, jnp.int32(5))


@pytest.mark.parametrize("capacity", [1, 3, 6])
def test_load_then_compute_is_bit_identical_for_every_starting_cache(capacity):
    runner = OffloadedExperts(EXPERTS, capacity, 2)
    empty, step = stepper(runner, "bfloat16")
    for seed in range(20):
        x, ids, w = demand(seed, "bfloat16")
        y, _, _ = step(started(runner, "bfloat16", seed), x, ids, w)
        expected, _, _ = step(empty, x, ids, w)
        np.testing.assert_array_equal(y, expected)


def test_a_sweep_is_bit_identical_for_every_capacity_and_starting_cache():
    results = []
    for capacity in (1, 5):
        runner = OffloadedExperts(EXPERTS, capacity, 1).for_prefill()
        _, step = stepper(runner, "bfloat16")
        results.append([step(started(runner, "bfloat16", s), *demand(s, "bfloat16"))[0] for s in range(8)])
    for ours, theirs in zip(*results, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_after_a_sweep_the_experts_with_most_tokens_stay():
    runner = OffloadedExperts(EXPERTS, 3, 1).for_prefill()
    _, step = stepper(runner, "float32")
    x, _, w = demand(1, "float32")
    ids = np.array([[0, 1, 2], [0, 1, 3], [0, 1, 7], [0, 6, 7], [5, 6, 7], [-1, -1, -1]], np.int32)
    _, state, _ = step(started(runner, "float32", 2), x, ids, w)
    assert set(np.flatnonzero(state.layers[3].map.resident)) == {0, 1, 7}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capacity", "form"), [(1, FORMS[0]), (6, FORMS[0]), (16, FORMS[0]), (1, FORMS[1]), (6, FORMS[1])]
)
def test_golden_tokens_under_a_budget(capacity, form):
    name = "llada2-tiny-f32"
    with open_checkpoint(GOLDEN / name) as checkpoint:
        model, experts = load_weights(checkpoint, checkpoint.weight_dtype)
    mode = "select" if form == "stream" else "protect"
    runner = OffloadedExperts(16, capacity, 2, form, mode)
    eng = Engine(model, pinned(experts), path=GOLDEN / name, context_length=CONTEXT, runner=runner)
    for kind, index, case in cases(name)[:4]:
        out = eng.generate(case["prompt_ids"], rule_of(kind, case), gen_length=case["gen_length"])
        assert out.tokens == case["output_ids"], index
    ids = forward(name)["input_ids"]
    np.testing.assert_allclose(eng.logits(ids, 8), engine(name).logits(ids, 8), atol=1e-4)
