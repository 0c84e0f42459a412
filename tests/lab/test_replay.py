"""Replay: counters by hand, equal decisions of the fast and the general way, and what every replay must satisfy."""

import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oled_jax.errors import OledError
from oled_jax.lab import Stream, gap_closure, replay, rule_by_name, rule_names
from oled_jax.lab.keeping import LruKeeper
from oled_jax.lab.rules import split_rules
from oled_jax.retention import Table, policy_names
from oled_jax.retention.frequency import StaticFrequency
from tests.lab.traces import EXPERTS, LAYERS, demands, random_trace, traces

capacities = st.integers(1, EXPERTS)
# Every policy that needs no table, with some parameters.
CAUSAL = [
    *(name for name in policy_names() if name not in ("static-frequency", "fiddler")),
    *("lru:tie=load", "lru:mode=select", "random:seed=3", "oled:rho_in=0.5", "oled:mode=select", "status:mode=protect"),
]
# They place experts beforehand, or keep a set: not from empty slots, or not whoever is wanted.
PLACING = [name for name in CAUSAL if name.startswith(("static", "tide", "interval", "mixtral-tide"))]


def test_lru_by_hand():
    """Two slots: 0 and 1 enter; 2 enters in place of 0; two hits; 3 finds no place, since both hits stay."""
    trace = demands((0, 1, 1), (1, 2), (1, 1, 2), (1, 2, 3), experts=4)
    result = replay(Stream(trace), rule_by_name("lru"), 2)
    counters = result.decode
    assert (counters.forwards, counters.requests, counters.hits) == (4, (9,), (5,))
    assert (counters.token_requests, counters.token_hits) == ((11,), (6,))
    assert (counters.misses, counters.loads) == ((4,), (4,))
    assert (counters.possible, counters.occupied) == ((8,), (6,))
    assert result.resident.tolist() == [[False, True, True, False]]
    found = result.to_json(None)
    assert (found["policy"], found["capacity"], found["mode"], found["speculative_loads"]) == ("lru", 2, "protect", 0)
    assert found["working_set"] == 9 / 4 and found["capacity_per_working_set"] == 2 / (9 / 4)
    assert (found["u_ideal"], found["u_slot"], found["u_res"]) == (5 / 8, 5 / 8, 5 / 6)
    assert [(step["step"], step["requests"], step["misses"]) for step in found["steps"]] == [
        (0, 2, 2),
        (1, 2, 1),
        (2, 2, 0),
        (3, 3, 1),
    ]
    assert found["prefill"] is None and found["gap_closure"] is None
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize("name", ["lru", "fifo", "oled", "min-bypass"])
def test_a_prompt_leaves_the_experts_of_most_tokens(name):
    """2 and 0 stay after the first chunk; after the second 1, and 2 before 3 by id."""
    trace = demands((2, 2, 2, 0, 0, 1), (1, 1, 2, 3), (2, 3), experts=4)
    trace.phase[:2] = 0
    result = replay(Stream(trace, include_prefill=True), rule_by_name(name), 2)
    assert result.traffic.occupied[:, 0].tolist() == [0, 2, 2]
    assert result.traffic.hits[:, 0].tolist() == [0, 1, 1]
    assert (result.prefill.requests, result.prefill.hits) == ((6,), (1,))
    assert (result.decode.requests, result.decode.hits) == ((2,), (1,))
    alone = replay(Stream(trace), rule_by_name(name), 2)
    assert (alone.decode.hits, alone.prefill.forwards) == ((0,), 0)


@given(
    traces(prefill=True),
    st.booleans(),
    capacities,
    st.sampled_from(["id", "load"]),
    st.sampled_from(["protect", "select"]),
)
def test_lru_decides_as_the_general_way(trace, include_prefill, capacity, tie, mode):
    rule, stream = rule_by_name(f"lru:tie={tie},mode={mode}"), Stream(trace, include_prefill=include_prefill)
    assert LruKeeper.serves(rule) and not LruKeeper.serves(rule_by_name("lru:tie=hash"))
    fast = replay(stream, rule, capacity)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LruKeeper, "serves", staticmethod(lambda policy: False))
        general = replay(stream, rule, capacity)
    for ours, theirs in zip(fast.traffic, general.traffic, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(fast.resident, general.resident)


@given(traces(prefill=True), capacities, st.sampled_from(CAUSAL))
def test_sums_agree(trace, capacity, name):
    stream = Stream(trace, include_prefill=True)
    result = replay(stream, rule_by_name(name), capacity)
    decode, prefill = result.decode, result.prefill
    for each in (decode, prefill):
        assert np.less_equal(each.hits, each.possible).all() and np.less_equal(each.possible, each.requests).all()
        assert np.less_equal(each.hits, each.occupied).all()
        assert np.less_equal(each.occupied, capacity * each.forwards).all()
        assert np.less_equal(each.token_hits, each.token_requests).all()
    assert decode.forwards + prefill.forwards == len(stream)
    assert sum(decode.requests) + sum(prefill.requests) == np.count_nonzero(stream.counts)
    steps = result.by_step()
    assert sum(step.requests for step in steps) == sum(decode.requests)
    assert sum(step.hits for step in steps) == sum(decode.hits)
    assert sum(step.forwards for step in steps) == decode.forwards
    assert (result.resident.sum(1) <= capacity).all()


@given(traces(), st.sampled_from([name for name in CAUSAL if name not in ("ondemand", *PLACING)]))
def test_room_for_all_experts_leaves_first_uses(trace, name):
    stream = Stream(trace)
    misses = sum(replay(stream, rule_by_name(name), EXPERTS).decode.misses)
    assert misses == np.count_nonzero(stream.counts.any(0))


@given(traces(), capacities)
def test_ondemand_never_hits(trace, capacity):
    result = replay(Stream(trace), rule_by_name("ondemand"), capacity)
    assert not result.traffic.hits.any() and not result.resident.any()


@given(traces(most=10))
def test_lru_in_mode_select_never_misses_more_with_more_room(trace):
    stream, rule = Stream(trace), rule_by_name("lru:mode=select")
    misses = [sum(replay(stream, rule, capacity).decode.misses) for capacity in range(1, EXPERTS + 1)]
    assert misses == sorted(misses, reverse=True)


def test_a_policy_may_place_experts_beforehand():
    counts = np.random.default_rng(0).integers(0, 9, (LAYERS, EXPERTS))
    stream, rule = Stream(random_trace(0, 12)), StaticFrequency(counts=Table(counts))
    result = replay(stream, rule, 3)
    kept = rule.initial_residents(LAYERS, EXPERTS, 3)
    np.testing.assert_array_equal(result.resident, kept)
    np.testing.assert_array_equal(result.traffic.hits, ((stream.counts > 0) & kept).sum(-1))
    with pytest.raises(OledError, match="counts has shape"):
        replay(stream, StaticFrequency(counts=Table(counts[:1])), 3)


@pytest.mark.parametrize("capacity", [0, -1, EXPERTS + 1, 2.0, True, "3"])
def test_capacities_that_are_none(capacity):
    with pytest.raises(OledError, match=f"give 1 to {EXPERTS}, the experts of a layer"):
        replay(Stream(random_trace(0, 3)), rule_by_name("lru"), capacity)


def test_progress_is_told():
    told = []
    replay(Stream(random_trace(0, 200)), rule_by_name("lru"), 3, told.append)
    assert told == sorted(told) and len(told) > 2 and told[-1] <= 200


def test_gap_closure():
    assert gap_closure(80, 100, 60, 1000) == 0.5
    assert gap_closure(110, 100, 60, 1000) == -0.25
    assert gap_closure(100, 100, 90, 1000) == 0
    assert gap_closure(100, 100, 91, 1000) is None
    assert gap_closure(10, 10, 10, 10) is None


def test_names():
    assert {"lru", "oled", "min-bypass", "belady"} <= set(rule_names())
    for name in set(rule_names()) - {"static-frequency", "fiddler"}:
        assert rule_by_name(name).label == name
    with pytest.raises(OledError, match=r"unknown policy 'lruu': the policies are .*lru,.*min-bypass, belady"):
        rule_by_name("lruu:tie=id")
    with pytest.raises(OledError, match="min-bypass has no parameters"):
        rule_by_name("min-bypass:tie=id")
    with pytest.raises(OledError, match="tie is 'x'"):
        rule_by_name("lru:tie=x")


def test_a_list_of_policies():
    assert list(split_rules("lru")) == ["lru"]
    assert list(split_rules("lru,oled:w=one,rho_in=0.5,fifo,lru:tie=hash,seed=3")) == [
        "lru",
        "oled:w=one,rho_in=0.5",
        "fifo",
        "lru:tie=hash,seed=3",
    ]
    assert list(split_rules("a=b,lru")) == ["a=b", "lru"]


def test_the_laboratory_runs_without_jax():
    code = "import sys, oled_jax.lab, oled_jax.cli.replay; assert not {'jax', 'jaxlib', 'flax'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
