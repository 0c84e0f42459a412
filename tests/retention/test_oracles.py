"""Policies against plain-Python oracles, written independently from the policies' definitions."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oled_jax.retention import policy_by_name
from oled_jax.retention.fixed_point import hashed
from tests.retention import reference
from tests.retention.streams import EXPERTS, LAYERS, SEQUENCES, capacities, make_stream, modes, run

ties = st.sampled_from(["id", "load", "hash"])


def events(stream, layer: int):
    """``stream`` as one layer's oracle sees it."""
    for index, forward in enumerate(stream):
        ids = forward.before.ids[layer]
        counts = {int(e): int(n) for e, n in zip(*np.unique(ids[ids >= 0], return_counts=True), strict=True)}
        deciding = (forward.sequence >= 0) & (forward.phase > 0)
        before, after = (tokens(routing, layer) for routing in (forward.before, forward.after))
        yield reference.Event(
            index,
            not deciding.any(),
            counts,
            before,
            after,
            forward.sequence.tolist(),
            forward.block.tolist(),
            deciding.tolist(),
        )


def tokens(routing, layer: int):
    listed = []
    for t, row in enumerate(routing.row):
        votes = {int(e): float(g) for e, g in zip(routing.ids[layer, t], routing.weights[layer, t], strict=True)}
        votes.pop(-1, None)
        listed.append((int(row), int(routing.status[t]), float(routing.confidence[t]), votes))
    return listed


def assert_agrees(policy, make_oracle, stream, capacity: int):
    """Same admissions and evictions, in every forward and layer."""
    oracles = []
    for layer in range(LAYERS):
        tie = policy.tie
        if tie == "hash":
            tie = dict(enumerate(hashed(policy.seed, 0, np.asarray(layer), EXPERTS, 1, np).tolist()))
        oracles.append((make_oracle(tie), set(), list(events(stream, layer))))
    for index, (_, _, (_, _, outcome)) in enumerate(run(policy, stream, capacity)):
        for layer, (oracle, resident, seen) in enumerate(oracles):
            admitted, evicted = oracle.step(resident, seen[index], capacity, policy.mode)
            assert set(np.flatnonzero(outcome.admitted[layer]).tolist()) == admitted
            assert set(np.flatnonzero(outcome.evicted[layer]).tolist()) == evicted
            oracle.after(seen[index], admitted, evicted)
            resident |= admitted
            resident -= evicted


long_streams = st.builds(make_stream, st.integers(0, 2**31), st.integers(1, 40))


@settings(max_examples=50)
@given(long_streams, capacities, modes, ties)
def test_lru(stream, capacity, mode, tie):
    policy = policy_by_name(f"lru:mode={mode},tie={tie},seed=5")
    assert_agrees(policy, lambda tie: reference.Lru(EXPERTS, tie), stream, capacity)


@settings(max_examples=50)
@given(long_streams, capacities, modes, ties)
def test_fifo(stream, capacity, mode, tie):
    policy = policy_by_name(f"fifo:mode={mode},tie={tie}")
    assert_agrees(policy, lambda tie: reference.Fifo(EXPERTS, tie), stream, capacity)


@settings(max_examples=50)
@given(long_streams, capacities, modes, ties, st.sampled_from(["step", "token"]))
def test_lfu(stream, capacity, mode, tie, weight):
    policy = policy_by_name(f"lfu:mode={mode},tie={tie},weight={weight}")
    assert_agrees(policy, lambda tie: reference.Lfu(EXPERTS, tie, weight), stream, capacity)


@settings(max_examples=50)
@given(long_streams, capacities, modes, ties, st.sampled_from([1, 2, 12]), st.sampled_from([0.0, 0.5, 1.0]))
def test_lfuda(stream, capacity, mode, tie, cap, ghost):
    policy = policy_by_name(f"lfuda:mode={mode},tie={tie},cap={cap},ghost={ghost}")
    assert_agrees(policy, lambda tie: reference.Lfuda(EXPERTS, tie, cap, ghost), stream, capacity)


@settings(max_examples=50)
@given(
    st.builds(make_stream, st.integers(0, 2**31), st.integers(1, 5), grid=st.sampled_from([2, 8])),
    capacities,
    modes,
    ties,
    st.sampled_from(["identity", "one"]),
    st.sampled_from([0.0, 0.25, 0.5]),
    st.sampled_from([0.0, 0.5]),
)
def test_oled(stream, capacity, mode, tie, w, rho_in, w_jc):
    options = f"w={w},rho_in={rho_in},rho_bnd=0.5,c_init=0.25,w_jc={w_jc}"
    policy = policy_by_name(f"oled:mode={mode},tie={tie},{options}")

    def oracle(tie):
        return reference.Oled(EXPERTS, tie, mode, w, rho_in, 0.5, 0.25, w_jc, SEQUENCES)

    assert_agrees(policy, oracle, stream, capacity)


@pytest.mark.parametrize("tie", ["id", "load", "hash"])
def test_the_tie_rule_matters_below_the_working_set(tie):
    """So that the agreement above is about ties too: with few slots, each rule keeps other experts."""
    stream = make_stream(0, 20)
    kept = {
        other: [d[2].resident.tolist() for _, _, d in run(policy_by_name(f"lru:tie={other}"), stream, 4)]
        for other in ("id", "load", "hash")
    }
    assert all(kept[tie] != kept[other] for other in kept if other != tie)
