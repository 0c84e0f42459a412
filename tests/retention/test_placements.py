"""Placements and queues on examples worked out by hand: one layer, each forward given by who is wanted how often."""

import numpy as np
import pytest

from oled_jax import OledError
from oled_jax.retention import policy_by_name, step
from oled_jax.retention.budgets import front_budget, ratio_budget
from tests.retention.test_priority import SETTLED, record, routing

EXPERTS = 8


class Layer:
    """One layer under ``policy`` with ``capacity`` slots."""

    def __init__(self, policy: str, capacity: int, residents=None):
        self.policy, self.capacity, self.index = policy_by_name(policy), capacity, 0
        self.state = self.policy.init(1, EXPERTS, capacity, np)
        self.resident = self.policy.initial_residents(1, EXPERTS, capacity)
        if residents is not None:
            self.resident = np.isin(np.arange(EXPERTS), residents)[None]

    def serve(self, *wanted: int, at=(0, None), phase=1):
        """One forward that wants the experts listed, which may repeat, at block and step ``at``: who is there after."""
        tokens = routing([(SETTLED, 1.0, {e: 1.0}) for e in wanted])
        counts = np.bincount(wanted, minlength=EXPERTS)[None].astype(np.int32)
        gates = self.policy.gates(self.state, tokens, EXPERTS, np)
        plan = self.policy.plan(self.state, slice(None), counts > 0, counts, gates, self.resident, np)
        options = {"mode": self.policy.mode, "contested": self.policy.contested}
        outcome = step(self.resident, counts > 0, plan, self.capacity, np, **options)
        block, place = at
        place = self.index if place is None else place
        seen = record(self.index, tokens, EXPERTS, block=(block,), step=(place,), phase=(phase,))
        seen = seen._replace(resident=self.resident, admitted=outcome.admitted, evicted=outcome.evicted)
        self.state = self.policy.observe(self.state, seen, np)
        self.resident, self.index = outcome.resident, self.index + 1
        return set(np.flatnonzero(outcome.resident).tolist())


def test_tide_refreshes_in_the_first_block_and_then_every_tau_steps():
    layer = Layer("tide:tau=2", 2)
    assert layer.resident[0, :2].all()  # experts 0 and 1
    assert layer.serve(3, 3, 4, 4, 5, at=(7, 0)) == {3, 4}  # whoever is wanted most, whatever was there
    assert layer.serve(5, 3, 3, at=(7, 1)) == {3, 5}  # still the first block
    assert layer.serve(3, 6, 6, 6, at=(7, 2), phase=2) == {3, 6}  # which its writing forward ends
    assert layer.serve(1, 1, 2, at=(8, 0)) == {1, 2}
    assert layer.serve(4, 4, 5, at=(8, 1)) == {1, 2}  # nobody enters between
    assert layer.serve(4, 4, 2, 5, 5, at=(8, 2)) == {4, 5}  # 2 yields to 5, though it was a hit
    assert layer.serve(6, at=(8, 3), phase=2) == {4, 5}
    assert layer.serve(6, at=(9, 0)) == {4, 6}


def test_tide_may_start_with_nobody():
    filled, empty = (policy_by_name(f"tide:start={start}").initial_residents(2, 5, 3) for start in ("filled", "empty"))
    assert filled.tolist() == [[True, True, True, False, False]] * 2 and not empty.any()


def test_tide_demotes_whom_fewest_want_then_the_least_recent():
    layer = Layer("tide:tau=1", 4)
    layer.serve(0, 1, 1, 2, 2)
    layer.serve(3, 3, 1, 1)
    assert layer.serve(5, 5, 2) == {1, 2, 3, 5}  # 0 was wanted before 1 and 3 were
    assert layer.serve(6, 6, 3) == {2, 3, 5, 6}


def test_tide_in_mode_protect_waits_for_a_slot_that_nobody_wants():
    select, protect = Layer("tide", 2), Layer("tide:mode=protect", 2)
    for layer, after in ((select, {4, 5}), (protect, {0, 1})):
        assert layer.serve(0, 1, 4, 4, 5, 5) == after


def test_tide_paper_exchanges_only_what_was_wanted_more_so_far():
    layer = Layer("tide-paper:tau=1", 2)
    assert layer.serve(0, 0, 0, 1, 2) == {0, 1}  # 2 as often as 1: the resident stays
    assert layer.serve(2) == {0, 2}  # 2 against 1
    assert layer.serve(3, 3) == {0, 2}


def test_static_block_holds_what_the_last_block_wanted():
    layer = Layer("static-block", 2)
    assert layer.serve(4, 4, 5, at=(0, 0)) == {0, 1}
    assert layer.serve(4, 5, 6, at=(0, 1), phase=2) == {0, 1}
    assert layer.serve(6, 5, at=(1, 0)) == {0, 5}  # 4 and 5 are picked, and enter when they are missed
    assert layer.serve(6, 4, at=(1, 1)) == {4, 5}
    assert layer.serve(6, at=(1, 2)) == {4, 5}
    assert layer.serve(6, at=(2, 0)) == {4, 5}  # the block ended without a writing forward, as is seen here
    assert layer.serve(6, at=(2, 1)) == {4, 6}


def queues(layer):
    """The small, the main and the ghost queue, heads first."""
    state, held = layer.state, set(np.flatnonzero(layer.resident).tolist())
    by_place = sorted(held, key=lambda e: state.place[0, e])
    ghosts = [e for e in np.argsort(state.ghost[0]).tolist() if state.ghost[0, e]]
    return [e for e in by_place if not state.main[0, e]], [e for e in by_place if state.main[0, e]], ghosts


def test_s3fifo_queues():
    layer = Layer("s3fifo:small=0.5", 4)  # a share of 2
    layer.serve(0)
    layer.serve(1, 1, 2)
    assert queues(layer) == ([0, 1, 2], [], [])  # candidates by tokens
    layer.serve(1)
    layer.serve(1)
    layer.serve(3)
    assert queues(layer) == ([0, 1, 2, 3], [], [])
    # Two must go: 0 was never hit; 1 was hit twice and moves to the main queue; 2 goes.
    layer.serve(4, 4, 5)
    assert queues(layer) == ([3, 4, 5], [1], [0, 2])
    # 0 is remembered and enters the main queue; the small queue gives up 3.
    layer.serve(0)
    assert queues(layer) == ([4, 5], [1, 0], [2, 3])
    # 4 is wanted and goes to the tail unchanged; 5 leaves.
    layer.serve(4, 6)
    assert queues(layer) == ([4, 6], [1, 0], [2, 3, 5])
    # Of the small queue's two, both wanted, neither goes. The main queue's head was not hit since it moved.
    layer.serve(4, 6, 7, 7, 3)
    assert queues(layer) == ([4, 6, 7], [3], [2, 5])


def test_s3fifo_main_queue_spares_whom_steps_hit():
    layer = Layer("s3fifo:small=0.25", 4, residents=(0, 1, 2, 3))
    place, hits = np.arange(EXPERTS, dtype=np.int32)[None], np.array([[2, 0, 1, 1, 0, 0, 0, 0]], np.int32)
    layer.state = layer.state._replace(main=np.full((1, EXPERTS), True), place=place, hits=hits)
    layer.serve(4)  # past 0, whose counter falls to 1, to 1
    assert queues(layer) == ([4], [2, 3, 0], []) and layer.state.hits[0, :4].tolist() == [1, 0, 1, 1]
    # The small queue has its share: 4 goes. Then no counter of the main queue is 0, so a round passes, and 2 goes.
    layer.serve(5, 6)
    assert queues(layer) == ([5, 6], [3, 0], [4]) and layer.state.hits[0, [3, 0]].tolist() == [0, 0]


def test_s3fifo_remembers_as_many_as_there_are_slots():
    layer = Layer("s3fifo", 2)
    for expert in range(6):
        layer.serve(expert)
    assert queues(layer) == ([4, 5], [], [2, 3])


@pytest.mark.parametrize(("name", "kept"), [("lfu", {0, 3}), ("lfu-incache", {1, 3})])
def test_lfu_in_cache_forgets_and_lfu_does_not(name, kept):
    layer = Layer(name, 2)
    for wanted in ((0,), (0,), (0,), (1,)):
        layer.serve(*wanted)
    assert layer.serve(1, 2) == {1, 2}  # 0 goes, since the others are wanted
    assert layer.serve(0) == {0, 1}  # wanted four times so far, once since it came back; 1 twice
    assert layer.serve(3) == kept


def test_lfru_divides_by_the_time_since_last_use():
    layer = Layer("lfru", 2)
    for _ in range(3):
        layer.serve(0)
    layer.serve(1)  # forward 3
    assert layer.serve(2) == {0, 2}  # 3 / 3 against 1 / 2
    layer.serve(2)
    layer.serve(2)
    assert layer.serve(3) == {2, 3}  # 3 / 6 against 3 / 2


def test_hybrimoe_averages_router_weights_and_counts_the_largest_alone():
    policy = policy_by_name("hybrimoe:alpha=0.5")
    tokens = [(SETTLED, 1, {0: 0.5, 1: 0.25}), (SETTLED, 1, {2: 0.5, 3: 0.25}), (SETTLED, 1, {4: 0.5, 0: 0.25})]
    tokens.append((SETTLED, 1, {5: 0.125, 2: 0.5}))
    state = policy.observe(policy.init(1, 6, 2, np), record(0, routing(tokens), 6), np)
    # Means of 4 tokens: 3/16, 1/16, 4/16, 1/16, 2/16, 1/32; the 4 largest, of equal ones the first.
    assert (state.score[0] / 2**24).tolist() == [3 / 32, 1 / 32, 4 / 32, 0, 2 / 32, 0]
    state = policy.observe(state, record(1, routing([(SETTLED, 1, {5: 1.0})]), 6), np)
    assert (state.score[0] / 2**24).tolist() == [3 / 64, 1 / 64, 4 / 64, 0, 2 / 64, 1 / 2]


def test_dali_bypasses_whoever_carries_less():
    layer = Layer("dali", 2)
    layer.serve(0, 0, 0, 0, 1, 1)  # loads 2 and 1
    assert layer.serve(2) == {0, 2}  # 1/2 against 1/2 of 1, which was wanted before
    assert layer.serve(3) == {0, 3}  # 1/2 against 1/4 of 2
    assert layer.serve(0, 0, 0, 4) == {0, 4}
    assert layer.serve(5, 5, 1) == {0, 5}  # 1 comes to 9/16 and 0 still has 14/16; 4 has 1/4 and makes room for 5


def test_static_uniform_draws_other_experts_per_layer_and_seed():
    held = [policy_by_name(f"static-uniform:seed={seed}").initial_residents(6, 64, 16) for seed in (0, 1)]
    assert (np.stack(held).sum(-1) == 16).all()
    assert len({layer.tobytes() for layer in np.concatenate(held)}) == 12


def test_static_front_fills_whole_layers():
    policy = policy_by_name("static-front")
    slots = policy.slots(4, 8, 5)
    assert slots[:, 0].tolist() == [8, 8, 4, 0]
    held = policy.initial_residents(4, 8, slots)
    assert held.sum(-1).tolist() == [8, 8, 4, 0]
    demand, counts = np.full((4, 8), True), np.ones((4, 8), np.int32)
    plan = policy.plan(policy.init(4, 8, slots, np), slice(None), demand, counts, None, held, np)
    np.testing.assert_array_equal(step(held, demand, plan, slots, np, mode=policy.mode).resident, held)
    assert not policy.equal_slots and policy_by_name("lru").equal_slots
    for refused in (policy.init, policy.initial_residents):
        with pytest.raises(OledError, match=r"static-front fills the first layers .* every layer has 5 slots"):
            refused(4, 8, 5, *((np,) if refused == policy.init else ()))


def test_budgets_keep_their_total():
    assert front_budget(3, 8, 0)[:, 0].tolist() == [0, 0, 0]
    assert front_budget(3, 8, 24)[:, 0].tolist() == [8, 8, 8]
    assert ratio_budget([10, 20, 30], 12, least=1, most=16)[:, 0].tolist() == [2, 4, 6]
    assert ratio_budget([10, 10, 10], 11, least=1, most=16)[:, 0].tolist() == [4, 4, 3]
    assert ratio_budget([1, 50, 49], 40, least=4, most=16)[:, 0].tolist() == [8, 16, 16]  # what is over goes on
    assert ratio_budget([1, 50, 50], 30, least=4, most=16)[:, 0].tolist() == [4, 13, 13]
    rng = np.random.default_rng(0)
    for total in range(19 * 8, 19 * 256, 97):
        demand = rng.gamma(2, 20, 19) + 1
        budget = ratio_budget(demand, total, least=8, most=256)
        assert budget.sum() == total and budget.min() >= 8 and budget.max() <= 256 and budget.dtype == np.int32
        inside = (budget[:, 0] > 8) & (budget[:, 0] < 256)
        ratios = budget[inside, 0] / demand[inside]
        assert not inside.any() or np.ptp(ratios * demand[inside].min()) <= 2.1


@pytest.mark.parametrize(("demand", "total", "says"), [([1, 1], 33, "give 8 to 32"), ([1, 0], 10, "above 0")])
def test_budgets_that_cannot_be(demand, total, says):
    with pytest.raises(OledError, match=says):
        ratio_budget(demand, total, least=4, most=16)
