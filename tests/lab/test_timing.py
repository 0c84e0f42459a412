"""Simulated layer times: by hand, against the recursion one expert after another, and packed against E wide."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oled_jax.dispatch import LayerCosts, LayerDemand, dispatch_by_name, finish_times
from oled_jax.lab.timing import layer_times, packed_layer_times
from tests.dispatch_reference import demands, host_finish, layer_costs, rounds

TICKS = 1e-8


def in_ticks(times):
    """The fields in ticks, checked to be whole."""
    ticks = [np.asarray(amount) / TICKS for amount in times]
    for amount in ticks:
        np.testing.assert_allclose(amount, np.rint(amount), atol=1e-6)
    return type(times)(*(np.rint(amount).astype(int).tolist() for amount in ticks))


def packed(costs, **counted):
    fetched = np.asarray(counted.pop("fetched", [[0]]), np.int64)
    counted = {name: np.asarray(value) for name, value in counted.items()}
    return in_ticks(
        packed_layer_times(costs, hits=np.asarray([0]), hit_tokens=np.asarray([0]), fetched=fetched, **counted)
    )


COSTS = LayerCosts(
    hits_start=10,
    hit=2,
    hit_token=1,
    device_expert=3,
    device_token=1,
    load=10,
    load_shared=12,
    host_start=20,
    host_expert=5,
    host_expert_shared=6,
    host_token=2,
    attention=100,
    join=7,
)


def test_a_layer_by_hand():
    times = packed_layer_times(
        COSTS,
        hits=np.asarray([2]),
        hit_tokens=np.asarray([5]),
        fetched=np.asarray([[4, 1]]),
        hosted=np.asarray([1]),
        hosted_tokens=np.asarray([2]),
    )
    # T_hit 19; lands at 12, ends 26; lands at 24, ends 30. Host 20 + 6 + 4 = 30. Without transfers 19 + 7 + 4 = 30.
    assert in_ticks(times) == ([137], [30], [30], [0], [0], [24])


def test_exposed_transfer_is_what_loading_adds_to_the_layer():
    # Lands at 10, 20, 30; ends 14, 24, 34. Without transfers 10 + 3 * 4 = 22.
    assert packed(COSTS, fetched=[[1, 1, 1]]) == ([141], [34], [0], [12], [0], [30])
    # The host takes 20 + 6 * 6 + 2 * 6 = 68 either way: nothing of the transfers shows.
    times = packed(COSTS, fetched=[[1, 1, 1]], hosted=[6], hosted_tokens=[6])
    assert times.exposed_transfer == [0] and times.exposed_host == [68 - 40]


def test_one_side_after_the_other():
    # Device 12 + 4 = 16 beside 20 + 8: 28; one after the other 44, of which transfers take 2.
    assert packed(COSTS, fetched=[[1]], hosted=[1], hosted_tokens=[1]).layer == [100 + 28 + 7]
    times = packed(COSTS, fetched=[[1]], hosted=[1], hosted_tokens=[1], serial=True)
    assert times.layer == [100 + 44 + 7] and times.exposed_transfer == [2]


def test_a_backlog_delays_what_is_fetched_and_nothing_else():
    # Lands at 50 + 10 and 50 + 20.
    assert packed(COSTS, fetched=[[1, 1]], backlog=50 * TICKS).device == [74]
    assert packed(COSTS, backlog=50 * TICKS).device == [10]
    assert packed(COSTS, fetched=[[1, 1]], backlog=-1.0) == packed(COSTS, fetched=[[1, 1]])


def test_a_late_expert_lands_with_the_backlog_and_uses_no_link():
    # 6 tokens land at 50, ending 59; the next lands at 60 and ends 64.
    times = packed(COSTS, fetched=[[1]], late_tokens=[6], backlog=50 * TICKS)
    assert times.device == [64] and times.link == [10]
    assert packed(COSTS, late_tokens=[6], backlog=50 * TICKS).device == [59]
    # All of it was waiting: 10 + 9 without transfers.
    assert packed(COSTS, late_tokens=[6], backlog=50 * TICKS).exposed_transfer == [40]


def test_without_overlap_hits_transfers_and_experts_add_up():
    costs = LayerCosts(hits_start=10, device_expert=3, load=10, load_shared=10, overlaps=False)
    assert packed(costs, fetched=[[1, 1]]).device == [10 + 2 * 13]
    assert packed(costs, fetched=[[1, 1]], backlog=25 * TICKS).device == [25 + 2 * 13]
    assert packed(costs, fetched=[[1]], late_tokens=[1], backlog=25 * TICKS).device == [25 + 3 + 13]


def expected(costs, demand, dispatch, backlog, late):
    """``T_dev`` and ``T_host``, one expert after another."""
    hits = demand.counts[demand.hits & ~dispatch.to_host]
    hosted = demand.counts[dispatch.to_host].tolist()
    sent = sorted(np.flatnonzero(dispatch.to_device), key=lambda expert: -dispatch.link_rank[expert])
    load = costs.load_shared if hosted else costs.load
    done = costs.hits_start + costs.hit * len(hits) + costs.hit_token * int(hits.sum())
    if sent or late is not None:
        done = done if costs.overlaps else max(done, backlog)
    link = backlog
    if late is not None:
        done = max(done, link) + costs.device_expert + costs.device_token * int(demand.counts[late])
    for index, expert in enumerate(sent):
        more = rounds(costs, len(hits), index + 1) - rounds(costs, len(hits), index)
        link += load
        done = max(done, link) if costs.overlaps else done + load
        done += costs.device_expert + costs.device_token * int(demand.counts[expert]) + more * costs.round
    return done, host_finish(costs, hosted, costs.host_expert_shared if sent else costs.host_expert)


@given(
    costs=layer_costs(),
    layers=st.lists(demands(), min_size=1, max_size=3),
    text=st.sampled_from(("all-device", "oled", "hybrimoe:host_hits=true", "freetoken")),
    backlog=st.integers(0, 100),
    has_late=st.booleans(),
)
def test_times_follow_the_recursion(costs, layers, text, backlog, has_late):
    late = None
    if has_late:  # the first hit of each layer is still on its way
        late = np.stack([layer.hits & (np.cumsum(layer.hits) == 1) for layer in layers])
        layers = [layer._replace(hits=layer.hits & ~its) for layer, its in zip(layers, late, strict=True)]
    demand = LayerDemand(*(np.stack(parts) for parts in zip(*layers, strict=True)))
    dispatch = dispatch_by_name(text).split(demand, costs, np)
    times = in_ticks(layer_times(costs, demand, dispatch, backlog=backlog * TICKS, late=late))
    for index, layer in enumerate(layers):
        own = type(dispatch)(*(part[index] for part in dispatch))
        who = np.flatnonzero(late[index])[0] if has_late and late[index].any() else None
        device, host = expected(costs, layer, own, backlog, who)
        assert (times.device[index], times.host[index]) == (device, host)
        assert times.layer[index] == costs.attention + max(device, host) + costs.join
        assert times.exposed_host[index] == max(0, host - device)
    if not has_late:
        alone = in_ticks(layer_times(costs, demand, dispatch))
        for amounts, ticks in zip((alone.device, alone.host), finish_times(costs, demand, dispatch, np), strict=True):
            assert amounts == ticks.tolist()


@given(costs=layer_costs(), demand=demands(), text=st.sampled_from(("all-device", "oled", "dali")))
def test_exposed_transfer_is_the_difference_to_free_transfers(costs, demand, text):
    dispatch = dispatch_by_name(text).split(demand, costs, np)
    free = LayerCosts(**{**vars(costs), "load": 0, "load_shared": 0})
    with_link, without = (layer_times(each, demand, dispatch) for each in (costs, free))
    assert with_link.exposed_transfer == pytest.approx(with_link.layer - without.layer)


def test_any_leading_shape():
    rng = np.random.default_rng(0)
    shape = (4, 3, 16)
    counts = rng.integers(0, 4, shape).astype(np.uint16)
    hits = (counts > 0) & (rng.random(shape) < 0.5)
    zeros = np.zeros(shape, np.int32)
    demand = LayerDemand(counts, hits, (counts > 0) & ~hits, zeros, zeros)
    dispatch = dispatch_by_name("oled").split(demand, COSTS, np)
    whole = layer_times(COSTS, demand, dispatch)
    assert all(amount.shape == (4, 3) and amount.dtype == np.float64 for amount in whole)
    for place in np.ndindex(4, 3):
        one = layer_times(
            COSTS, LayerDemand(*(x[place] for x in demand)), type(dispatch)(*(x[place] for x in dispatch))
        )
        assert all(amount[place] == own for amount, own in zip(whole, one, strict=True))
