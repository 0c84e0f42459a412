"""Prefetching: slots exchanged by hand, closed forms, a plain reference, and what every prefetcher must satisfy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oled_jax.errors import OledError
from oled_jax.lab import Stream, replay, rule_by_name
from oled_jax.lab.keeping import keeper_of
from oled_jax.lab.prefetch import exchange, seat
from oled_jax.lab.rules import Speculative, without_prefetching
from oled_jax.lab.simulation import Simulation
from tests.lab.test_replay import CAUSAL, capacities
from tests.lab.traces import EXPERTS, demands, traces

PREFETCHING = [
    "last-step",
    "last-step:m=3",
    "last-step:evict_predicted=any",
    "last-step:evict_predicted=never,max_prefetch=1",
    "last-step:target=extra,m=2",
    "oled:rho_in=0.5+last-step",
    "lfuda+last-step:m=2",
    "lru:mode=select+last-step",
    "oracle-next",
    "oracle-next:h=3",
    "status+oracle-next:target=extra",
]


def total(result, name: str) -> int:
    return sum(getattr(result.decode, name))


@given(traces(), capacities)
def test_an_oracle_leaves_what_there_is_no_room_for(trace, capacity):
    """With the next forward known and a free link, a layer misses its wanted experts beyond C, and its first ones."""
    stream = Stream(trace)
    wanted = np.count_nonzero(stream.counts, axis=-1)
    expected = np.maximum(0, wanted - capacity).sum() + np.minimum(capacity, wanted[0]).sum()
    assert total(replay(stream, rule_by_name("oracle-next"), capacity), "misses") == expected


@given(traces(), st.integers(1, 3))
def test_fetching_the_last_step_again_is_idle_where_all_of_it_fits(trace, m):
    stream = Stream(trace)
    room = min(EXPERTS, m * int(np.count_nonzero(stream.counts, axis=-1).max()))
    found = replay(stream, rule_by_name(f"last-step:m={m}"), room)
    lru = replay(stream, rule_by_name("lru"), room)
    for speculative in ("speculative", "used", "wasted", "late", "background"):
        assert total(found, speculative) == 0
    np.testing.assert_array_equal(found.traffic.hits, lru.traffic.hits)


@given(traces(prefill=True), capacities, st.sampled_from(CAUSAL), st.booleans())
def test_without_a_prefetcher_the_long_way_counts_as_the_short_one(trace, capacity, name, include_prefill):
    stream, rule = Stream(trace, include_prefill=include_prefill), rule_by_name(name)
    simulation = Simulation(stream, keeper_of(rule, stream, capacity), capacity)
    for forward in stream.forwards:
        simulation.serve(forward)
    simulation.finish()
    plain = replay(stream, rule, capacity)
    for ours, theirs in zip(simulation.traffic, plain.traffic, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(simulation.resident, plain.resident)


@given(traces(prefill=True), st.booleans(), capacities, st.sampled_from(PREFETCHING))
def test_sums_agree(trace, include_prefill, capacity, name):
    stream = Stream(trace, include_prefill=include_prefill)
    result = replay(stream, rule_by_name(name), capacity)
    traffic = result.traffic
    assert traffic.speculative.sum() == traffic.used.sum() + traffic.wasted.sum()
    assert (traffic.used <= traffic.hits).all() and (traffic.hits >= 0).all()
    np.testing.assert_array_equal(traffic.loads, np.count_nonzero(stream.counts, axis=-1) - traffic.hits)
    assert traffic.occupied.max() <= capacity and result.resident.sum(1).max() <= capacity
    assert not traffic.late.any() and not traffic.hosted.any() and not traffic.background.any()
    again = replay(stream, rule_by_name(name), capacity)
    assert all(one.tobytes() == other.tobytes() for one, other in zip(traffic, again.traffic, strict=True))


@given(
    traces(),
    capacities,
    st.sampled_from(["lru", "oled", "lfuda", "fifo"]),
    st.sampled_from(["last-step", "oracle-next:h=2"]),
)
def test_what_is_fetched_into_staging_changes_no_retention(trace, capacity, retention, prefetcher):
    """Every transfer used from there saves a load, or several while it is predicted again; nothing else differs."""
    stream = Stream(trace)
    joined = f"{retention}+{prefetcher}{',' if ':' in prefetcher else ':'}target=extra"
    found, plain = (replay(stream, rule_by_name(name), capacity) for name in (joined, retention))
    np.testing.assert_array_equal(found.resident, plain.resident)
    np.testing.assert_array_equal(found.traffic.occupied, plain.traffic.occupied)
    assert (found.traffic.hits >= plain.traffic.hits + found.traffic.used).all()
    assert found.traffic.used.any() or found.traffic.hits.sum() == plain.traffic.hits.sum()
    assert found.decode.extra_slots == capacity and plain.decode.extra_slots == 0


def test_last_step_by_hand():
    """Two slots, four wanted at once; LRU keeps 0 and 1. Most tokens are on 3 and 2, which take their places unless
    nobody yields; the next forward wants 3 and 0."""
    stream = Stream(demands((0, 1, 1, 2, 2, 2, 3, 3, 3, 3), (3, 0), experts=5))
    for options, hits, speculative, wasted in (
        ("", 1, 2, 1),
        (":evict_predicted=any", 1, 2, 1),
        (":evict_predicted=never", 1, 0, 0),
        (":max_prefetch=1", 1, 1, 0),
        (":target=extra", 2, 2, 1),
    ):
        found = replay(stream, rule_by_name(f"last-step{options}"), 2)
        assert total(found, "hits") == hits, options
        first = found.traffic.speculative[0, 0]
        assert (first, found.traffic.wasted[1, 0] > 0) == (speculative, wasted > 0), options


def test_exchange_by_hand():
    """Slots for three; 0, 1, 2 are there, worth 5, 6, 7; 3 and 4 ask, scores 2 and 4; 0 is predicted with score 3."""
    resident = np.array([True, True, True, False, False])
    candidates = np.array([False, False, False, True, True])
    scores, worth = np.array([3, 0, 0, 2, 4]), np.array([5, 6, 7, 0, 0])
    nobody = np.zeros(5, bool)

    def after(evict, pinned=nobody, capacity=3, scores=scores):
        return np.flatnonzero(
            exchange(resident, candidates, scores, worth, pinned, np.array([capacity]), evict)
        ).tolist()

    assert after("lower") == after("never") == after("any") == [0, 3, 4]
    assert after("lower", capacity=4) == [0, 2, 3, 4]
    assert after("lower", capacity=5) == [0, 1, 2, 3, 4]
    all_predicted = np.array([3, 3, 1, 2, 4])
    assert after("never", scores=all_predicted) == [0, 1, 2]
    assert after("lower", scores=all_predicted) == [0, 1, 4]  # 4 replaces 2, and 3 is no better than 0 or 1
    assert after("any", scores=all_predicted) == [2, 3, 4]
    assert after("any", pinned=np.array([True, True, False, False, False])) == [0, 1, 4]
    assert exchange(resident, nobody, scores, worth, nobody, np.array([3]), "any") is resident


@given(st.data())
def test_seats_taken_one_by_one_are_an_exchange(data):
    """A transfer that begins later finds the place that it would have found with the others."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**31)))
    slots, evict = int(rng.integers(1, EXPERTS + 1)), data.draw(st.sampled_from(["lower", "any", "never"]))
    resident = np.zeros(EXPERTS, bool)
    resident[rng.permutation(EXPERTS)[: rng.integers(0, slots + 1)]] = True
    scores, worth, pinned = rng.integers(0, 4, EXPERTS), rng.permutation(EXPERTS), rng.random(EXPERTS) < 0.2
    candidates = ~resident & (scores > 0)
    at_once = exchange(resident, candidates, scores, worth, pinned, np.array([slots]), evict)
    one_by_one, brought = resident.copy(), pinned.copy()
    for expert in np.argsort(-scores, kind="stable").tolist():
        if candidates[expert]:
            leaves = seat(one_by_one, expert, scores, worth, brought, slots, evict)
            if leaves is not None:
                one_by_one[leaves], one_by_one[expert], brought[expert] = False, True, True
    np.testing.assert_array_equal(at_once, one_by_one)


def test_names():
    for name in ("last-step", "last-step:target=extra,m=2", "oled:w=one,rho_in=0.5+last-step:m=2", "oracle-next:h=4"):
        rule = rule_by_name(name)
        assert rule.label == name and isinstance(rule, Speculative)
    assert rule_by_name("lru+last-step").label == "last-step"
    assert rule_by_name("lru:tie=load + last-step").label == "lru:tie=load+last-step"
    assert without_prefetching(rule_by_name("oled+last-step")) == rule_by_name("oled")
    for text, expected in (
        ("lru+ahead", "unknown prefetcher 'ahead': the prefetchers are last-step, oracle-next"),
        ("lru + gate-ahead:theta=2", "cannot be replayed: it applies the next layer's router to hidden states"),
        ("gate-ahead", "cannot be replayed: it applies"),
        ("min-bypass+last-step", "'min-bypass' takes no prefetcher"),
        ("last-step+last-step", "'last-step' takes no prefetcher"),
        ("last-step:k=1", "it has no parameter 'k'; its parameters are target, evict_predicted, max_prefetch, m"),
        ("last-step:m=1.5", "m is '1.5'; it must be an integer from 1 to 64"),
        ("last-step:m=0", "m is 0; it must be an integer from 1 to 64"),
        ("last-step:target=slot", "target is 'slot'; it can be shared, extra"),
        ("last-step:m=1,m=2", "m is given twice"),
        ("last-step:m", "'m' is not of the form parameter=value"),
        ("oracle-next:evict_predicted=any", "evict_predicted is 'any'; it can be never"),
    ):
        with pytest.raises(OledError, match=expected.replace("+", r"\+")):
            rule_by_name(text)
