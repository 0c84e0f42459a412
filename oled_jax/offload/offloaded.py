"""Experts in pinned host memory, a few of them in device slots; what a step misses is loaded inside the jitted step.

Promises: every expert that a token wants is computed, whatever is resident; an expert's output does not depend on the
row that it lies in; outputs are kept apart per (token, k) and summed last, in top-k order. With form
``load-then-compute`` all of a step's experts go through products of one and the same shape, so that with equal N the
results are equal to the bit for every policy and every starting cache. Form ``stream`` computes what is resident in
one product and each missing expert alone as it lands, so that its slot may come from any expert already computed; it
promises float32 tokens, and bfloat16 within rounding.

Prefill sweeps over the wanted experts one by one, whatever the form: with hundreds of tokens nearly all are wanted, the
workspace stays that of one expert, and its results depend neither on N nor on what was resident. Afterwards the N
experts with most tokens in the last chunk stay, under every policy that admits any.

There is no Python between layers and no host in a step. Who is loaded is decided before any loop, also where nothing is
missing, unless all experts fit: XLA asks the device before each turn of a loop whether to take it, some 20 microseconds
in which nothing else runs, so a loop that runs once around the others costs a layer with misses more than it saves one
without. Slot arrays go through ``while`` loops, never through ``cond``, which would copy them.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from oled_jax.model.experts import (
    ExpertWeights,
    LayerTelemetry,
    combine_chosen,
    expert_counts,
    expert_outputs,
    gather_chosen,
)
from oled_jax.model.numerics import Array
from oled_jax.offload.loads import alone, load, load_one, load_resident, look_up, with_expert
from oled_jax.offload.placement import Placement, place, row_holding, with_visitors
from oled_jax.retention import Plan, RetentionPolicy, Routing, StepRecord
from oled_jax.retention.arrays import ranks

LOAD_THEN_COMPUTE, STREAM = FORMS = ("load-then-compute", "stream")
MODES = {LOAD_THEN_COMPUTE: "protect", STREAM: "select"}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerState:
    """One MoE layer on the device: ``slots`` (N + G rows of weights, donated) and ``row_of [E]``, their map
    (``oled_jax.offload.placement``)."""

    slots: ExpertWeights
    row_of: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OffloadState:
    """All layers, by layer index; ``forward`` int32 ``[]``, how many forwards there were; ``retention``, the policy's
    state (numpy arrays where a manager on the host keeps it)."""

    layers: dict[int, LayerState]
    forward: Array
    retention: Any


@dataclasses.dataclass(frozen=True)
class OffloadedExperts:
    """The runner. ``capacity`` N and ``staging`` G rows per layer; ``form`` as above.

    ``policy`` decides what stays, in the mode that the form asks for (``protect`` or ``select``). ``observes``: whether
    its state is brought up to date at the end of the jitted step, or by a manager on the host.
    """

    num_experts: int
    capacity: int
    policy: RetentionPolicy
    staging: int = 4
    form: str = LOAD_THEN_COMPUTE
    observes: bool = True
    prefills: bool = False
    routing: ClassVar[str] = "router"

    def __post_init__(self):
        # With everything loaded before anything is computed, an expert of this step cannot yield its row to another.
        object.__setattr__(self, "policy", dataclasses.replace(self.policy, mode=MODES[self.form]))

    @property
    def slots(self) -> int:
        """N."""
        return self.capacity

    @property
    def policy_label(self) -> str:
        """The policy as commands spell it."""
        return self.policy.label

    def for_prefill(self) -> "OffloadedExperts":
        """The same slots, swept."""
        return dataclasses.replace(self, prefills=True)

    def init(self, weights: dict[int, ExpertWeights]) -> tuple[dict[int, ExpertWeights], OffloadState]:
        """Takes each layer's experts, in pinned host memory, as the bank.

        Slots are empty but for what the policy wants there from the start.
        """
        rows = self.capacity + self.staging
        residents = self.policy.initial_residents(len(weights), self.num_experts, self.capacity)
        layers = {}
        for position, (layer, bank) in enumerate(sorted(weights.items())):
            slots = jax.tree.map(lambda a: jnp.zeros((rows, *a.shape[1:]), a.dtype), bank)
            experts = np.flatnonzero(residents[position]).astype(np.int32)
            if len(experts):
                slots = load_resident(slots, bank, experts)
            row_of = np.full(self.num_experts, -1, np.int32)
            row_of[experts] = np.arange(len(experts))
            layers[layer] = LayerState(slots, jnp.asarray(row_of))
        retention = self.policy.init(len(weights), self.num_experts, self.capacity, jnp)
        # Copies, because a policy may start two fields with one and the same array, and each will be donated.
        retention = jax.tree.map(partial(jnp.array, copy=True), retention)
        return weights, OffloadState(layers, jnp.int32(0), retention)

    def for_batch(self, state: OffloadState, sequences: int, xp: Any) -> OffloadState:
        """The state for a new batch of ``sequences`` rows: what belongs to earlier sequences is forgotten."""
        return dataclasses.replace(state, retention=self.policy.for_batch(state.retention, sequences, xp))

    def with_retention(self, state: OffloadState, retention: Any) -> OffloadState:
        """The state with what a manager on the host answers."""
        return dataclasses.replace(state, retention=retention)

    def run(
        self,
        store: dict[int, ExpertWeights],
        state: OffloadState,
        layer: int,
        x: Array,
        routing: Routing,
        scale: float,
    ) -> tuple[Array, OffloadState, LayerTelemetry]:
        """See ``ExpertRunner.run``."""
        own, ids = state.layers[layer], routing.ids
        before = own.row_of >= 0
        position = sorted(state.layers).index(layer)
        planned = jax.named_scope("placement")(partial(self._planned, own.row_of, state, position, routing))
        compute = self._sweep if self.prefills else {LOAD_THEN_COMPUTE: self._ltc, STREAM: self._stream}[self.form]
        chosen, after = compute(store[layer], own, planned, x, ids)
        y = combine_chosen(chosen, ids, routing.weights * scale)
        state = dataclasses.replace(state, layers={**state.layers, layer: after})
        return y, state, LayerTelemetry(ids, routing.weights, before, after.row_of >= 0)

    def observe(self, state: OffloadState, record: StepRecord) -> OffloadState:
        """Counts on, and lets the policy learn unless a manager does that."""
        retention = self.policy.observe(state.retention, record, jnp) if self.observes else state.retention
        return dataclasses.replace(state, forward=state.forward + 1, retention=retention)

    def rounds(self, record: StepRecord) -> np.ndarray:
        """Products over the slots in a forward, int32 ``[L]``; ``record`` in numpy."""
        misses = np.sum((record.counts > 0) & ~record.resident, axis=1, dtype=np.int32)
        if self.form == STREAM or not np.any(record.phase > 0):
            return np.ones_like(misses)
        visitors = misses - np.sum(record.admitted, axis=1, dtype=np.int32)
        return 1 + np.maximum(0, visitors - 1) // self.staging

    def _planned(self, row_of: Array, state: OffloadState, position: int, routing: Routing) -> Placement:
        """Who is loaded into which row."""
        counts, policy = expert_counts(routing.ids, self.num_experts), self.policy
        demand, resident = counts > 0, row_of >= 0
        where = (row_of, self.capacity + self.staging, demand)
        if self.prefills and policy.admits:
            order = ranks((counts,), jnp)
            plan = Plan(order, order, jnp.ones(self.num_experts, bool))
            return place(*where, plan, self.capacity, "select", contested=False)
        gates = policy.gates(state.retention, routing, self.num_experts, jnp)
        plan = policy.plan(state.retention, position, demand, counts, gates, resident, jnp)
        return place(*where, plan, self.capacity, policy.mode, contested=policy.contested)

    def _ltc(self, bank: ExpertWeights, own: LayerState, planned: Callable[[], Placement], x: Array, ids: Array):
        """Loads what is missing, then one product over all rows.

        If there is more than fits, what is over goes first, in rounds of its own through the staging rows.
        """

        def load_missing(carry):
            _, slots, _, chosen = carry
            plan = planned()
            first = plan.admissions + jnp.minimum(plan.misses - plan.admissions, self.staging)
            slots, chosen = self._rounds(bank, slots, plan, first, x, ids, chosen)
            slots = load(slots, bank, plan, 0, first)
            return jnp.bool_(False), slots, with_visitors(plan.after, plan, plan.admissions, first), chosen

        nothing = jnp.zeros((*ids.shape, x.shape[-1]), x.dtype)
        missing = jnp.any((ids >= 0) & (look_up(own.row_of, ids) < 0))
        carry = (missing, own.slots, own.row_of, nothing)
        # With a row for every expert a layer soon misses nothing, and need not even plan.
        everything_fits = self.capacity >= self.num_experts
        carry = lax.while_loop(lambda carry: carry[0], load_missing, carry) if everything_fits else load_missing(carry)
        _, slots, row_of, chosen = carry
        rows = look_up(row_holding(row_of), ids)
        now = gather_chosen(expert_outputs(x, slots), rows)
        return jnp.where(rows[..., None] >= 0, now, chosen), LayerState(slots, row_of)

    def _rounds(self, bank, slots: ExpertWeights, plan: Placement, first: Array, x: Array, ids: Array, chosen: Array):
        """Computes entries ``first`` and up of the plan's order, as many at a time as there are staging rows."""
        nobody = jnp.full(self.num_experts, -1, jnp.int32)

        def unfinished(carry):
            return carry[0] < plan.misses

        def one_round(carry):
            done, slots, chosen = carry
            upto = jnp.minimum(done + self.staging, plan.misses)
            slots = load(slots, bank, plan, done, upto)
            rows = look_up(row_holding(with_visitors(nobody, plan, done, upto)), ids)
            now = gather_chosen(expert_outputs(x, slots), rows)
            return upto, slots, jnp.where(rows[..., None] >= 0, now, chosen)

        _, slots, chosen = lax.while_loop(unfinished, one_round, (first, slots, chosen))
        return slots, chosen

    def _stream(self, bank: ExpertWeights, own: LayerState, planned: Callable[[], Placement], x: Array, ids: Array):
        """One product over what is resident, then each missing expert alone, as it lands."""
        plan = planned()
        chosen = gather_chosen(expert_outputs(x, own.slots), look_up(own.row_of, ids))
        slots, chosen = self._load_and_compute_each(bank, own.slots, plan, x, ids, chosen)
        return chosen, LayerState(slots, plan.after)

    def _sweep(self, bank: ExpertWeights, own: LayerState, planned: Callable[[], Placement], x: Array, ids: Array):
        """Every wanted expert alone: the resident ones first, so that their rows may be reused."""
        plan = planned()
        order = jnp.argsort(~plan.hit, stable=True)

        def compute_one(i, chosen):
            expert = order[i]
            return with_expert(chosen, ids, expert, alone(x, own.slots, own.row_of[expert]))

        empty = jnp.zeros((*ids.shape, x.shape[-1]), x.dtype)
        chosen = lax.fori_loop(0, jnp.sum(plan.hit), compute_one, empty)
        slots, chosen = self._load_and_compute_each(bank, own.slots, plan, x, ids, chosen)
        return chosen, LayerState(slots, plan.after)

    def _load_and_compute_each(self, bank, slots, plan: Placement, x, ids, chosen):
        # All hits have been computed by now, so the row of an evicted expert may be overwritten; and a staging row is
        # used again only after its expert was computed.
        def load_and_compute(i, carry):
            slots, chosen = carry
            slots = load_one(slots, bank, plan.order[i], plan.rows[i])
            return slots, with_expert(chosen, ids, plan.order[i], alone(x, slots, plan.rows[i]))

        return lax.fori_loop(0, plan.misses, load_and_compute, (slots, chosen))
