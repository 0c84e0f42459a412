"""Dispatch rules on examples computed by hand, the degenerate cases of the specification, and rules by name."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest

from oled_jax import OledError
from oled_jax.dispatch import LayerCosts, LayerDemand, dispatch_by_name, dispatch_names, finish_times


def demand(missing, hits=(), reuse=None, last=None):
    """A layer of 12 experts: misses 0, 1, ... and hits 11, 10, ... with these token counts."""
    counts = np.zeros(12, np.int32)
    counts[: len(missing)] = missing
    counts[12 - len(hits) :] = hits[::-1]
    place = np.arange(12)
    is_hit, is_missing = place >= 12 - len(hits), place < len(missing)
    filled = [np.zeros(12, np.int32) if x is None else np.resize(np.asarray(x, np.int32), 12) for x in (reuse, last)]
    return LayerDemand(counts, is_hit, is_missing, *filled)


def split(text, demand, costs):
    """Experts fetched, in link order, and experts run on the host."""
    dispatch = dispatch_by_name(text).split(demand, costs, np)
    fetched = np.flatnonzero(dispatch.to_device)
    order = fetched[np.argsort(-dispatch.link_rank[fetched])]
    return order.tolist(), np.flatnonzero(dispatch.to_host).tolist()


# T_hit = 10 + 2 * experts + tokens; t_dev = 3 + n; t_host = 5 + 2 n, h0 20; 10 per transfer.
COSTS = LayerCosts(
    hits_start=10,
    hit=2,
    hit_token=1,
    device_expert=3,
    device_token=1,
    load=10,
    load_shared=10,
    host_start=20,
    host_expert=5,
    host_expert_shared=5,
    host_token=2,
)


def test_the_finish_times_of_the_specification():
    # T_hit = 10 + 2 * 2 + 5 = 19. First lands at 10, starts at 19, ends 19 + 3 + 4 = 26; second lands at 20, ends 30.
    layer = demand([4, 1, 2], hits=[3, 2])
    dispatch = dispatch_by_name("all-device").split(layer, COSTS, np)
    hosted = dispatch._replace(to_device=layer.missing & (layer.counts != 2), to_host=layer.counts * layer.missing == 2)
    assert finish_times(COSTS, layer, hosted, np) == (30, 20 + 5 + 2 * 2)
    # All three, 4 then 2 then 1 tokens: 26, then 26 + 5 = 31, then lands at 30, ends 31 + 4.
    assert finish_times(COSTS, layer, dispatch, np) == (35, 0)


def test_without_hits_a_transfer_is_waited_for():
    layer = demand([1, 1])
    dispatch = dispatch_by_name("all-device").split(layer, COSTS, np)
    # T_hit = 10; 10 + 4 = 14; lands at 20, ends 24.
    assert finish_times(COSTS, layer, dispatch, np) == (24, 0)


def test_without_overlap_every_transfer_is_waited_for():
    costs = LayerCosts(hits_start=10, device_expert=3, device_token=1, load=10, load_shared=99, overlaps=False)
    layer = demand([4, 1])
    dispatch = dispatch_by_name("all-device").split(layer, costs, np)
    assert finish_times(costs, layer, dispatch, np) == (10 + (10 + 7) + (10 + 4), 0)


def test_who_finds_no_slot_takes_rounds():
    # Three hits leave two of five slots. Two fetched find one, two more are computed from staging, then rounds of two.
    costs = LayerCosts(load=10, load_shared=10, round=100, slots=5, staging=2, overlaps=False)
    for misses, rounds in ((2, 0), (4, 0), (5, 1), (6, 1), (7, 2)):
        layer = demand([1] * misses, hits=[1, 1, 1])
        dispatch = dispatch_by_name("all-device").split(layer, costs, np)
        assert finish_times(costs, layer, dispatch, np) == (10 * misses + 100 * rounds, 0)


def test_costs_of_company_count_only_where_there_is_company():
    costs = LayerCosts(load=10, load_shared=15, host_start=20, host_expert=5, host_expert_shared=8, host_token=1)
    layer = demand([1, 1])
    both = dispatch_by_name("all-device").split(layer, costs, np)
    first = np.arange(12) == 0
    assert finish_times(costs, layer, both, np) == (20, 0)
    none = np.zeros(12, bool)
    assert finish_times(costs, layer, both._replace(to_device=none, to_host=layer.missing), np) == (0, 32)
    apart = both._replace(to_device=first, to_host=layer.missing & ~first)
    assert finish_times(costs, layer, apart, np) == (15, 20 + 8 + 1)


def test_all_device_fetches_by_tokens_or_by_reuse():
    layer = demand([1, 4, 2], reuse=[5, 1, 7])
    assert split("all-device", layer, COSTS) == ([1, 2, 0], [])
    assert split("all-device:order=reuse", layer, COSTS) == ([2, 0, 1], [])


def test_fiddler_compares_each_miss_with_itself():
    # 5 + 2 n < 10 + 3 + n just if n < 8: at 8 the device has it.
    assert split("fiddler", demand([7, 8, 9, 1]), COSTS) == ([2, 1], [0, 3])


def test_freetoken_splits_by_bandwidth_and_fetches_the_recent():
    costs = LayerCosts(load=30, load_shared=30, host_expert=10, host_expert_shared=10, host_read=6)
    layer = demand([1] * 10, last=[0, 9, 1, 8, 2, 7, 3, 6, 4, 5])
    # 10 * 10 / 40 = 2.5: with 2 max(60, 80), with 3 max(90, 70).
    assert split("freetoken", layer, costs) == ([1, 3], [0, 2, 4, 5, 6, 7, 8, 9])
    # The link has 6 / 30 of the host memory's bandwidth.
    assert split("freetoken:form=paper", layer, costs)[0] == [1, 3]
    # 3 misses: 0.75, with 0 max(0, 30), with 1 max(30, 20): equal, and the smaller is taken.
    assert split("freetoken", demand([1] * 3), costs) == ([], [0, 1, 2])


def test_freetoken_fetches_all_unless_the_host_is_more_than_twice_as_fast():
    layer = demand([1] * 4)
    for load, fetched in ((20, 4), (21, 1)):
        costs = LayerCosts(load=load, load_shared=load, host_expert=10, host_expert_shared=10)
        assert len(split("freetoken", layer, costs)[0]) == fetched


def test_hybrimoe_takes_from_both_ends():
    # T_hit = 10 + 2 + 1. Device: 6 tokens end at 13 + 9 = 22, then 3 tokens at 28. Host: the 1 at 20 + 7 = 27, then the
    # 2 at 36. 22 <= 27: device. 28 > 27: host. 28 <= 36: device. The 2 left lands at 30 and ends at 35 <= 36: device.
    layer = demand([1, 2, 3, 6], hits=[1])
    assert split("hybrimoe", layer, COSTS) == ([3, 2, 1], [0])


def test_hybrimoe_may_leave_hits_to_the_host():
    costs = LayerCosts(hit=40, load=100, load_shared=100, host_expert_shared=10, host_expert=10)
    layer = demand([1], hits=[5, 4, 3])
    # Device 40 per hit; host 10 each from the back: the miss, then hits 3 and 4, and 5 is the device's at 40 <= 40.
    assert split("hybrimoe", layer, costs) == ([], [0])
    assert split("hybrimoe:host_hits=true", layer, costs) == ([], [0, 9, 10])


def test_dali_gives_each_miss_to_who_is_done_first():
    # T_hit 10. 6: device 10 + 9 = 19 | host 37. 5: lands 20, 28 | 35. 4: lands 30, 37 | 33 host. 1: lands 30, 34 | 40.
    assert split("dali", demand([6, 5, 4, 1]), COSTS) == ([0, 1, 3], [2])


def test_oled_moves_by_reuse_then_swaps_for_load():
    # Reuse order 0, 1, 2. T_hit 10. F = {0}: 10 + 4 = 14 <= 20 + 7 + 7 + 25; F = {0, 1}: 24 <= 52;
    # F = {0, 1, 2}: max(24, 30) + 13 = 43 <= 45.
    layer = demand([1, 1, 10], reuse=[300, 200, 100])
    assert split("oled", layer, COSTS) == ([0, 1, 2], [])
    # With dearer transfers, 32 each, {0, 1} ends at 68, past the host's 20 + 7 + 25; {0} ends at 36 beside 52. Swapped
    # for the 10 tokens it is 45 beside 34, and 45 < 52.
    slow = dataclasses.replace(COSTS, load=32, load_shared=32)
    assert split("oled:swaps=0", layer, slow) == ([0], [1, 2])
    assert split("oled", layer, slow) == ([2], [0, 1])
    # It gives up 200 of the highest reuse of 300.
    assert split("oled:margin=0.5", layer, slow) == ([0], [1, 2])
    # It gains 7 of 52, which is 13.5 %.
    assert split("oled:epsilon=0.14", layer, slow) == ([0], [1, 2])


def test_fill_goes_on_where_the_hits_cover_the_transfers():
    costs = LayerCosts(hits_start=1000, load=10, load_shared=10, host_start=1, host_expert=1, host_expert_shared=1)
    layer = demand([1, 1, 1], reuse=[1, 2, 3])
    assert split("oled", layer, costs) == ([], [0, 1, 2])
    assert split("oled:fill=true", layer, costs) == ([2, 1, 0], [])


def test_auto_uses_the_host_only_where_that_pays():
    layer = demand([1] * 8)
    for load, hosted in ((10, False), (60, True)):
        costs = LayerCosts(load=load, load_shared=load, host_start=100, host_expert=10, host_expert_shared=10)
        assert bool(split("auto", layer, costs)[1]) is hosted
        assert bool(split("auto:gain=0.99", layer, costs)[1]) is False


@pytest.mark.parametrize("name", dispatch_names())
def test_without_a_host_all_is_fetched(name):
    costs = LayerCosts(load=1000, load_shared=1000, host_expert=1, has_host=False)
    layer = demand([1, 2, 3], hits=[1])
    fetched, hosted = split(name, layer, costs)
    assert sorted(fetched) == [0, 1, 2] and not hosted


def test_a_free_device_takes_all():
    costs = LayerCosts(load=1, load_shared=1, device_expert=1, host_expert=10_000, host_expert_shared=10_000)
    layer = demand([3, 1, 2, 5], reuse=[1, 4, 2, 2])
    for name in ("oled", "dali", "hybrimoe", "fiddler", "auto"):
        assert split(name, layer, costs)[1] == []
    assert split("oled", layer, costs)[0] == [1, 3, 2, 0]


def test_a_host_that_is_done_before_the_first_transfer_takes_all():
    costs = LayerCosts(load=10_000, load_shared=10_000, host_start=5, host_expert=1, host_expert_shared=1, host_token=1)
    layer = demand([3, 1, 2, 5], reuse=[1, 4, 2, 2])
    for name in ("oled", "dali", "hybrimoe", "fiddler", "auto", "freetoken"):
        assert split(name, layer, costs) == ([], [0, 1, 2, 3])


def test_a_layer_without_misses():
    for name in dispatch_names():
        assert split(name, demand([], hits=[2, 1]), COSTS) == ([], [])


def test_small_unsigned_counts_do_not_wrap():
    counts = np.zeros(12, np.uint8)
    counts[:2] = 200, 1
    missing = counts > 0
    layer = LayerDemand(counts, ~missing & False, missing, np.zeros(12, np.int8), np.zeros(12, np.int8))
    assert split("fiddler", layer, COSTS) == ([0], [1])
    assert finish_times(COSTS, layer, dispatch_by_name("all-device").split(layer, COSTS, np), np)[0] == 10 + 203 + 4


def test_names_and_labels():
    assert dispatch_names() == ("all-device", "fiddler", "freetoken", "hybrimoe", "dali", "oled", "auto")
    for text in (*dispatch_names(), "oled:swaps=2,fill=true", "oled:epsilon=0.05", "freetoken:form=paper"):
        rule = dispatch_by_name(text)
        assert rule.label == text
        assert dispatch_by_name(rule.label) == rule and hash(dispatch_by_name(text)) == hash(rule)
    assert dispatch_by_name(" oled : swaps = 4 ").label == "oled"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("oledd", ["unknown dispatch rule 'oledd'", "all-device, fiddler, freetoken, hybrimoe, dali, oled, auto"]),
        ("oled:swap=4", ["no parameter 'swap'", "swaps, epsilon, fill, margin, order"]),
        (
            "oled:swaps=many,fill=yes",
            ["2 problems", "swaps is 'many'; it must be an integer", "fill is 'yes'; it can be"],
        ),
        ("oled:epsilon=-1", ["epsilon is -1.0; it must be a number from 0 to 1"]),
        ("oled:swaps", ["'swaps' is not of the form parameter=value"]),
        ("oled:swaps=1,swaps=2", ["swaps is given twice"]),
        ("fiddler:n=3", ["no parameter 'n', nor any other"]),
    ],
)
def test_what_is_refused(text, parts):
    with pytest.raises(OledError) as caught:
        dispatch_by_name(text)
    assert "\n" not in str(caught.value)
    for part in parts:
        assert part in str(caught.value)


def test_costs_out_of_range_are_refused():
    with pytest.raises(OledError, match=r"load is -1 ticks.*host_token is 1\.5 ticks"):
        LayerCosts(load=-1, load_shared=1, host_token=1.5)


@pytest.mark.parametrize("overlaps", [True, False])
def test_the_largest_costs_can_still_be_summed(overlaps):
    names = [field.name for field in dataclasses.fields(LayerCosts) if field.type is int]
    most = {n: 1 << (15 if n.endswith("_token") else 21) for n in names}
    most = LayerCosts(**{**most, "slots": 0, "staging": 1}, overlaps=overlaps)
    with pytest.raises(OledError):
        LayerCosts(load=(1 << 21) + 1, load_shared=0)
    zeros, all_of_them = np.zeros(256, np.int32), np.ones(256, bool)
    layer = LayerDemand(np.full(256, 32), ~all_of_them, all_of_them, zeros, zeros)
    dispatch = dispatch_by_name("all-device").split(layer, most, np)
    expert = (1 << 21) + 32 * (1 << 15)
    # Every expert computes for longer than the next one loads, so with overlap only the first transfer shows. 255 find
    # no slot and no place in the first round.
    loads = 0 if overlaps else 256 << 21
    assert finish_times(most, layer, dispatch, np)[0] == (1 << 21) + loads + 256 * expert + (255 << 21)
    host = dispatch._replace(to_device=~all_of_them, to_host=all_of_them)
    assert finish_times(most, layer, host, np)[1] == (1 << 21) + 256 * expert
    assert dispatch_by_name("auto").split(layer, most, np).to_host.any()


def test_neither_import_nor_use_on_the_host_needs_jax():
    code = """
import sys
sys.modules["jax"] = None
import numpy as np
from oled_jax.dispatch import LayerCosts, LayerDemand, dispatch_by_name, dispatch_names
costs = LayerCosts(load=9, load_shared=9, host_expert=2, host_expert_shared=2, host_token=1)
wanted = np.arange(8) < 5
demand = LayerDemand(np.arange(8) * wanted, wanted & False, wanted, np.arange(8), np.arange(8))
for name in dispatch_names():
    dispatch_by_name(name).split(demand, costs, np)
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
