"""Which missing experts are loaded into which rows, as pure functions of one layer's residency and demand.

A layer has N slots and G staging rows, N + G rows in all; which rows are staging is a matter of the map, not of
position: whatever row holds no resident expert is free, and residents never number more than N. So at least G rows are
free, and an expert that may not stay runs from one of them.

Who is admitted and who is evicted is decided by ``oled_jax.retention.step``, for the engine as for the replay; here
that becomes rows and an order of loading. Arrays only, of fixed shapes; runs inside jit. Nothing here moves a weight.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from oled_jax.model.numerics import Array
from oled_jax.retention import Plan, step


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotMap:
    """``row_of [E]`` int32: the row of each resident expert, else -1; ``expert_in [N + G]`` int32: its inverse."""

    row_of: Array
    expert_in: Array

    @classmethod
    def holding(cls, experts: np.ndarray, num_experts: int, rows: int) -> "SlotMap":
        """``experts [n]`` (ids) lie in the first n rows, in this order; the other rows are free."""
        row_of, expert_in = np.full(num_experts, -1, np.int32), np.full(rows, -1, np.int32)
        row_of[experts] = np.arange(len(experts))
        expert_in[: len(experts)] = experts
        return cls(jnp.asarray(row_of), jnp.asarray(expert_in))

    @property
    def resident(self) -> Array:
        """Which experts are resident, ``[E]`` bool."""
        return self.row_of >= 0


class Placement(NamedTuple):
    """The plan of one layer and step.

    ``order [E]`` int32 lists the missing experts in load order, the admitted first, in its first ``misses`` entries;
    ``rows [E]`` the row that each goes to (those not admitted take turns in the staging rows). ``after`` is the map
    once the step is over.
    """

    order: Array
    rows: Array
    misses: Array
    admissions: Array
    hit: Array
    admitted: Array
    evicted: Array
    after: SlotMap


def place(before: SlotMap, demand: Array, ranks: Plan, capacity: int, mode: str, *, contested: bool) -> Placement:
    """Plans one layer's step; ``demand [E]`` bool, ``ranks`` of a retention policy, ``capacity`` N; ``mode`` and
    ``contested`` as for ``oled_jax.retention.step``."""
    outcome = step(before.resident, demand, ranks, capacity, jnp, mode=mode, contested=contested)
    hit, miss, admitted, evicted = outcome.hits, outcome.misses, outcome.admitted, outcome.evicted
    free = capacity - jnp.sum(before.resident, dtype=jnp.int32)
    admissions = jnp.sum(admitted, dtype=jnp.int32)
    misses = jnp.sum(miss, dtype=jnp.int32)

    # No sort anywhere: on a GPU a sort of 256 numbers takes longer than loading 0.1 experts, and there would be six.
    behind = admissions + _position(ranks.admit_rank, miss & ~admitted)
    turn = jnp.where(admitted, _position(ranks.admit_rank, admitted), behind)
    order = _listed(jnp.arange(demand.size, dtype=jnp.int32), turn, miss)
    # Rows for admissions: free ones, lowest first, then those of the evicted. The free rows beyond are for staging.
    row_free = before.expert_in < 0
    free_rows = _listed(jnp.arange(row_free.size, dtype=jnp.int32), jnp.cumsum(row_free) - 1, row_free)
    evicted_rows = _listed(before.row_of, jnp.cumsum(evicted) - 1, evicted)
    index = jnp.arange(demand.size)
    staging = before.expert_in.size - capacity
    into_free = free_rows[jnp.minimum(index, free_rows.size - 1)]
    into_evicted = evicted_rows[jnp.maximum(index - free, 0)]
    into_staging = free_rows[free + (index - admissions) % staging]
    rows = jnp.where(index >= admissions, into_staging, jnp.where(index < free, into_free, into_evicted))

    row_of = jnp.where(evicted, -1, before.row_of)
    row_of = row_of.at[jnp.where(index < admissions, order, demand.size)].set(rows, mode="drop")
    after = SlotMap(row_of, _inverse(row_of, before.expert_in.size))
    return Placement(order, rows, misses, admissions, hit, admitted, evicted, after)


def _position(rank: Array, among: Array) -> Array:
    """Place of each expert ``among [E]`` in descending order of ``rank``, from 0; meaningless for the others."""
    return jnp.sum(among[None, :] & (rank[None, :] > rank[:, None]), axis=1, dtype=jnp.int32)


def _listed(values: Array, position: Array, among: Array) -> Array:
    """``values`` of those ``among``, each at its ``position`` of the list; zeros behind the last."""
    where = jnp.where(among, position, values.size)
    return jnp.zeros_like(values).at[where].set(values, mode="drop")


def _inverse(row_of: Array, rows: int) -> Array:
    experts = jnp.arange(row_of.size, dtype=jnp.int32)
    where = jnp.where(row_of >= 0, row_of, rows)
    return jnp.full((rows,), -1, jnp.int32).at[where].set(experts, mode="drop")
