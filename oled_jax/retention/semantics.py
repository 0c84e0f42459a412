"""What one layer's step does to its residents: the binding rules, shared by the engine and the replay.

All of a step's demand is requested at once. Hits are judged against the residents before any insert. Then one rule
decides who stays: the ``capacity`` best of the residents and the candidates, where

- mode ``protect`` puts the step's own hits above everything, the candidates (in admission order) below them, and the
  other residents (in keep order) last: the step's own experts never evict one another, and whoever may enter does, as
  far as there are free slots and residents that nobody wants. If the policy lets candidates be *contested*, a candidate
  competes with those other residents by keep order instead, and is bypassed when it loses;
- mode ``select`` ranks all of them by keep order: an expert of this step may yield its slot once it has been computed.

A fetched expert that is not admitted has run from a staging row and is dropped (bypass). Nothing here moves weights.
"""

from typing import Any, NamedTuple

from oled_jax.retention.arrays import Array, best, ranks
from oled_jax.retention.record import Plan

MODES = ("protect", "select")


class StepOutcome(NamedTuple):
    """One step of one layer (or of all): bool ``[..., E]`` each. ``resident`` is the set after the step."""

    hits: Array
    misses: Array
    admitted: Array
    evicted: Array
    resident: Array


def step(
    resident: Array,
    demand: Array,
    plan: Plan,
    capacity: int | Array,
    xp: Any,
    *,
    mode: str,
    contested: bool = False,
    fetched: Array | None = None,
) -> StepOutcome:
    """Applies ``plan`` to one step; a pure function, in numpy or inside a jitted program.

    ``resident`` and ``demand`` bool ``[..., E]``; ``capacity`` slots of the layer, an integer or an array that
    broadcasts against ``[..., E]``; ``mode`` and ``contested`` as the policy says; ``fetched`` bool ``[..., E]``:
    the misses that the dispatch rule sends to the device, all of them by default (an expert run on the host cannot be
    admitted).
    """
    hits = demand & resident
    misses = demand & ~resident
    candidates = misses & plan.may_admit if fetched is None else misses & plan.may_admit & fetched
    score = plan.keep_rank
    if mode == "protect":
        experts = resident.shape[-1]
        entering = plan.keep_rank if contested else experts + plan.admit_rank
        score = xp.where(hits, 2 * experts + plan.keep_rank, xp.where(candidates, entering, plan.keep_rank))
    after = best(resident | candidates, score, capacity, xp)
    return StepOutcome(hits, misses, candidates & after, resident & ~after, after)


def retained_after_prefill(counts: Array, capacity: int | Array, xp: Any) -> Array:
    """The ``capacity`` experts that most tokens of the last prompt chunk chose, bool ``[..., E]``; ties by id.

    ``counts`` int32 ``[..., E]``. Decoding starts from these under every policy that admits experts, so that policies
    start equal.
    """
    return best(counts > 0, ranks((counts,), xp), capacity, xp)
