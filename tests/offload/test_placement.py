"""Placement against the step semantics (all requested at once, no self-eviction), over random streams of demand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oled_jax.offload.placement import place, row_holding, with_visitors
from oled_jax.retention import Plan

EXPERTS = 8
NOBODY = np.full(EXPERTS, -1, np.int32)


@functools.cache
def planner(capacity: int, rows: int, mode: str):
    return jax.jit(lambda before, demand, ranks: place(before, rows, demand, ranks, capacity, mode, contested=False))


def expected(resident: set, demand: set, keep, admit, may_admit, capacity: int, mode: str) -> tuple[set, set]:
    """(admitted, evicted) by the words of the specification."""
    miss = demand - resident
    candidates = sorted((e for e in miss if may_admit[e]), key=lambda e: -admit[e])
    if mode == "select":
        kept = set(sorted(resident | set(candidates), key=lambda e: -keep[e])[:capacity])
        return kept & miss, resident - kept
    idle = sorted(resident - demand, key=lambda e: keep[e])
    free = capacity - len(resident)
    admitted = candidates[: free + len(idle)]
    return set(admitted), set(idle[: max(0, len(admitted) - free)])


steps = st.lists(
    st.tuples(
        st.sets(st.integers(0, EXPERTS - 1)),
        st.permutations(range(EXPERTS)),
        st.permutations(range(EXPERTS)),
        st.lists(st.booleans(), min_size=EXPERTS, max_size=EXPERTS),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60)
@given(steps, st.sampled_from([1, 3, 8]), st.sampled_from(["protect", "select"]))
def test_streams_of_demand(stream, capacity, mode):
    staging = 2
    state = NOBODY
    resident: set[int] = set()
    for demand, keep, admit, may_admit in stream:
        mask = np.isin(np.arange(EXPERTS), list(demand))
        ranks = Plan(np.asarray(keep, np.int32), np.asarray(admit, np.int32), np.asarray(may_admit))
        plan = planner(capacity, capacity + staging, mode)(state, mask, ranks)
        admitted, evicted = expected(resident, demand, keep, admit, may_admit, capacity, mode)
        assert set(np.flatnonzero(plan.hit)) == demand & resident
        assert set(np.flatnonzero(plan.admitted)) == admitted
        assert set(np.flatnonzero(plan.evicted)) == evicted
        check_rows(state, plan, demand - resident, resident, evicted, staging)
        state, resident = plan.after, (resident - evicted) | admitted
        check_map(state, resident, capacity)


def check_rows(before, plan, miss: set, resident: set, evicted: set, staging: int) -> None:
    """Every missing expert has a row; no row of a resident that stays is written; admitted experts share none."""
    misses, admissions = int(plan.misses), int(plan.admissions)
    order, rows = np.asarray(plan.order)[:misses], np.asarray(plan.rows)[:misses]
    assert set(order.tolist()) == miss
    assert set(order[:admissions].tolist()) == set(np.flatnonzero(plan.admitted))
    staying = {int(before[e]) for e in resident - evicted}
    assert not staying & set(rows.tolist())
    assert len(set(rows[:admissions].tolist())) == admissions
    assert not set(rows[:admissions].tolist()) & set(rows[admissions:].tolist())
    for start in range(admissions, misses, staging):
        group = rows[start : start + staging].tolist()
        assert len(set(group)) == len(group)


def check_map(row_of, resident: set, capacity: int) -> None:
    """The map holds exactly the residents, each in a row of its own."""
    row_of = np.asarray(row_of)
    assert set(np.flatnonzero(row_of >= 0)) == resident
    assert len(resident) <= capacity
    assert len({int(row_of[e]) for e in resident}) == len(resident)


def test_visitors_are_found_in_their_rows_and_are_no_residents():
    """Four wanted, two slots, two staging rows: the first two stay, the next two visit."""
    order = np.arange(EXPERTS, dtype=np.int32)[::-1].copy()
    ranks = Plan(order, order, np.ones(EXPERTS, bool))
    plan = planner(2, 4, "protect")(NOBODY, np.arange(EXPERTS) < 4, ranks)
    row_of = with_visitors(plan.after, plan, plan.admissions, plan.misses)
    rows = np.asarray(row_holding(row_of))
    assert set(np.flatnonzero(row_of >= 0)) == {0, 1}
    assert sorted(rows[:4].tolist()) == [0, 1, 2, 3]
    assert set(rows[4:]) == {-1}
    again = planner(2, 4, "protect")(row_of, np.arange(EXPERTS) == 3, ranks)
    assert int(again.misses) == 1, "a visitor of an earlier step has to be loaded anew"


def test_admission_follows_its_own_rank_in_protect():
    state = NOBODY
    ranks = Plan(jnp.arange(EXPERTS), jnp.arange(EXPERTS)[::-1], jnp.ones(EXPERTS, bool))
    plan = planner(2, 3, "protect")(state, jnp.arange(EXPERTS) > 3, ranks)
    assert np.flatnonzero(plan.admitted).tolist() == [4, 5]
    plan = planner(2, 3, "select")(state, jnp.arange(EXPERTS) > 3, ranks)
    assert np.flatnonzero(plan.admitted).tolist() == [6, 7]


@pytest.mark.parametrize("mode", ["protect", "select"])
def test_no_demand_changes_nothing(mode):
    state = planner(3, 5, mode)(
        NOBODY,
        jnp.arange(EXPERTS) < 2,
        Plan(jnp.arange(EXPERTS), jnp.arange(EXPERTS), jnp.ones(EXPERTS, bool)),
    ).after
    plan = planner(3, 5, mode)(
        state, jnp.zeros(EXPERTS, bool), Plan(jnp.arange(EXPERTS), jnp.arange(EXPERTS), jnp.ones(EXPERTS, bool))
    )
    np.testing.assert_array_equal(plan.after, state)
    assert int(plan.misses) == 0
