"""``oled-steps``, ``boundary`` and what else knows the end of a block, on examples worked out by hand."""

import math

import numpy as np
import pytest

from oled_jax.retention import StepRecord, policy_by_name
from tests.retention.streams import EXPERTS, SEQUENCES, make_stream, outcomes
from tests.retention.test_priority import JUST, MASKED, ONE, SETTLED, order, ranked, record, routing

WHOLE = 1 << 24  # a share of 1


def masks(count: int, committed: int, expert: int = 0):
    """A block of masked, just committed and, up to eight tokens, settled ones, which all want one expert."""
    statuses = [MASKED] * count + [JUST] * committed + [SETTLED] * (8 - count - committed)
    return routing([(status, 0.5, {expert: 1.0}) for status in statuses])


def test_forwards_left_follow_from_masks_and_pace():
    policy = policy_by_name("oled-steps:pace=0.5")
    state, left = policy.init(1, 4, 2, np), []
    # Eight tokens: 4 committed at once, then 2 (the pace falls to 3), 0 (to 1.5) and 2.
    for index, (masked, committed) in enumerate([(4, 4), (2, 2), (2, 0), (0, 2)]):
        state = policy.observe(state, record(index, masks(masked, committed), 4, step=(index,)), np)
        left.append(int(state.left[0]))
    assert left == [1, 1, 2, 0]  # 4 / 4; 2 / 3; 2 / 1.5; none: the coming forward writes keys and values
    state = policy.observe(state, record(4, masks(0, 0), 4, step=(4,), phase=(2,)), np)
    assert state.pace[0] == 1.75 * 256 and state.left[0] == 5  # a new block: 8 / 1.75


def test_a_pace_below_one_token_counts_as_one():
    policy = policy_by_name("oled-steps:pace=1")
    state = policy.observe(policy.init(1, 4, 2, np), record(0, masks(5, 3), 4), np)
    state = policy.observe(state, record(1, masks(5, 0), 4), np)
    assert state.left[0] == 5


@pytest.mark.parametrize(("left", "beta"), [(0, 1.0), (1, math.exp(-0.5)), (3, math.exp(-1.5)), (400, 0.0)])
def test_beta_moves_the_weight_from_the_block_to_the_boundary(left, beta):
    policy = policy_by_name("oled-steps:mode=select,rho_r=2")
    state = policy.init(1, 4, 2, np)
    boundary = np.array([[0, ONE // 4, ONE * 3 // 4, 0]], np.int32)
    state = state._replace(boundary=boundary, left=np.array([left], np.int32))
    plan, gates = ranked(policy, state, routing([(SETTLED, 1, {0: 0.75, 3: 0.25})]), 4)
    assert np.array(gates) / WHOLE == pytest.approx([(1 - beta) * 0.75, 0, 0, (1 - beta) * 0.25], abs=1e-4)
    worth = {0: (1 - beta) * 0.75, 1: beta * 0.25, 2: beta * 0.75, 3: (1 - beta) * 0.25}
    expected = sorted(worth, key=lambda e: (-worth[e], e not in (0, 3)))
    assert order(plan.keep_rank) == expected


def test_a_sequence_at_its_end_and_one_at_its_start_are_added():
    policy = policy_by_name("oled-steps:mode=select")
    state = policy.init(1, 4, 2, np, sequences=2)
    boundary = np.array([[ONE, 0, 0, 0]], np.int32)
    state = state._replace(boundary=boundary, left=np.array([0, 1000], np.int32))
    tokens = [(SETTLED, 1, {1: 1.0}, 0), (SETTLED, 1, {2: 0.5, 3: 0.25}, 1)]
    plan, gates = ranked(policy, state, routing(tokens), 4)
    assert gates == [0, 0, WHOLE * 2 // 3, WHOLE // 3]
    assert order(plan.keep_rank) == [0, 2, 3, 1]


def test_in_protect_the_victims_go_by_both():
    policy = policy_by_name("oled-steps:rho_r=1")
    state = policy.init(1, 4, 3, np)
    state = policy.observe(state, record(0, routing([(SETTLED, 1, {0: 0.5, 1: 0.5})]), 4), np)
    state = state._replace(boundary=np.array([[0, 0, ONE, 0]], np.int32))
    for left, worst in ((0, 1), (5, 2)):  # at the end 0 and 1 are worth nothing, in the middle 2 is
        plan, _ = ranked(policy, state._replace(left=np.array([left], np.int32)), routing([(SETTLED, 1, {3: 1})]), 4)
        assert plan.keep_rank[0, :3].argmin() == worst


@pytest.mark.parametrize("mode", ["protect", "select"])
def test_boundary_that_protects_nobody_is_its_base(mode):
    for seed in range(5):
        stream = make_stream(seed, 25)
        for base, name in (("lru", "lru:"), ("oled", "oled:rho_in=0.5,")):
            options = "rho_in=0.5," if base == "oled" else ""
            ours = policy_by_name(f"boundary:base={base},share=0,{options}mode={mode}")
            pairs = zip(
                outcomes(ours, stream, 8), outcomes(policy_by_name(f"{name}mode={mode}"), stream, 8), strict=True
            )
            for ours_now, theirs in pairs:
                np.testing.assert_array_equal(ours_now.resident, theirs.resident)


def test_boundary_protects_its_best_in_the_last_forward_alone():
    policy = policy_by_name("boundary:share=0.5,eta=0.5")
    state = policy.init(1, 6, 4, np)  # protects 2
    opening = routing([(MASKED, -1, {0: 0.5, 1: 0.5, 2: 0.5})])
    state = policy.observe(state, record(0, opening, 6, step=(0,)), np)
    state = policy.observe(state, record(1, routing([(MASKED, 0.5, {3: 1.0})]), 6, step=(1,)), np)
    now = routing([(MASKED, 0.5, {4: 1.0})])
    plan, _ = ranked(policy, state, now, 6, resident=(0, 1, 2, 3))
    assert order(plan.keep_rank)[:2] == [4, 3]  # by last use
    state = policy.observe(state, record(2, routing([(JUST, 0.5, {3: 1.0})]), 6, step=(2,)), np)
    plan, _ = ranked(policy, state, now, 6, resident=(1, 2, 3))
    assert order(plan.keep_rank) == [1, 2, 4, 3, 0, 5]  # 0 is not there
    # Of two sequences one is at its end: half as many.
    two = state._replace(standing=state.standing._replace(sequence=np.array([0, 1], np.int32)))
    two = two._replace(finishing=np.array([True, False]))
    two = two._replace(standing=two.standing._replace(priority=np.zeros((2, 1, 6), np.int32)))
    plan, _ = ranked(policy, two, now, 6, resident=(1, 2, 3))
    assert order(plan.keep_rank)[:3] == [1, 4, 3]


@pytest.mark.parametrize(("others", "capacity", "first"), [("popular", 1, 1), ("auto", 3, 1), ("auto", 1, 2)])
def test_status_ranks_whom_nobody_wants_by_popularity(others, capacity, first):
    """Three forwards want 1 and something else, the last one 2: W is 2 to 3."""
    policy = policy_by_name(f"status:others={others}")
    state = policy.init(1, 5, capacity, np)
    for index, wanted in enumerate([{0: 0.5, 1: 0.5}, {1: 0.5, 3: 0.5}, {2: 0.9, 3: 0.1}]):
        tokens = [(SETTLED, 1, wanted), (MASKED, 0.5, {3: 0.1})]
        state = policy.observe(state, record(index, routing(tokens), 5, step=(index + 1,)), np)
    assert state.popularity[0].tolist() == [1, 2, 1, 3, 0]
    plan, _ = ranked(policy, state, routing([(SETTLED, 1, {4: 1.0}), (MASKED, 0.5, {3: 0.1})]), 5)
    unwanted = [e for e in order(plan.keep_rank) if e in (0, 1, 2)]
    assert unwanted[0] == first


def test_max_takes_the_largest_vote_of_a_token_and_adds_sequences():
    tokens = [
        (SETTLED, 1, {0: 0.25}, 0),
        (SETTLED, 1, {0: 0.5, 1: 0.125}, 0),
        (MASKED, 0.5, {1: 0.5}, 0),
        (SETTLED, 1, {0: 0.125}, 1),
    ]
    policy = policy_by_name("oled:aggregation=max")
    state = policy.init(1, 4, 2, np, sequences=2)
    after = policy.observe(state, record(0, routing(tokens), 4, sequence=(0, 1), block=(0, 0)), np)
    assert after.priority[:, 0].tolist() == [[ONE / 2, ONE / 4, 0, 0], [ONE / 8, 0, 0, 0]]
    assert policy.gates(state, routing(tokens), 4, np)[0].tolist() == [ONE * 5 / 8, ONE / 4, 0, 0]


def test_streams_reach_the_end_of_blocks():
    """So that agreement with the oracles is about the end of blocks too."""
    policy, seen = policy_by_name("boundary"), 0
    for seed in range(10):
        state = policy.init(2, EXPERTS, 4, np, sequences=SEQUENCES)
        for index, forward in enumerate(make_stream(seed, 25)):
            nothing = np.zeros((2, EXPERTS), bool)
            step = StepRecord(index, *forward[2:], nothing, nothing, nothing, nothing, forward.after)
            state = policy.observe(state, step, np)
            seen += int(state.finishing.sum())
    assert seen > 20
