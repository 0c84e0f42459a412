"""What every policy must keep, whatever the stream: slots, hits, purity; and what single policies promise."""

import copy

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oled_jax.retention import Plan, policy_by_name, retained_after_prefill, step
from tests.retention import reference
from tests.retention.policies import ADMITTING, COUNTS, POLICIES
from tests.retention.streams import (
    EXPERTS,
    LAYERS,
    SEQUENCES,
    Forward,
    capacities,
    in_mode,
    make_stream,
    modes,
    outcomes,
    run,
    streams,
)

every_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
starts = st.integers(0, 2**31).map(lambda seed: np.random.default_rng(seed))


@every_policy
@settings(max_examples=20)
@given(stream=streams(), capacity=capacities, mode=modes, rng=starts)
def test_slots_hits_and_misses(policy, stream, capacity, mode, rng):
    policy = in_mode(policy, mode)
    residents = None
    if policy.admits:  # a cache that somebody else filled
        residents = retained_after_prefill(rng.integers(0, 5, (LAYERS, EXPERTS)), capacity, np)
    for _, before, (_, plan, outcome) in run(policy, stream, capacity, residents=residents):
        demand = outcome.hits | outcome.misses
        assert (outcome.hits == demand & before).all() and (outcome.misses == demand & ~before).all()
        assert (outcome.resident.sum(-1) <= capacity).all()
        assert (outcome.resident == (before & ~outcome.evicted) | outcome.admitted).all()
        assert not (outcome.admitted & ~outcome.misses).any() and not (outcome.evicted & ~before).any()
        if policy.mode == "protect":
            assert not (outcome.evicted & demand).any()
            free = capacity - before.sum(-1)
            assert (outcome.evicted.sum(-1) == np.maximum(outcome.admitted.sum(-1) - free, 0)).all()
        for rank in plan[:2]:
            assert rank.dtype == np.int32
            assert (np.sort(rank, -1) == np.arange(EXPERTS)).all()


@every_policy
@settings(max_examples=10)
@given(stream=streams(), capacity=capacities)
def test_deciding_changes_no_state_and_repeats(policy, stream, capacity):
    first, states = [], []
    for state, _, decided in run(policy, stream, capacity):
        first.append(decided)
        states.append((state, copy.deepcopy(state)))
    for state, kept in states:  # nothing that came later wrote into it
        jax.tree.map(np.testing.assert_array_equal, state, kept)
    again = [decided for _, _, decided in run(policy, stream, capacity)]
    jax.tree.map(np.testing.assert_array_equal, first, again)


@pytest.mark.parametrize("policy", ADMITTING.values(), ids=ADMITTING)
@settings(max_examples=10)
@given(stream=streams(), mode=modes)
def test_with_a_slot_for_every_expert_only_first_uses_miss(policy, stream, mode):
    seen = policy.initial_residents(LAYERS, EXPERTS, EXPERTS)
    for outcome in outcomes(in_mode(policy, mode), stream, EXPERTS):
        assert not (outcome.misses & seen).any() and not outcome.evicted.any()
        seen |= outcome.misses
        assert (outcome.resident == seen).all()


@given(streams(), capacities, modes)
def test_on_demand_retains_nothing(stream, capacity, mode):
    for outcome in outcomes(policy_by_name(f"ondemand:mode={mode}"), stream, capacity):
        assert not outcome.resident.any() and not outcome.hits.any()


@given(streams(), capacities, modes)
def test_static_frequency_holds_the_most_frequent_for_ever(stream, capacity, mode):
    policy = in_mode(POLICIES["static-frequency"], mode)
    for outcome in outcomes(policy, stream, capacity):
        for layer, counts in enumerate(COUNTS.array):
            expected = sorted(range(EXPERTS), key=lambda e: (-counts[e], e))[:capacity]
            assert np.flatnonzero(outcome.resident[layer]).tolist() == sorted(expected)


@given(st.builds(make_stream, st.integers(0, 2**31), st.integers(1, 20)), st.integers(0, EXPERTS - 1))
def test_lru_in_mode_select_never_misses_more_with_one_slot_more(stream, capacity):
    policy = policy_by_name("lru:mode=select")
    small, large = (outcomes(policy, stream, c) for c in (capacity, capacity + 1))
    for less, more in zip(small, large, strict=True):
        assert not (less.resident & ~more.resident).any()


def relabelled(stream, new_id):
    """The stream with expert e called ``new_id[e]``."""
    table = np.append(new_id, -1).astype(np.int32)
    return [
        forward._replace(
            before=forward.before._replace(ids=table[forward.before.ids]),
            after=forward.after._replace(ids=table[forward.after.ids]),
        )
        for forward in stream
    ]


def load_stream(seed: int, forwards: int) -> list[Forward]:
    """A stream in which no two experts of a forward are wanted by equally many tokens: 3, 2 and 1 of the six."""
    rng = np.random.default_rng(seed)
    stream = []
    for forward in make_stream(seed, forwards):
        chosen = np.argsort(rng.random((LAYERS, EXPERTS)))[:, :3]
        ids = np.repeat(chosen, (3, 2, 1), axis=1)[..., None].astype(np.int32)
        routing = [r._replace(ids=ids, weights=np.ones(ids.shape, np.float32)) for r in forward[:2]]
        stream.append(forward._replace(before=routing[0], after=routing[1]))
    return stream


BY_LOAD = [
    "lru",
    "lfu",
    "lfu-incache",
    "lfru",
    "lfuda",
    "lfuda-conf",
    "s3fifo",
    "hybrimoe",
    "dali",
    "oled",
    "oled-steps",
]


@pytest.mark.parametrize("name", BY_LOAD)
@settings(max_examples=40)
@given(
    st.builds(load_stream, st.integers(0, 2**31), st.integers(1, 12)),
    capacities,
    modes,
    st.permutations(range(EXPERTS)),
)
def test_names_of_experts_do_not_matter_where_loads_break_every_tie(name, stream, capacity, mode, new_id):
    policy, new_id = policy_by_name(f"{name}:mode={mode},tie=load"), np.asarray(new_id)
    pairs = zip(outcomes(policy, stream, capacity), outcomes(policy, relabelled(stream, new_id), capacity), strict=True)
    for original, renamed in pairs:
        np.testing.assert_array_equal(original.resident, renamed.resident[:, new_id])


BY_ROW = [
    "oled",
    "oled:rho_in=0.9,w_jc=0.3",
    "oled:mode=select,aggregation=max,rho_in=0.5",
    "oled-steps:mode=select,rho_in=0.5,rho_r=2.0,pace=0.3",
    "boundary:mode=select,rho_in=0.7,base=oled,share=0.3",
    "status",
    "status with successors",
    "static-block",
    "tide:tau=2",
]


@pytest.mark.parametrize("name", BY_ROW)
@settings(max_examples=20)
@given(stream=streams(), capacity=capacities)
def test_rows_of_the_batch_may_change_places(name, stream, capacity):
    def swapped(forward):
        halves = [r._replace(row=(SEQUENCES - 1 - r.row).astype(np.int32)) for r in (forward.before, forward.after)]
        return Forward(*halves, *(per_row[::-1] for per_row in forward[2:]))

    one, other = (outcomes(POLICIES[name], s, capacity) for s in (stream, [swapped(f) for f in stream]))
    jax.tree.map(np.testing.assert_array_equal, one, other)


@given(
    st.integers(0, 2**31),
    st.integers(0, 6),
    modes,
    st.booleans(),
)
def test_step_follows_the_step_rules_for_any_ranking(seed, capacity, mode, contested):
    rng = np.random.default_rng(seed)
    experts = 6
    keep, admit = rng.permutation(experts), rng.permutation(experts)
    if contested:  # admission in keep order, as policies with contested candidates ask for
        admit = keep
    resident = np.zeros(experts, bool)
    resident[rng.permutation(experts)[: rng.integers(0, capacity + 1)]] = True
    demand, may, fetched = rng.random((3, experts)) < 0.7
    plan = Plan(keep.astype(np.int32), admit.astype(np.int32), may)
    outcome = step(resident, demand, plan, capacity, np, mode=mode, contested=contested, fetched=fetched)
    held, wanted = set(np.flatnonzero(resident)), set(np.flatnonzero(demand))
    entering = {e for e in wanted - held if may[e] and fetched[e]}
    if mode == "protect":
        loses = (lambda new, old: keep[new] < keep[old]) if contested else (lambda new, old: False)
        order = [e for e in np.argsort(-admit) if e in entering]
        admitted, evicted = reference.protect_step(held, wanted, capacity, np.argsort(keep).tolist(), order, loses)
    else:
        admitted, evicted = reference.select_step(held, entering, capacity, np.argsort(-keep).tolist())
    assert set(np.flatnonzero(outcome.admitted)) == admitted
    assert set(np.flatnonzero(outcome.evicted)) == evicted


def test_after_prefill_the_most_wanted_stay():
    counts = np.array([[3, 0, 5, 5, 1, 0]], np.int32)
    for capacity, expected in ((0, []), (1, [2]), (3, [0, 2, 3]), (6, [0, 2, 3, 4])):
        assert np.flatnonzero(retained_after_prefill(counts, capacity, np)).tolist() == expected


@pytest.mark.parametrize(
    "name", ["lru", "s3fifo:small=0.3", "static-block", "static-uniform:seed=3", "tide:tau=2", "status with successors"]
)
def test_capacities_may_differ_by_layer(name):
    policy = POLICIES[name]
    for seed in range(3):
        stream = make_stream(seed, 12)
        mixed = outcomes(policy, stream, np.array([[3], [9]]))
        for layer, capacity in enumerate((3, 9)):
            for ours, alone in zip(mixed, outcomes(policy, stream, capacity), strict=True):
                np.testing.assert_array_equal(ours.resident[layer], alone.resident[layer])
