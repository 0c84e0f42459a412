"""Retention: which experts keep their device slots, as pure functions of what was wanted.

How it works. A policy never touches weights or devices. Before a layer's misses are loaded it is asked for a ``plan``:
two rankings of the layer's experts, who should stay and who should enter first. ``step`` turns plan, residents and
demand into hits, misses, admissions and evictions; it is the one place where the rules of a step stand, and the engine
and the replay both call it. After a forward, when its tokens have been sampled, the policy may ``observe`` the record
of the whole forward; its state changes there and nowhere else. So one forward is

    gates = policy.gates(state, routing, E, xp)            # only where policy.reads_tokens
    plan = policy.plan(state, layer, demand, counts, gates, resident, xp)                      # each layer
    outcome = step(resident, demand, plan, capacity, xp, mode=policy.mode, contested=policy.contested)
    ...
    state = policy.observe(state, record, xp)              # once a forward

All of these are pure and run in numpy on the host or, with ``xp = jax.numpy``, inside a jitted program, ``observe``
included: the state is a pytree of fixed shapes. That is the only mechanism, so where a policy runs is the caller's
choice and cannot change a decision: rankings are unique integers, votes are added as integers, ties end in expert ids,
and random draws come from a counter. A policy with ``static_keep`` can be ranked once before the forward for all layers
(``static_keep_rank``), on the host or on the device; ``layer`` may be an index or ``slice(None)`` for all of them. A
capacity is the slots of a layer, or int32 ``[L, 1]`` where layers differ (``budgets``; the engine gives all the same).

Deliberately not here: which misses are fetched and which run on the host (dispatch), moving weights (offload), and
clairvoyant bounds (lab). Importing this package imports numpy and not jax.
"""

from oled_jax.retention.arrays import demand_counts
from oled_jax.retention.policy import RetentionPolicy, Table, static_keep_rank
from oled_jax.retention.record import Plan, Routing, StepRecord
from oled_jax.retention.registry import policies_from_toml, policy_by_name, policy_names
from oled_jax.retention.semantics import StepOutcome, retained_after_prefill, step

__all__ = [
    "Plan",
    "RetentionPolicy",
    "Routing",
    "StepOutcome",
    "StepRecord",
    "Table",
    "demand_counts",
    "policies_from_toml",
    "policy_by_name",
    "policy_names",
    "retained_after_prefill",
    "static_keep_rank",
    "step",
]
