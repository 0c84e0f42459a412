"""Which missing experts are loaded into which rows, as pure functions of one layer's residency and demand.

A layer has N slots and G staging rows, N + G rows in all; which rows are staging is a matter of the map, not of
position: whatever row holds no resident expert is free, and residents never number more than N. So at least G rows are
free, and an expert that may not stay, a visitor, runs from one of them.

The map of a layer is one int32 array ``[E]``: the row of a resident; below 0 for the others, and there -2 - row for a
visitor of the last step that loaded, which is resident no longer. One array, since a ``while`` loop that may change it
costs a copy of it in every step.

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
    ``rows [E]`` the row that each goes to (those not admitted take turns in the staging rows). ``after [E]`` is the map
    once the step is over, without visitors.
    """

    order: Array
    rows: Array
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

    # No sort anywhere: on a GPU a sort of 256 numbers takes longer than loading 0.1 experts, and there would be six.
    behind = admissions + _position(ranks.admit_rank, miss & ~admitted)
    turn = jnp.where(admitted, _position(ranks.admit_rank, admitted), behind)
    order = _listed(jnp.arange(demand.size, dtype=jnp.int32), turn, miss)
    # Rows for admissions: free ones, lowest first, then those of the evicted. The free rows beyond are for staging.
    row_free = jnp.ones(num_rows, bool).at[jnp.where(resident, row_of, num_rows)].set(False, mode="drop")
    free_rows = _listed(jnp.arange(num_rows, dtype=jnp.int32), jnp.cumsum(row_free) - 1, row_free)
    evicted_rows = _listed(row_of, jnp.cumsum(evicted) - 1, evicted)
    index = jnp.arange(demand.size)
    staging = num_rows - capacity
    into_free = free_rows[jnp.minimum(index, num_rows - 1)]
    into_evicted = evicted_rows[jnp.maximum(index - free, 0)]
    into_staging = free_rows[free + (index - admissions) % staging]
    rows = jnp.where(index >= admissions, into_staging, jnp.where(index < free, into_free, into_evicted))

    after = jnp.where(resident & ~evicted, row_of, -1)
    after = after.at[jnp.where(index < admissions, order, demand.size)].set(rows, mode="drop")
    return Placement(order, rows, misses, admissions, hit, admitted, evicted, after)


def row_holding(row_of: Array) -> Array:
    """The row that holds each expert now, be it a resident or a visitor; -1 where none does."""
    return jnp.where(row_of >= 0, row_of, -2 - row_of)


def with_visitors(row_of: Array, plan: Placement, first: Any, upto: Array) -> Array:
    """``row_of [E]`` with entries ``first .. upto`` of the plan's order noted as visitors in their rows."""
    index = jnp.arange(row_of.size)
    visiting = (index >= first) & (index < upto)
    return row_of.at[jnp.where(visiting, plan.order, row_of.size)].set(-2 - plan.rows, mode="drop")


def _position(rank: Array, among: Array) -> Array:
    """Place of each expert ``among [E]`` in descending order of ``rank``, from 0; meaningless for the others."""
    return jnp.sum(among[None, :] & (rank[None, :] > rank[:, None]), axis=1, dtype=jnp.int32)


def _listed(values: Array, position: Array, among: Array) -> Array:
    """``values`` of those ``among``, each at its ``position`` of the list; zeros behind the last."""
    where = jnp.where(among, position, values.size)
    return jnp.zeros_like(values).at[where].set(values, mode="drop")
