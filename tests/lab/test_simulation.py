"""Replays on a machine: the link by hand, limits of bandwidth, host execution against a plain reference, bytes."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oled_jax.dispatch import LayerDemand
from oled_jax.errors import OledError
from oled_jax.lab import Stream, replay, rule_by_name
from oled_jax.lab.link import Link, Wish
from oled_jax.lab.timing import layer_times
from tests.lab.machines import CONFIG, EXPERT, setup
from tests.lab.test_replay import capacities
from tests.lab.test_speculation import PREFETCHING, total
from tests.lab.traces import EXPERTS, LAYERS, demands, random_trace, traces

PLAIN = [name for name in PREFETCHING if "oracle" not in name]
DISPATCH = ["all-device", "fiddler", "freetoken", "hybrimoe", "oled"]


class Places:
    """Takes every transfer, or those of some experts, and remembers them."""

    def __init__(self, *taken: int):
        self.taken, self.begun = taken, []

    def __call__(self, wish: Wish) -> bool:
        if self.taken and wish.expert not in self.taken:
            return False
        self.begun.append(wish.expert)
        return True


def wishes(*experts: int, forward: int = 1, layer: int = 0) -> list[Wish]:
    return [Wish(forward, (layer, place), layer, expert) for place, expert in enumerate(experts)]


def test_a_link_carries_one_after_another():
    link, places = Link(2.0), Places()
    link.advance(10.0, places)
    link.wish(wishes(3, 1, 2))
    link.advance(11.0, places)
    assert (places.begun, link.arriving.expert, link.busy_until) == ([3], 3, 12.0)
    link.advance(12.0, places)  # the next one begins after this moment
    assert (places.begun, link.arriving) == ([3], None)
    link.advance(15.0, places)
    assert (places.begun, link.arriving.expert, link.busy_until) == ([3, 1, 2], 2, 16.0)
    link.advance(20.0, places)
    assert (link.arriving, link.dropped) == (None, [])


def test_what_is_wanted_goes_first_and_waits_for_the_one_on_its_way():
    link, places = Link(2.0), Places()
    link.wish(wishes(3, 1))
    link.advance(1.0, places)
    link.demand(1.0, 4.0)
    assert (link.busy_until, link.arriving) == (6.0, None)
    link.advance(6.5, places)
    assert (places.begun, link.busy_until) == ([3, 1], 8.0)
    link.demand(7.0, 0.0)
    assert link.arriving.expert == 1  # nothing was wanted


def test_a_prediction_whose_time_has_come_is_dropped():
    link, places = Link(2.0), Places(5, 6)
    link.wish([*wishes(5, layer=0), *wishes(6, layer=1), *wishes(7, forward=2)])
    link.expire(1, 0)
    assert [wish.expert for wish in link.dropped] == [5]
    link.advance(9.0, places)
    assert places.begun == [6]  # nobody finds a place for 7
    link.wish(wishes(5, forward=3))
    link.replace(wishes(6, forward=3))
    assert [wish.expert for wish in link.dropped] == [5, 5]


def test_a_late_transfer_by_hand():
    """One slot, and a second expert in staging: a load takes 1.5 ms, a forward's rest 1 ms, attention 1 ms.

    Both are predicted after forward 0. One is resident, the other begins when the layer is done, and there is time
    for it: 2 ms. With 2.5 ms for a load it is on its way when it is wanted, and counts as late, not as a load; the
    layer waits for it 0.5 ms, and computes it in 0.1."""
    stream = Stream(demands((0, 1), (0, 1), experts=EXPERTS))
    one_layer = dataclasses.replace(CONFIG, num_hidden_layers=2)
    rule = rule_by_name("last-step:target=extra")
    for load, hits, late, extra in ((1.5e-3, 2, 0, 0.0), (2.5e-3, 1, 1, 0.6e-3)):
        found = replay(stream, rule, 1, setup=dataclasses.replace(setup(load), config=one_layer))
        traffic = found.traffic
        assert (traffic.hits[1, 0], traffic.late[1, 0], traffic.loads[1, 0]) == (hits, late, 0)
        assert (traffic.speculative.sum(), traffic.used.sum()) == (1, 1 - late)
        rest = found.setup.machine.step_seconds(found.setup.geometry)
        assert found.times.step[1] == pytest.approx(1e-3 + rest + extra, abs=1e-6)


@settings(max_examples=30)
@given(traces(), capacities, st.sampled_from([*PLAIN, "oracle-next", "commit-ahead", "moe-infinity", "finemoe:d=1"]))
def test_a_link_that_takes_no_time_is_no_link(trace, capacity, name):
    stream = Stream(trace)
    on_a_machine = name.replace("oracle-next", "oracle-next:timed=true,h=2")
    at_once = replay(stream, rule_by_name(on_a_machine.replace("timed=true", "timed=false")), capacity)
    timed = replay(stream, rule_by_name(on_a_machine), capacity, setup=setup(1e-9))
    fields = at_once.traffic._fields
    if name == "commit-ahead":  # what it predicts after a forward begins with the next one, or never
        fields = ("hits", "token_hits", "occupied", "loads", "late", "used")
    for field in fields:
        np.testing.assert_array_equal(getattr(at_once.traffic, field), getattr(timed.traffic, field), field)


@settings(max_examples=30)
@given(
    traces(prefill=True),
    st.booleans(),
    capacities,
    st.sampled_from([*PREFETCHING, "oracle-next:timed=true", "commit-ahead", "moe-infinity", "finemoe:d=1"]),
    st.sampled_from(DISPATCH),
    st.sampled_from([1e-4, 1e-3, 4e-3]),
)
def test_sums_agree(trace, include_prefill, capacity, name, dispatch, load):
    stream = Stream(trace, include_prefill=include_prefill)
    on = setup(load, host=5e-4, dispatch=dispatch)
    found = replay(stream, rule_by_name(name), capacity, setup=on)
    traffic, wanted = found.traffic, np.count_nonzero(stream.counts, axis=-1)
    np.testing.assert_array_equal(
        traffic.loads + traffic.late + traffic.late_fills + traffic.hosted, wanted - traffic.hits
    )
    assert traffic.speculative.sum() == traffic.used.sum() + traffic.late.sum() + traffic.wasted.sum()
    assert found.resident.sum() <= capacity * LAYERS
    assert not traffic.hosted[stream.prefill].any() and not found.times.step[stream.prefill].any()
    again = replay(stream, rule_by_name(name), capacity, setup=on)
    assert all(one.tobytes() == other.tobytes() for one, other in zip(traffic, again.traffic, strict=True))
    assert all(one.tobytes() == other.tobytes() for one, other in zip(found.times, again.times, strict=True))
    described = found.to_json(None)
    json.dumps(described, allow_nan=False)
    assert described["simulated_step_ms"] >= described["simulated_exposed_transfer_ms"] >= 0


def lru_reference(stream, capacity, on):
    """LRU under host dispatch with plain sets, a layer at a time: what is fetched may enter, what runs on the host may
    not. Loads and host runs, [N, L] each."""
    costs = on.machine.layer_costs(on.geometry, capacity)
    shape = len(stream), stream.num_layers
    loads, hosted = np.zeros(shape, int), np.zeros(shape, int)
    for layer in range(stream.num_layers):
        resident, last = set(), dict.fromkeys(range(stream.num_experts), -1)
        for index, counts in enumerate(stream.counts[:, layer].astype(int)):
            demand = set(np.flatnonzero(counts).tolist())
            missing = demand - resident
            is_in = lambda members: np.isin(np.arange(stream.num_experts), sorted(members))  # noqa: E731
            reuse = np.arange(stream.num_experts)[::-1].astype(np.int32)
            before = np.asarray([last[e] for e in range(stream.num_experts)])
            given = LayerDemand(counts, is_in(demand & resident), is_in(missing), reuse, before)
            to_device = set(np.flatnonzero(on.dispatch.split(given, costs, np).to_device).tolist())
            loads[index, layer], hosted[index, layer] = len(to_device), len(missing - to_device)
            leaving = sorted(resident - demand, key=lambda e: (last[e], -e))
            for expert in sorted(to_device):
                if len(resident) == capacity and leaving:
                    resident.remove(leaving.pop(0))
                if len(resident) < capacity:
                    resident.add(expert)
            last.update(dict.fromkeys(demand, index))
    return loads, hosted


@settings(max_examples=30)
@given(traces(), capacities, st.sampled_from(DISPATCH), st.sampled_from([2e-4, 1e-3]))
def test_lru_under_host_dispatch_equals_a_plain_reference(trace, capacity, dispatch, load):
    stream, on = Stream(trace), setup(load, host=3e-4, dispatch=dispatch)
    found = replay(stream, rule_by_name("lru"), capacity, setup=on)
    loads, hosted = lru_reference(stream, capacity, on)
    np.testing.assert_array_equal(found.traffic.loads, loads)
    np.testing.assert_array_equal(found.traffic.hosted, hosted)


@settings(max_examples=30)
@given(traces(), capacities, st.sampled_from(["lru", "oled", "min-bypass"]))
def test_all_device_counts_as_without_a_machine(trace, capacity, name):
    stream, rule = Stream(trace), rule_by_name(name)
    plain, timed = replay(stream, rule, capacity), replay(stream, rule, capacity, setup=setup())
    for ours, theirs in zip(plain.traffic, timed.traffic, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    # Without speculation nothing is left on the link from layer to layer, and times are those of the layers.
    on = timed.setup
    demand = stream.counts > 0
    hits = np.zeros_like(demand)
    for index in range(len(stream)):
        hits[index] = demand[index] & _resident_before(stream, rule, capacity, index)
    nothing = np.zeros(demand.shape, np.int32)
    given = LayerDemand(stream.counts, hits, demand & ~hits, nothing, nothing)
    costs = on.machine.layer_costs(on.geometry, capacity)
    times = layer_times(costs, given, on.dispatch.split(given, costs, np))
    expected = times.layer.sum(-1) + on.machine.step_seconds(on.geometry)
    np.testing.assert_allclose(timed.times.step, expected, rtol=1e-9)
    np.testing.assert_allclose(timed.times.exposed_transfer, times.exposed_transfer.sum(-1), atol=1e-12)


def _resident_before(stream, rule, capacity, index):
    """From a replay of what came before."""
    if not index:
        return np.zeros(stream.counts.shape[1:], bool)
    trace = stream.trace
    rows = slice(0, stream.forwards[index].rows.start)
    begun = dataclasses.replace(trace, **{name: array[rows] for name, array in trace.arrays().items()})
    return (
        replay(Stream(begun), rule, capacity).resident
        if rule.mode == "protect"
        else _clairvoyant(stream, rule, capacity, index)
    )


def _clairvoyant(stream, rule, capacity, index):
    keeper = rule.keeper(stream, np.full((LAYERS, 1), capacity, np.int32))
    resident = np.zeros(stream.counts.shape[1:], bool)
    for forward in stream.forwards[:index]:
        demand = stream.counts[forward.index] > 0
        resident = keeper.after(forward, slice(None), demand, resident, demand & ~resident)
    return resident


def test_bytes_and_times_of_a_run():
    trace = random_trace(2, 30)
    stream = Stream(trace)
    on = setup(host=2e-4, dispatch="fiddler")
    found = replay(stream, rule_by_name("last-step"), 3, setup=on)
    described, traffic = found.to_json(None), found.traffic
    assert described["host_runs"] > 0 and described["background_loads"] > 0
    assert described["demand_bytes"] == EXPERT * traffic.loads.sum()
    assert described["background_bytes"] == EXPERT * traffic.background.sum()
    assert described["speculative_wasted_bytes"] == EXPERT * traffic.wasted.sum()
    handed = ((traffic.hosted > 0).sum(1) * stream.tokens).sum()
    assert described["activation_bytes"] == handed * 2 * CONFIG.hidden_size * 2
    commits = stream.commits(~stream.prefill)
    assert described["generated_tokens"] == commits > 0
    kinds = ("demand", "speculative_used", "speculative_late", "speculative_wasted", "background", "activation")
    assert described["bytes_per_token"] == sum(described[f"{kind}_bytes"] for kind in kinds) / commits
    assert described["simulated_tpot_ms"] == pytest.approx(1e3 * found.times.step.sum() / commits)
    assert described["simulated_regret_to_full_residency"] > 0
    assert replay(stream, rule_by_name("lru"), EXPERTS, setup=setup(1e-9)).to_json(None)[
        "simulated_regret_to_full_residency"
    ] == pytest.approx(0, abs=0.05)


def test_hits_may_run_on_the_host_too():
    stream = Stream(random_trace(2, 30))
    for option, more in (("host_hits=true", True), ("host_hits=false", False)):
        on = setup(1e-6, host=1.5e-4, dispatch=f"hybrimoe:{option}")
        slow = dataclasses.replace(on.machine.device, memory_bandwidth=EXPERT / 1e-4)  # 100 us for a hit
        on = dataclasses.replace(on, machine=dataclasses.replace(on.machine, device=slow))
        traffic = replay(stream, rule_by_name("static-uniform"), EXPERTS, setup=on).traffic
        assert not traffic.hosted.any()  # everybody is there from the start
        assert traffic.handed.any() == more


def test_generated_tokens_are_those_of_the_answers_if_the_trace_tells():
    trace = random_trace(2, 30)
    numbers = np.unique(trace.sequence).tolist()
    entries = [{"sequence": number, "generated_tokens": 10 + number} for number in numbers]
    told = Stream(dataclasses.replace(trace, metadata={"sequences": entries}))
    assert told.generated_tokens(~told.prefill) == sum(entry["generated_tokens"] for entry in entries)
    of_first = told.batches == 0
    first = {number for forward in told.forwards for number in trace.sequence[forward.rows] if of_first[forward.index]}
    assert told.generated_tokens(of_first) == sum(10 + number for number in first)
    partly = Stream(dataclasses.replace(trace, metadata={"sequences": entries[1:]}))
    assert partly.generated_tokens(~partly.prefill) == partly.commits(~partly.prefill)


def test_a_setup_of_another_model():
    stream = Stream(random_trace(0, 5))
    other = dataclasses.replace(setup(), config=dataclasses.replace(CONFIG, num_hidden_layers=9))
    with pytest.raises(OledError, match="trace has 2 layers of 8 experts, but the model has 8 of 8"):
        replay(stream, rule_by_name("lru"), 3, setup=other)
    with pytest.raises(OledError, match=r"oracle-next:timed=true needs a machine to be timed on \(--machine\)"):
        replay(stream, rule_by_name("oracle-next:timed=true"), 3)
    assert total(replay(stream, rule_by_name("oracle-next:timed=true"), 3, setup=setup()), "requests") > 0
