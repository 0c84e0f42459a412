"""Dispatch rules on random layers, against the specification's words in plain Python, the best split, and jax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oled_jax.dispatch import LayerCosts, LayerDemand, dispatch_by_name, finish_times
from tests.dispatch_reference import EXPERTS, brute, dali, demands, hybrimoe, layer_costs, listed, makespan, oled

RULES = (
    "all-device",
    "all-device:order=reuse",
    "fiddler",
    "freetoken",
    "freetoken:form=paper",
    "hybrimoe",
    "hybrimoe:host_hits=true",
    "dali",
    "oled",
    "oled:swaps=0",
    "oled:swaps=2,epsilon=0.1,fill=true,margin=0.5,order=load",
    "auto",
)


def end_of(text, demand, costs):
    """When the layer is done under a rule."""
    return int(max(finish_times(costs, demand, dispatch_by_name(text).split(demand, costs, np), np)))


@given(costs=layer_costs(), demand=demands(), text=st.sampled_from(RULES))
def test_every_miss_goes_to_exactly_one_side(costs, demand, text):
    dispatch = dispatch_by_name(text).split(demand, costs, np)
    assert not np.any(dispatch.to_device & ~demand.missing)
    np.testing.assert_array_equal(dispatch.to_host[demand.missing], ~dispatch.to_device[demand.missing])
    moved = dispatch.to_host & ~demand.missing
    assert not np.any(moved & ~demand.hits) and (text == "hybrimoe:host_hits=true" or not np.any(moved))
    assert sorted(dispatch.link_rank.tolist()) == list(range(EXPERTS))


@settings(max_examples=40)
@given(costs=layer_costs(), demand=demands())
def test_no_rule_beats_the_best_of_all_splits(costs, demand):
    hits, misses = listed(demand)
    best = brute(costs, [n for _, n in hits], misses)
    for text in RULES:
        if text != "hybrimoe:host_hits=true":  # it has more to choose from
            assert end_of(text, demand, costs) >= best


@given(costs=layer_costs(), demand=demands(), text=st.sampled_from(RULES))
def test_finish_times_are_those_of_the_recursion(costs, demand, text):
    dispatch = dispatch_by_name(text).split(demand, costs, np)
    hits = demand.counts[demand.hits & ~dispatch.to_host].tolist()
    fetched = sorted(np.flatnonzero(dispatch.to_device), key=lambda e: -dispatch.link_rank[e])
    expected = makespan(costs, hits, demand.counts[fetched].tolist(), demand.counts[dispatch.to_host].tolist())
    assert max(finish_times(costs, demand, dispatch, np)) == expected


@settings(max_examples=150)
@given(
    costs=layer_costs(),
    demand=demands(),
    swaps=st.integers(0, 4),
    fill=st.booleans(),
    epsilon=st.sampled_from((0.0, 0.01, 0.2)),
    margin=st.sampled_from((0.3, 1.0)),
)
def test_oled_is_what_its_steps_say(costs, demand, swaps, fill, epsilon, margin):
    hits, misses = listed(demand)
    text = f"oled:swaps={swaps},fill={str(fill).lower()},epsilon={epsilon},margin={margin}"
    dispatch = dispatch_by_name(text).split(demand, costs, np)
    expected = oled(costs, [n for _, n in hits], misses, swaps, epsilon, fill, margin)
    assert set(np.flatnonzero(dispatch.to_device).tolist()) == expected


@settings(max_examples=100)
@given(costs=layer_costs(), demand=demands(), host_hits=st.booleans())
def test_hybrimoe_is_the_greedy_from_two_ends(costs, demand, host_hits):
    dispatch = dispatch_by_name(f"hybrimoe:host_hits={str(host_hits).lower()}").split(demand, costs, np)
    assert set(np.flatnonzero(dispatch.to_host).tolist()) == hybrimoe(costs, *listed(demand), host_hits)


@given(costs=layer_costs(), demand=demands())
def test_dali_is_the_greedy(costs, demand):
    hits, misses = listed(demand)
    dispatch = dispatch_by_name("dali").split(demand, costs, np)
    assert set(np.flatnonzero(dispatch.to_device).tolist()) == dali(costs, [n for _, n in hits], misses)


@given(costs=layer_costs(), demand=demands())
def test_swaps_never_make_a_layer_later(costs, demand):
    assert end_of("oled:swaps=4", demand, costs) <= end_of("oled:swaps=0", demand, costs)


@given(costs=layer_costs(shared=False), demand=demands())
def test_reuse_first_never_makes_a_layer_later_than_all_on_the_host(costs, demand):
    hits, misses = listed(demand)
    nothing_fetched = makespan(costs, [n for _, n in hits], [], [n for _, n, _ in misses])
    assert end_of("oled:swaps=0", demand, costs) <= nothing_fetched


@given(costs=layer_costs(), demand=demands())
def test_without_swaps_the_most_reusable_are_fetched(costs, demand):
    dispatch = dispatch_by_name("oled:swaps=0").split(demand, costs, np)
    if dispatch.to_device.any() and dispatch.to_host.any():
        assert demand.reuse[dispatch.to_device].min() >= demand.reuse[dispatch.to_host].max()


@given(costs=layer_costs(shared=False), demand=demands())
def test_reuse_that_is_load_gives_a_pure_balance(costs, demand):
    demand = demand._replace(reuse=demand.counts)
    dispatch = dispatch_by_name("oled").split(demand, costs, np)
    alone = dispatch_by_name("oled:swaps=0").split(demand, costs, np)
    np.testing.assert_array_equal(dispatch.to_device, alone.to_device)
    # The best cut of the misses by tokens, or one short of it.
    hits, misses = listed(demand)
    amounts = sorted((n for _, n, _ in misses), reverse=True)
    ends = [makespan(costs, [n for _, n in hits], amounts[:q], amounts[q:]) for q in range(len(amounts) + 1)]
    q = int(dispatch.to_device.sum())
    assert min(ends[q : q + 2]) == min(ends)


@given(costs=layer_costs(), demand=demands())
def test_sending_by_tokens_is_never_later(costs, demand):
    assert end_of("oled:order=load", demand, costs) <= end_of("oled", demand, costs)


@given(costs=layer_costs(), demand=demands())
def test_auto_is_never_later_than_all_device(costs, demand):
    assert end_of("auto", demand, costs) <= end_of("all-device", demand, costs)


def random_layers(seed, shape):
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 7, shape).astype(np.int32)
    kind = rng.integers(0, 3, shape)
    reuse, last = rng.integers(0, 1 << 20, shape), rng.integers(-1, 9, shape)
    reuse = np.where(rng.random(shape) < 0.5, reuse, 7).astype(np.int32)
    return LayerDemand(counts * (kind > 0), kind == 1, kind == 2, reuse, last.astype(np.int32))


AT_ONCE = LayerCosts(
    hits_start=40,
    hit=9,
    hit_token=2,
    device_expert=9,
    device_token=2,
    load=260,
    load_shared=270,
    host_start=300,
    host_expert=39,
    host_expert_shared=45,
    host_token=60,
    host_read=38,
)
IN_TURN = LayerCosts(
    hits_start=213, load=151, load_shared=151, host_start=300, host_expert=63, host_expert_shared=70, overlaps=False
)


def assert_same(left, right):
    for ours, theirs in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert np.asarray(ours).dtype == np.asarray(theirs).dtype


@pytest.mark.parametrize(
    ("costs", "text"),
    [*((AT_ONCE, text) for text in RULES), *((IN_TURN, text) for text in ("hybrimoe", "dali", "oled"))],
    ids=[*RULES, "hybrimoe in turn", "dali in turn", "oled in turn"],
)
def test_a_jitted_program_decides_as_numpy_does(costs, text):
    rule, demand = dispatch_by_name(text), random_layers(3, (64, 24))
    host = rule.split(demand, costs, np)
    assert host.to_device.any()
    assert_same(host, jax.jit(lambda demand: rule.split(demand, costs, jnp))(demand))


@pytest.mark.parametrize("costs", [AT_ONCE, IN_TURN], ids=["overlapping", "in turn"])
def test_a_jitted_program_reckons_as_numpy_does(costs):
    demand = random_layers(3, (64, 24))
    dispatch = dispatch_by_name("oled").split(demand, costs, np)
    host = finish_times(costs, demand, dispatch, np)
    assert_same(host, jax.jit(lambda demand, dispatch: finish_times(costs, demand, dispatch, jnp))(demand, dispatch))


def test_a_layer_alone_decides_as_among_others():
    demand = random_layers(5, (6, 24))
    for text in RULES:
        rule = dispatch_by_name(text)
        together = rule.split(demand, AT_ONCE, np)
        for layer in range(6):
            alone = rule.split(LayerDemand(*(x[layer] for x in demand)), AT_ONCE, np)
            for whole, one in zip(together, alone, strict=True):
                np.testing.assert_array_equal(whole[layer], one)
