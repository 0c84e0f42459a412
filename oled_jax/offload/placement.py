"""Which missing experts are loaded into which rows, as pure functions of one layer's residency and demand.

A layer has N slots and G staging rows, N + G rows in all; which rows are staging is a matter of the map, not of
position: whatever row holds no resident expert is free, and residents never number more than N. So at least G rows are
free, and an expert that may not stay, a visitor, runs from one of them.

The map of a layer is one int32 array ``[E]``: the row of a resident; below 0 for the others, and there -2 - row for a
visitor of the last step, which is resident no longer.

Who is admitted and who is evicted is decided by ``oled_jax.retention.step``, for the engine as for the replay; here
that becomes rows and an order of loading. Arrays only, of fixed shapes; runs inside jit. Nothing here moves a weight.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp

from oled_jax.model.numerics import Array
from oled_jax.retention import Plan, step


class Placement(NamedTuple):
    """The plan of one layer and step.

    ``order [E]`` int32 lists the missing experts in load order, the admitted first, in its first ``misses`` entries;
    ``rows [E]`` the row that each goes to (those not admitted take turns in the staging rows). ``turn [E]`` is the
    place of a missing expert in that list, -1 of the others. ``after [E]`` is the map once the step is over, without
    visitors.
    """

    order: Array
    rows: Array
    turn: Array
    misses: Array
    admissions: Array
    hit: Array
    admitted: Array
    evicted: Array
    after: Array


def place(
    row_of: Array, num_rows: int, demand: Array, ranks: Plan, capacity: int, mode: str, *, contested: bool
) -> Placement:
    """Plans one layer's step.

    ``row_of [E]``: the map before it; ``num_rows`` N + G; ``demand [E]`` bool, ``ranks`` of a retention policy,
    ``capacity`` N; ``mode`` and ``contested`` as for ``oled_jax.retention.step``.
    """
    resident = row_of >= 0
    outcome = step(resident, demand, ranks, capacity, jnp, mode=mode, contested=contested)
    hit, miss, admitted, evicted = outcome.hits, outcome.misses, outcome.admitted, outcome.evicted
    free = capacity - jnp.sum(resident, dtype=jnp.int32)
    admissions = jnp.sum(admitted, dtype=jnp.int32)
    misses = jnp.sum(miss, dtype=jnp.int32)

    # No sort, scan or scatter anywhere: each would be a kernel or more of its own, and while a layer waits for its
    # loads nothing hides their launches. Comparing everything with everything fuses with what comes before and after.
    behind = admissions + _position(ranks.admit_rank, miss & ~admitted)
    turn = jnp.where(miss, jnp.where(admitted, _position(ranks.admit_rank, admitted), behind), -1)
    index = jnp.arange(demand.size, dtype=jnp.int32)
    order = _listed(index, turn, demand.size)
    # Rows for admissions: free ones, lowest first, then those of the evicted. The free rows beyond are for staging.
    every_row = jnp.arange(num_rows, dtype=jnp.int32)
    row_free = ~jnp.any(row_of[None, :] == every_row[:, None], axis=1)
    free_rows = _listed(every_row, jnp.where(row_free, _before(row_free), -1), num_rows)
    evicted_rows = _listed(row_of, jnp.where(evicted, _before(evicted), -1), demand.size)
    staging = num_rows - capacity
    into_free = free_rows[jnp.minimum(index, num_rows - 1)]
    into_evicted = evicted_rows[jnp.maximum(index - free, 0)]
    into_staging = free_rows[free + (index - admissions) % staging]
    rows = jnp.where(index >= admissions, into_staging, jnp.where(index < free, into_free, into_evicted))
    after = jnp.where(admitted, rows[jnp.maximum(turn, 0)], jnp.where(resident & ~evicted, row_of, -1))
    return Placement(order, rows, turn, misses, admissions, hit, admitted, evicted, after)


def row_holding(row_of: Array) -> Array:
    """The row that holds each expert now, be it a resident or a visitor; -1 where none does."""
    return jnp.where(row_of >= 0, row_of, -2 - row_of)


def with_visitors(row_of: Array, plan: Placement, first: Any, upto: Array) -> Array:
    """``row_of [E]`` with entries ``first .. upto`` of the plan's order noted as visitors in their rows."""
    visiting = (plan.turn >= first) & (plan.turn < upto)
    return jnp.where(visiting, -2 - plan.rows[jnp.maximum(plan.turn, 0)], row_of)


def _position(rank: Array, among: Array) -> Array:
    """Place of each expert ``among [E]`` in descending order of ``rank``, from 0; meaningless for the others."""
    return jnp.sum(among[None, :] & (rank[None, :] > rank[:, None]), axis=1, dtype=jnp.int32)


def _before(among: Array) -> Array:
    """How many ``among [n]`` stand before each entry, int32 ``[n]``."""
    index = jnp.arange(among.size)
    return jnp.sum(among[None, :] & (index[None, :] < index[:, None]), axis=1, dtype=jnp.int32)


def _listed(values: Array, position: Array, length: int) -> Array:
    """``values``, each at its ``position`` of a list of ``length``, left out at -1; zeros where none goes."""
    here = position[None, :] == jnp.arange(length)[:, None]
    return jnp.sum(jnp.where(here, values[None, :], 0), axis=1, dtype=jnp.int32)
