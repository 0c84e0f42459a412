"""Experts in pinned host memory, a few of them in device slots; what a step misses is loaded inside the jitted step.

Promises: every expert that a token wants is computed, whatever is resident; an expert's output does not depend on the
row that it lies in; outputs are kept apart per (token, k) and summed last, in top-k order. With form
``load-then-compute`` all of a step's experts go through products of one and the same shape, so that with equal N the
results are equal to the bit for every policy and every starting cache. Form ``stream`` computes what is resident in
one product and each missing expert alone as it lands, so that its slot may come from any expert already computed; it
promises float32 tokens, and bfloat16 within rounding.

Prefill sweeps over the wanted experts one by one, whatever the form: with hundreds of tokens nearly all are wanted, the
workspace stays that of one expert, and its results depend neither on N nor on what was resident. Afterwards the N
experts with most tokens in the last chunk stay (spec/policies 4.21).

There is no Python between layers and no host in a step. Slot arrays go through ``while`` loops, never through ``cond``
(which copies them, spec/jax_practice 3.3).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from oled_jax.model.experts import ExpertWeights, combine_chosen, expert_outputs, gather_chosen
from oled_jax.model.numerics import Array
from oled_jax.offload.placement import Placement, SlotMap, place
from oled_jax.retention import Plan
from oled_jax.retention.arrays import ranks

FORMS = ("load-then-compute", "stream")
PREFILL = "sweep"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerState:
    """One MoE layer on the device: ``slots`` (N + G rows of weights, donated), their map, and ``last [E]`` int32, the
    forward in which each expert was last wanted (kept for experts that are not resident as well)."""

    slots: ExpertWeights
    map: SlotMap
    last: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OffloadState:
    """All layers, by layer index, and the number of forwards so far."""

    layers: dict[int, LayerState]
    forward: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerTelemetry:
    """What one layer did in one forward: ``resident [E]`` before it, ``admitted [E]``, ``evicted [E]`` bool; ``loads``
    and ``rounds`` int32 scalars. Demand, hits and misses follow from ids and ``resident``."""

    resident: Array
    admitted: Array
    evicted: Array
    loads: Array
    rounds: Array


@dataclasses.dataclass(frozen=True)
class OffloadedExperts:
    """The runner. ``capacity`` N and ``staging`` G rows per layer; ``form`` as above; ``mode`` of retention."""

    num_experts: int
    capacity: int
    staging: int = 4
    form: str = "load-then-compute"
    mode: str = "protect"

    def __post_init__(self):
        # With everything loaded before anything is computed, an expert of this step cannot yield its row to another.
        assert self.mode == "protect" or self.form != FORMS[0]

    def for_prefill(self) -> "OffloadedExperts":
        """The same slots, swept."""
        return dataclasses.replace(self, form=PREFILL, mode="select")

    def init(self, weights: dict[int, ExpertWeights]) -> tuple[dict[int, ExpertWeights], OffloadState]:
        """Takes each layer's experts, in pinned host memory, as the bank; every slot is empty."""
        rows = self.capacity + self.staging

        def empty(bank: Array) -> Array:
            return jnp.zeros((rows, *bank.shape[1:]), bank.dtype)

        layers = {
            layer: LayerState(
                ExpertWeights(empty(bank.gate_up), empty(bank.down)),
                SlotMap.empty(self.num_experts, rows),
                jnp.full((self.num_experts,), -1, jnp.int32),
            )
            for layer, bank in weights.items()
        }
        return weights, OffloadState(layers, jnp.int32(0))

    def run(
        self, store: dict[int, ExpertWeights], state: OffloadState, layer: int, x: Array, ids: Array, weights: Array
    ) -> tuple[Array, OffloadState, LayerTelemetry]:
        """See ``ExpertRunner.run``."""
        own = state.layers[layer]
        counts = (
            jnp.zeros(self.num_experts, jnp.int32).at[jnp.where(ids >= 0, ids, self.num_experts)].add(1, mode="drop")
        )
        demand = counts > 0
        plan = place(own.map, demand, self._ranks(own, counts, state.forward), self.capacity, self.mode)
        compute = {FORMS[0]: self._load_then_compute, FORMS[1]: self._stream, PREFILL: self._sweep}[self.form]
        chosen, slots, rounds = compute(store[layer], own, plan, x, ids)
        y = combine_chosen(chosen, ids, weights)
        last = jnp.where(demand, state.forward, own.last)
        layers = {**state.layers, layer: LayerState(slots, plan.after, last)}
        forward = state.forward + (layer == max(state.layers))
        telemetry = LayerTelemetry(own.map.resident, plan.admitted, plan.evicted, plan.misses, rounds)
        return y, OffloadState(layers, forward), telemetry

    def _ranks(self, own: LayerState, counts: Array, forward: Array) -> Plan:
        """LRU, lowest id kept on ties; after prefill, most tokens first."""
        recency = jnp.where(counts > 0, forward, own.last)
        keep = ranks((counts if self.form == PREFILL else recency,), jnp)
        by_id = ranks((jnp.zeros_like(counts),), jnp)
        return Plan(keep, by_id, jnp.ones(self.num_experts, bool))

    def _load_then_compute(
        self, bank: ExpertWeights, own: LayerState, plan: Placement, x: Array, ids: Array
    ) -> tuple[Array, ExpertWeights, Array]:
        """Loads what fits, then one product over all rows; more rounds through the staging rows if that was not all."""
        first = plan.admissions + jnp.minimum(plan.misses - plan.admissions, self.staging)
        slots = _load(own.slots, bank, plan, 0, first)
        here = _with_loaded(jnp.where(plan.evicted, -1, own.map.row_of), plan, 0, first)
        chosen = gather_chosen(expert_outputs(x, slots), _look_up(here, ids))
        if self.capacity >= self.num_experts:  # then everything fits, always
            return chosen, slots, jnp.int32(1)

        def unfinished(carry):
            return carry[0] < plan.misses

        def another_round(carry):
            done, rounds, slots, chosen = carry
            upto = jnp.minimum(done + self.staging, plan.misses)
            slots = _load(slots, bank, plan, done, upto)
            nobody = jnp.full_like(own.map.row_of, -1)
            rows = _look_up(_with_loaded(nobody, plan, done, upto), ids)
            now = gather_chosen(expert_outputs(x, slots), rows)
            return upto, rounds + 1, slots, jnp.where(rows[..., None] >= 0, now, chosen)

        _, rounds, slots, chosen = lax.while_loop(unfinished, another_round, (first, jnp.int32(1), slots, chosen))
        return chosen, slots, rounds

    def _stream(
        self, bank: ExpertWeights, own: LayerState, plan: Placement, x: Array, ids: Array
    ) -> tuple[Array, ExpertWeights, Array]:
        """One product over what is resident, then each missing expert alone, as it lands."""
        chosen = gather_chosen(expert_outputs(x, own.slots), _look_up(own.map.row_of, ids))
        return self._load_and_compute_each(bank, own.slots, plan, x, ids, chosen)

    def _sweep(
        self, bank: ExpertWeights, own: LayerState, plan: Placement, x: Array, ids: Array
    ) -> tuple[Array, ExpertWeights, Array]:
        """Every wanted expert alone: the resident ones first, so that their rows may be reused."""
        order = jnp.argsort(~plan.hit, stable=True)

        def compute_one(i, chosen):
            expert = order[i]
            return _with_expert(chosen, ids, expert, _alone(x, own.slots, own.map.row_of[expert]))

        empty = jnp.zeros((*ids.shape, x.shape[-1]), x.dtype)
        chosen = lax.fori_loop(0, jnp.sum(plan.hit), compute_one, empty)
        return self._load_and_compute_each(bank, own.slots, plan, x, ids, chosen)

    def _load_and_compute_each(self, bank, slots, plan: Placement, x, ids, chosen):
        # All hits have been computed by now, so the row of an evicted expert may be overwritten; and a staging row is
        # used again only after its expert was computed.
        def load_and_compute(i, carry):
            slots, chosen = carry
            slots = _load_one(slots, bank, plan.order[i], plan.rows[i])
            return slots, _with_expert(chosen, ids, plan.order[i], _alone(x, slots, plan.rows[i]))

        slots, chosen = lax.fori_loop(0, plan.misses, load_and_compute, (slots, chosen))
        return chosen, slots, jnp.int32(1)


def _load(slots: ExpertWeights, bank: ExpertWeights, plan: Placement, first: Any, upto: Any) -> ExpertWeights:
    """Loads entries ``first .. upto`` of the plan's order."""
    return lax.fori_loop(first, upto, lambda i, s: _load_one(s, bank, plan.order[i], plan.rows[i]), slots)


def _load_one(slots: ExpertWeights, bank: ExpertWeights, expert: Array, row: Array) -> ExpertWeights:
    """One expert from host memory into a row, in place. The slice moves as it is: anything done to it before would be
    computed on the host."""

    def move(rows: Array, experts: Array) -> Array:
        origin = (0,) * (experts.ndim - 1)
        one = lax.dynamic_slice(experts, (expert, *origin), (1, *experts.shape[1:]))
        one = jax.device_put(one, jax.memory.Space.Device)
        return lax.dynamic_update_slice(rows, one, (row, *origin))

    return ExpertWeights(move(slots.gate_up, bank.gate_up), move(slots.down, bank.down))


def _alone(x: Array, slots: ExpertWeights, row: Array) -> Array:
    """Output ``[T, H]`` of the expert in one row."""
    one = ExpertWeights(*(lax.dynamic_slice_in_dim(a, row, 1) for a in (slots.gate_up, slots.down)))
    return expert_outputs(x, one)[0]


def _with_expert(chosen: Array, ids: Array, expert: Array, output: Array) -> Array:
    """``chosen [T, K, H]`` with ``output [T, H]`` wherever a token chose ``expert``."""
    return jnp.where((ids == expert)[..., None], output[:, None, :], chosen)


def _look_up(row_of: Array, ids: Array) -> Array:
    """Row of each chosen expert, ``[T, K]``; -1 where it has none, or where the token does not count."""
    return jnp.where(ids >= 0, row_of[jnp.maximum(ids, 0)], -1)


def _with_loaded(row_of: Array, plan: Placement, first: Any, upto: Array) -> Array:
    """``row_of [E]`` with entries ``first .. upto`` of the plan's order in their rows."""
    index = jnp.arange(row_of.size)
    loaded = (index >= first) & (index < upto)
    return row_of.at[jnp.where(loaded, plan.order, row_of.size)].set(plan.rows, mode="drop")
