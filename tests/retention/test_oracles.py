"""Policies against plain-Python oracles, written independently from the policies' definitions."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oled_jax.retention import policy_by_name
from oled_jax.retention.fixed_point import hashed
from oled_jax.retention.policy import TiedPolicy
from tests.retention import reference, reference_blocks, reference_counting
from tests.retention.streams import CHOSEN, EXPERTS, LAYERS, SEQUENCES, capacities, make_stream, modes, run

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
            forward.step.tolist(),
            forward.phase.tolist(),
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
        tie = policy.tie if isinstance(policy, TiedPolicy) else "id"
        if tie == "hash":
            tie = dict(enumerate(hashed(policy.seed, 0, np.asarray(layer), EXPERTS, 1, np).tolist()))
        start = policy.initial_residents(LAYERS, EXPERTS, capacity)[layer]
        oracles.append((make_oracle(tie), set(np.flatnonzero(start).tolist()), list(events(stream, layer))))
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


@settings(max_examples=30)
@given(long_streams, capacities, modes, ties, st.sampled_from(["step", "token"]))
def test_variants_of_lfu(stream, capacity, mode, tie, weight):
    for name, oracle in (("lfu-incache", reference_counting.LfuInCache), ("lfru", reference_counting.Lfru)):
        policy = policy_by_name(f"{name}:mode={mode},tie={tie},weight={weight}")
        assert_agrees(policy, lambda tie, oracle=oracle: oracle(EXPERTS, tie, weight), stream, capacity)


exact_streams = st.builds(make_stream, st.integers(0, 2**31), st.integers(1, 25), grid=st.sampled_from([2, 8]))


@settings(max_examples=40)
@given(exact_streams, capacities, modes, ties, st.sampled_from([1, 3]), st.sampled_from(["identity", "one"]))
def test_lfuda_conf(stream, capacity, mode, tie, cap, w):
    policy = policy_by_name(f"lfuda-conf:mode={mode},tie={tie},cap={cap},w={w},c_init=0.25")
    assert_agrees(policy, lambda tie: reference_counting.LfudaConf(EXPERTS, tie, cap, 0.5, w, 0.25), stream, capacity)


@settings(max_examples=60)
@given(st.builds(make_stream, st.integers(0, 2**31), st.integers(1, 60)), capacities, modes, ties)
def test_s3fifo(stream, capacity, mode, tie):
    policy = policy_by_name(f"s3fifo:mode={mode},tie={tie},small=0.25")
    share = max(1, int(capacity * 0.25 + 0.5))
    assert_agrees(policy, lambda tie: reference_counting.S3Fifo(EXPERTS, tie, share, capacity), stream, capacity)


@settings(max_examples=40)
@given(exact_streams, capacities, modes, ties, st.sampled_from([0.5, 0.25]))
def test_hybrimoe_and_dali(stream, capacity, mode, tie, alpha):
    policy = policy_by_name(f"hybrimoe:mode={mode},tie={tie},alpha={alpha}")
    assert_agrees(policy, lambda tie: reference_counting.HybriMoe(EXPERTS, tie, alpha, CHOSEN), stream, capacity)
    policy = policy_by_name(f"dali:mode={mode},tie={tie},alpha={alpha}")
    assert_agrees(policy, lambda tie: reference_counting.Dali(EXPERTS, tie, alpha), stream, capacity)


@settings(max_examples=40)
@given(long_streams, capacities, modes, ties, st.integers(1, 4))
def test_tide(stream, capacity, mode, tie, tau):
    for name in (f"tide:tau={tau},", f"interval:tau={tau},", f"tide-paper:tau={tau},", "mixtral-tide:"):
        policy = policy_by_name(f"{name}mode={mode},tie={tie}")
        period = 1 if name == "mixtral-tide:" else tau

        def oracle(tie, period=period, name=name):
            return reference_counting.Tide(EXPERTS, tie, capacity, period, name.startswith("tide-paper"))

        assert_agrees(policy, oracle, stream, capacity)


@settings(max_examples=40)
@given(long_streams, capacities, modes)
def test_static_block(stream, capacity, mode):
    policy = policy_by_name(f"static-block:mode={mode}")
    assert_agrees(policy, lambda tie: reference_blocks.StaticBlock(EXPERTS, SEQUENCES), stream, capacity)


@settings(max_examples=50)
@given(
    exact_streams,
    capacities,
    modes,
    ties,
    st.sampled_from([0.0, 0.5]),
    st.sampled_from([0.5, 1.0, 3.0]),
    st.sampled_from([0.2, 1.0]),
)
def test_oled_steps(stream, capacity, mode, tie, rho_in, rho_r, pace):
    options = f"rho_in={rho_in},rho_r={rho_r},pace={pace},c_init=0.25,eta=0.5"
    policy = policy_by_name(f"oled-steps:mode={mode},tie={tie},{options}")

    def oracle(tie):
        return reference_blocks.OledSteps(EXPERTS, tie, mode, rho_in, rho_r, 0.5, pace, SEQUENCES)

    assert_agrees(policy, oracle, stream[:6] if rho_in else stream, capacity)


@settings(max_examples=50)
@given(exact_streams, capacities, modes, ties, st.sampled_from(["lru", "oled"]), st.sampled_from([0.0, 0.5]))
def test_boundary(stream, capacity, mode, tie, base, rho_in):
    options = f"base={base},rho_in={rho_in},share=0.5,eta=0.25,c_init=0.25"
    policy = policy_by_name(f"boundary:mode={mode},tie={tie},{options}")

    def oracle(tie):
        guarded = int(capacity * 0.5 + 0.5)
        return reference_blocks.Boundary(EXPERTS, tie, mode, base, rho_in, guarded, 0.25, SEQUENCES)

    assert_agrees(policy, oracle, stream[:6] if rho_in else stream, capacity)


@settings(max_examples=50)
@given(exact_streams, capacities, modes, ties, st.sampled_from(["votes", "popular", "auto"]))
def test_status(stream, capacity, mode, tie, others):
    policy = policy_by_name(f"status:mode={mode},tie={tie},others={others},masked=0.25,eta=0.25")

    def oracle(tie):
        return reference_blocks.Status(EXPERTS, tie, mode, 0.25, 0.25, others, capacity, SEQUENCES)

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
