"""``oled`` and ``status`` on examples worked out by hand: four or five experts, one layer, votes in units of 2^-16."""

import numpy as np
import pytest

from oled_jax.retention import Plan, Routing, StepRecord, Table, demand_counts, policy_by_name, step
from oled_jax.retention.priority import Oled, Status

ONE = 65536
MASKED, JUST, SETTLED = 0, 1, 2


def routing(tokens):
    """``tokens``: one (status, confidence, {expert: weight}[, row[, token id]]) each; one layer."""
    chosen = max(len(token[2]) for token in tokens)
    ids, weights = np.full((1, len(tokens), chosen), -1, np.int32), np.zeros((1, len(tokens), chosen), np.float32)
    for t, token in enumerate(tokens):
        ids[0, t, : len(token[2])] = list(token[2])
        weights[0, t, : len(token[2])] = list(token[2].values())
    row = np.asarray([token[3] if len(token) > 3 else 0 for token in tokens], np.int32)
    names = np.asarray([token[4] if len(token) > 4 else 0 for token in tokens], np.int32)
    confidence = np.asarray([token[1] for token in tokens], np.float32)
    return Routing(ids, weights, row, confidence, np.asarray([token[0] for token in tokens], np.uint8), names)


def record(index, after, experts, *, sequence=(0,), block=(0,), step=None, phase=None):
    rows = len(sequence)
    per_row = (sequence, block, step or (index,) * rows, phase or (1,) * rows)
    counts = demand_counts(after.ids, experts, np)
    nothing = np.zeros((1, experts), bool)
    return StepRecord(index, *(np.asarray(x, np.int32) for x in per_row), counts, nothing, nothing, nothing, after)


def ranked(policy, state, before, experts, resident=()):
    """The plan, and its gates, for a forward that routes as ``before`` says."""
    counts = demand_counts(before.ids, experts, np)
    gates = policy.gates(state, before, experts, np)
    held = np.zeros((1, experts), bool)
    held[0, list(resident)] = True
    return policy.plan(state, slice(None), counts > 0, counts, gates, held, np), gates[0].tolist()


def order(rank):
    """Experts from the best kept down."""
    return np.argsort(-rank[0]).tolist()


# Forward 0: a masked token with confidence 1/2 and a settled one, whose own confidence does not matter.
FIRST = [(MASKED, 0.5, {0: 0.75, 1: 0.25}), (SETTLED, 0.1, {1: 0.5, 2: 0.5})]
# Forward 1: the first token was committed by forward 0, so its input is a word; a third of the block is still masked.
SECOND = [(JUST, 0.5, {3: 1.0}), (SETTLED, 0.1, {1: 0.75, 2: 0.25})]


def test_oled_priorities_and_provisional_priorities():
    policy = policy_by_name("oled")
    state = policy.init(1, 4, 2, np)
    state = policy.observe(state, record(0, routing(FIRST), 4), np)
    # 0: .5*.75; 1: .5*.25 + .5; 2: .5
    assert state.priority[0, 0].tolist() == [0.375 * ONE, 0.625 * ONE, 0.5 * ONE, 0]
    plan, gates = ranked(policy, state, routing(SECOND), 4)
    assert gates == [0, 0.75 * ONE, 0.25 * ONE, ONE]
    assert order(plan.admit_rank) == [3, 1, 2, 0]
    # Nobody wants 0 now: with rho_in 0 it is behind everything that is wanted.
    selecting = policy_by_name("oled:mode=select")
    plan, _ = ranked(selecting, state, routing(SECOND), 4)
    assert order(plan.keep_rank) == [3, 1, 2, 0]


def test_oled_evicts_by_priority_among_those_that_nobody_wants():
    policy = policy_by_name("oled")
    state = policy.observe(policy.init(1, 4, 3, np), record(0, routing(FIRST), 4), np)
    before = routing([(MASKED, 0.5, {3: 1.0})])
    plan, _ = ranked(policy, state, before, 4, resident=(0, 1, 2))
    resident, demand = np.array([[True, True, True, False]]), np.array([[False, False, False, True]])
    outcome = step(resident, demand, plan, 3, np, mode="protect", contested=policy.contested)
    assert outcome.evicted.tolist() == [[True, False, False, False]]  # .375 < .5 < .625


def test_oled_bypasses_whoever_falls_below_the_decayed_priority():
    before = routing([(MASKED, 0.25, {3: 1.0})])  # .25
    resident, demand = np.array([[True, False, False, False]]), np.array([[False, False, False, True]])
    # Expert 0's priority is .375: times .5 below .25, times .75 above it.
    for rho_in, admitted in ((0.5, True), (0.75, False)):
        policy = policy_by_name(f"oled:rho_in={rho_in}")
        state = policy.observe(policy.init(1, 4, 1, np), record(0, routing(FIRST), 4), np)
        plan, _ = ranked(policy, state, before, 4, resident=(0,))
        outcome = step(resident, demand, plan, 1, np, mode="protect", contested=policy.contested)
        assert outcome.admitted.any() == admitted and outcome.evicted.any() == admitted


def test_oled_decays_and_decays_once_more_at_the_boundary():
    policy = policy_by_name("oled:rho_in=0.5,rho_bnd=0.25")
    state = policy.observe(policy.init(1, 4, 2, np), record(0, routing([(SETTLED, 1, {0: 1.0})]), 4), np)
    same = policy.observe(state, record(1, routing([(SETTLED, 1, {1: 1.0})]), 4), np)
    assert same.priority[0, 0].tolist() == [ONE / 2, ONE, 0, 0]
    crossed = policy.observe(state, record(1, routing([(SETTLED, 1, {1: 1.0})]), 4, block=(1,)), np)
    assert crossed.priority[0, 0].tolist() == [ONE / 8, ONE, 0, 0]


def test_oled_uses_c_init_where_a_block_has_no_confidence_yet():
    policy = policy_by_name("oled:c_init=0.25")
    state = policy.init(1, 4, 2, np)
    _, gates = ranked(policy, state, routing([(MASKED, -1, {0: 0.5, 1: 0.5})]), 4)
    assert gates == [ONE / 8, ONE / 8, 0, 0]


def test_oled_discounts_what_was_just_committed_after_sampling_only():
    policy = policy_by_name("oled:w_jc=0.5")
    just = routing([(JUST, 0.9, {0: 1.0})])
    state = policy.observe(policy.init(1, 4, 2, np), record(0, just, 4), np)
    assert state.priority[0, 0, 0] == ONE / 2  # its routing was that of a mask
    assert ranked(policy, state, just, 4)[1][0] == ONE  # before the next sampling it is that of a word


def test_oled_calibrated_looks_up_status_and_confidence_bin():
    table = Table(np.array([[0.125, 0.25], [0.0, 0.5], [0.75, 1.0]]))
    policy = Oled(w="calibrated", table=table)
    tokens = [(MASKED, 0.4, {0: 1.0}), (MASKED, 0.5, {1: 1.0}), (JUST, 1.0, {2: 1.0}), (SETTLED, 0.2, {3: 1.0})]
    state = policy.observe(policy.init(1, 4, 2, np), record(0, routing(tokens), 4), np)
    assert state.priority[0, 0].tolist() == [ONE / 8, ONE / 4, ONE / 2, ONE * 3 / 4]


def test_noisy_or_prefers_one_sure_token_to_many_doubtful_ones():
    doubtful = [(MASKED, 0.25, {0: 1.0})] * 3  # sum .75, chance 1 - .75^3 = .58
    sure = [(MASKED, 0.625, {1: 1.0})]  # sum .625, chance .625
    for aggregation, best in (("sum", 0), ("noisy-or", 1)):
        policy = policy_by_name(f"oled:aggregation={aggregation}")
        state = policy.observe(policy.init(1, 4, 2, np), record(0, routing(doubtful + sure), 4), np)
        assert state.priority[0, 0].argmax() == best


def test_oled_keeps_sequences_apart():
    """One decodes, one waits, one is replaced by another."""
    policy = policy_by_name("oled")
    tokens = [(SETTLED, 1, {0: 1.0}, 0), (SETTLED, 1, {1: 1.0}, 1), (SETTLED, 1, {2: 1.0}, 2)]
    who = {"sequence": (4, 5, 6), "block": (0, 0, 0)}
    state = policy.observe(policy.init(1, 4, 2, np, sequences=3), record(0, routing(tokens), 4, **who), np)
    assert state.priority[:, 0].tolist() == [[ONE, 0, 0, 0], [0, ONE, 0, 0], [0, 0, ONE, 0]]
    who = {"sequence": (4, 5, 7), "block": (0, 0, 0), "phase": (1, 0, 0)}
    state = policy.observe(state, record(1, routing([(SETTLED, 1, {3: 1.0}, 0)]), 4, **who), np)
    assert state.priority[:, 0].tolist() == [[0, 0, 0, ONE], [0, ONE, 0, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize("name", ["oled", "status"])
def test_prefill_updates_recency_and_no_priority(name):
    policy = policy_by_name(name)
    before = policy.init(1, 4, 2, np)
    with_tokens = record(3, routing([(3, 1, {2: 1.0})]), 4, phase=(0,))
    for prefill in (with_tokens, with_tokens._replace(routing=None)):
        after = policy.observe(before, prefill, np)
        standing = after.standing if name == "status" else after
        assert not standing.priority.any()
        assert standing.recency.last[0].tolist() == [-1, -1, 3, -1] and standing.recency.forward == 4


def test_status_discounts_masked_votes():
    policy = policy_by_name("status:masked=0.25")
    state = policy.init(1, 4, 2, np)
    tokens = [(MASKED, 0.9, {0: 1.0}), (SETTLED, 0.1, {1: 0.5}), (JUST, 0.5, {2: 0.75})]
    plan, gates = ranked(policy, state, routing(tokens), 4)
    assert gates == [ONE / 4, ONE / 2, ONE * 3 / 4, 0]
    assert order(plan.keep_rank) == [2, 1, 0, 3]


@pytest.mark.parametrize("mode", ["protect", "select"])
def test_status_keeps_the_boundary_set_in_the_forward_without_masks(mode):
    policy = policy_by_name(f"status:eta=0.5,mode={mode}")
    state = policy.init(1, 5, 2, np)
    opening = [(MASKED, -1, {0: 0.5, 1: 0.5})]
    state = policy.observe(state, record(0, routing(opening), 5, step=(0,)), np)
    assert state.boundary[0].tolist() == [ONE / 2, ONE / 2, 0, 0, 0] and not state.finishing.any()
    # A step later the last mask goes: the coming forward's input holds none.
    state = policy.observe(state, record(1, routing([(JUST, 0.9, {2: 1.0})]), 5, step=(1,)), np)
    assert state.boundary[0].tolist() == [ONE / 2, ONE / 2, 0, 0, 0] and state.finishing.all()
    plan, gates = ranked(policy, state, routing([(JUST, 0.9, {3: 0.5, 0: 0.5})]), 5)
    assert gates == [0] * 5  # what the block's words want ends with the block
    if mode == "select":
        assert order(plan.keep_rank)[:3] == [0, 1, 3]
    else:
        assert plan.keep_rank[0, 1] > plan.keep_rank[0, 2]  # although 2 had the last vote
    # The writing forward ends the block; the next first step moves the boundary set by half.
    state = policy.observe(state, record(2, routing([(SETTLED, 1, {3: 1.0})]), 5, step=(2,), phase=(2,)), np)
    assert not state.finishing.any()
    state = policy.observe(state, record(3, routing([(MASKED, 0.1, {1: 1.0})]), 5, block=(1,), step=(0,)), np)
    assert state.boundary[0].tolist() == [ONE / 4, ONE * 3 / 4, 0, 0, 0]


def test_status_lets_a_sequence_at_its_boundary_speak_for_the_next_block_alone():
    policy = policy_by_name("status:eta=0.5,masked=0.25")
    two = {"sequence": (0, 1), "block": (0, 0)}
    state = policy.init(1, 4, 2, np, sequences=2)
    tokens = [(JUST, 0.9, {0: 1.0}, 0), (MASKED, 0.5, {1: 1.0}, 1)]
    state = policy.observe(state, record(0, routing(tokens), 4, step=(0, 5), **two), np)
    assert state.finishing.tolist() == [True, False] and state.boundary[0].tolist() == [ONE / 2, 0, 0, 0]
    tokens = [(JUST, 0.9, {2: 1.0}, 0), (MASKED, 0.5, {1: 1.0}, 1)]
    plan, gates = ranked(policy, state, routing(tokens), 4)
    assert gates == [0, ONE / 4, 0, 0] and order(plan.keep_rank) == [0, 1, 2, 3]
    # A row that waits in a prefill of others stays where it was.
    waiting = record(1, routing([(3, 1, {3: 1.0}, 1)]), 4, sequence=(0, 9), block=(0, 0), phase=(0, 0))
    for prefill in (waiting, waiting._replace(routing=None)):
        assert policy.observe(state, prefill, np).finishing.tolist() == [True, False]


def test_status_votes_for_the_successors_of_what_was_just_committed():
    successors = np.full((1, 3, 2), -1)
    successors[0, 1] = [2, 3]
    policy = Status(successors=Table(successors))
    state = policy.init(1, 4, 2, np)
    tokens = [(JUST, 0.9, {0: 1.0}, 0, 1), (JUST, 0.9, {0: 1.0}, 0, 2), (JUST, 0.9, {0: 1.0}, 0, 7)]
    state = policy.observe(state, record(0, routing([*tokens, (SETTLED, 1, {1: 1.0}, 0, 1)]), 4), np)
    # Ids 2 and 7 have no successors (7 is outside the table): no votes, and none for what the mask wanted.
    assert state.standing.priority[0, 0].tolist() == [0, ONE, ONE / 2, ONE / 2]


def test_sums_saturate_instead_of_wrapping():
    policy = policy_by_name("oled:rho_in=1")
    state = policy.init(1, 4, 2, np)
    state = state._replace(priority=state.priority + ((1 << 27) - 5), sequence=np.zeros(1, np.int32))
    state = policy.observe(state, record(0, routing([(SETTLED, 1, {0: 1.0})]), 4), np)
    assert state.priority[0, 0, 0] == 1 << 27


def test_a_plan_is_three_arrays():
    policy = policy_by_name("oled")
    plan, _ = ranked(policy, policy.init(1, 4, 2, np), routing(FIRST), 4)
    assert isinstance(plan, Plan) and [x.shape for x in plan] == [(1, 4)] * 3 and plan.may_admit.all()
