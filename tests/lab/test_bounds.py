"""The clairvoyant rules against exhaustive search and against every policy."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from oled_jax.lab import BOUNDS, Stream, replay, rule_by_name
from oled_jax.lab.bounds import next_uses
from tests.lab.test_replay import CAUSAL, PLACING, capacities
from tests.lab.traces import EXPERTS, LAYERS, demands, traces

MIN, BELADY = BOUNDS["min-bypass"], BOUNDS["belady"]


def misses(stream: Stream, rule, capacity: int) -> int:
    return sum(replay(stream, rule, capacity).decode.misses)


def fewest(wanted: list[frozenset], capacity: int) -> int:
    """Fewest misses over everything that may be kept after every step: any ``capacity`` of the residents and wanted."""
    cost = {frozenset(): 0}
    for demand in wanted:
        reached: dict[frozenset, int] = {}
        for resident, so_far in cost.items():
            paid, pool = so_far + len(demand - resident), resident | demand
            for kept in map(frozenset, itertools.combinations(sorted(pool), min(capacity, len(pool)))):
                reached[kept] = min(paid, reached.get(kept, paid))
        cost = reached
    return min(cost.values())


@given(st.lists(st.frozensets(st.integers(0, 5), min_size=1, max_size=4), min_size=1, max_size=8), st.integers(1, 6))
def test_min_bypass_equals_exhaustive_search(wanted, capacity):
    stream = Stream(demands(*map(tuple, wanted), experts=6))
    assert misses(stream, MIN, capacity) == fewest(wanted, capacity)


@given(traces(), capacities, st.sampled_from([*(name for name in CAUSAL if name not in PLACING), "moe-infinity-lfu"]))
def test_no_policy_misses_less(trace, capacity, name):
    stream = Stream(trace)
    least, found = (replay(stream, rule, capacity).decode.misses for rule in (MIN, rule_by_name(name)))
    if name == "moe-infinity-lfu":  # its layers share their slots, which no layer's bound speaks of
        room = replay(stream, MIN, min(EXPERTS, capacity * LAYERS)).decode.misses
        assert np.less_equal(room, found).all()
    else:
        assert np.less_equal(least, found).all()


@given(traces(), capacities, st.sampled_from(PLACING))
def test_no_policy_that_places_experts_beforehand_misses_less_than_they_save(trace, capacity, name):
    """Each expert placed beforehand spares at most its first miss; where a layer has more slots than another, the
    bound must have as many."""
    stream, rule = Stream(trace), rule_by_name(name)
    slots = int(np.max(rule.slots(LAYERS, EXPERTS, capacity)))
    placed = rule.initial_residents(LAYERS, EXPERTS, rule.slots(LAYERS, EXPERTS, capacity)).sum(1)
    least, found = (replay(stream, each, c).decode.misses for each, c in ((MIN, slots), (rule, capacity)))
    assert np.less_equal(least - placed, found).all()


@given(traces(), capacities)
def test_an_interval_refresh_is_a_policy_like_any_other(trace, capacity):
    """For every period: nothing moves but what is wanted, and with all slots nothing is missed but first uses."""
    stream = Stream(trace)
    for tau in (1, 2, 4, 8, 16):
        found = replay(stream, rule_by_name(f"interval:tau={tau}"), capacity).decode
        assert found.speculative == (0,) * LAYERS and found.loads == found.misses
        assert misses(stream, rule_by_name(f"interval:tau={tau}"), EXPERTS) == 0  # they are there to begin with


@given(traces(), capacities)
def test_belady_misses_no_less(trace, capacity):
    stream = Stream(trace)
    assert misses(stream, MIN, capacity) <= misses(stream, BELADY, capacity)


@given(traces(most=8))
def test_more_room_never_misses_more_and_room_for_all_leaves_first_uses(trace):
    stream = Stream(trace)
    found = [misses(stream, MIN, capacity) for capacity in range(1, EXPERTS + 1)]
    assert found == sorted(found, reverse=True)
    assert found[-1] == misses(stream, BELADY, EXPERTS) == np.count_nonzero(stream.counts.any(0))


def test_belady_by_hand():
    """Two slots. 2 must enter and evicts 0 or 1, whichever is wanted later (0); the bound lets 2 pass instead."""
    stream = Stream(demands((0, 1), (2,), (1,), (0,), (1,), experts=3))
    assert misses(stream, BELADY, 2) == 4
    assert misses(stream, MIN, 2) == 3
    # The hits 0 and 1 stay, so that 2 has no place, although 2 is wanted next.
    stream = Stream(demands((0, 1), (0, 1, 2), (2,), experts=3))
    assert misses(stream, BELADY, 2) == 4
    assert misses(stream, MIN, 2) == 3


@given(traces(prefill=True), capacities)
def test_after_a_prompt_all_rules_stand_alike(trace, capacity):
    """What prefill leaves is nobody's decision, and from there on the bound holds again."""
    stream = Stream(trace, include_prefill=True)
    least = replay(stream, MIN, capacity)
    for rule in (BELADY, rule_by_name("lru")):
        other = replay(stream, rule, capacity)
        assert sum(least.decode.misses) + sum(least.prefill.misses) <= sum(other.decode.misses) + sum(
            other.prefill.misses
        )


def test_next_uses():
    stream = Stream(demands((0,), (1,), (0, 1), (2,), experts=4))
    assert next_uses(stream.counts)[:, 0].tolist() == [[2, 1, 3, 4], [2, 2, 3, 4], [4, 4, 3, 4], [4, 4, 4, 4]]
