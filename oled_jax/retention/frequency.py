"""Policies that count: ``lfu``, ``lfuda`` (dynamic aging with remembered counts), ``static-frequency``."""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import numpy as np

from oled_jax.errors import OledError
from oled_jax.retention.arrays import Array, ranks
from oled_jax.retention.fixed_point import factor, scaled
from oled_jax.retention.policy import Recency, RetentionPolicy, Table, TiedPolicy, admits_all, parameter
from oled_jax.retention.record import Plan, StepRecord, is_prefill

_COUNT_ONE = 1 << 8  # lfuda counts in units of 1/256, so that a halved count can be halved again
_OLDEST = -(1 << 24)


class LfuState(NamedTuple):
    """``frequency`` int32 ``[L, E]``: decode steps (or tokens) that wanted an expert so far."""

    recency: Recency
    frequency: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lfu(TiedPolicy):
    """Evicts what was wanted least often, counted in steps or in tokens; counts outlive eviction. Then last use."""

    name: ClassVar[str] = "lfu"

    weight: str = parameter("step", choices=("step", "token"))

    def init(self, num_layers: int, num_experts: int, capacity: int, xp: Any, *, sequences: int = 1) -> LfuState:
        """Recency and counts."""
        return LfuState(Recency.start(num_layers, num_experts, xp), xp.zeros((num_layers, num_experts), xp.int32))

    def plan(self, state: LfuState, layer, demand, counts, gates, resident, xp) -> Plan:
        """By frequency including this step; candidates by token count."""
        tie = self._tie_keys(state.recency, layer, demand, counts, xp)
        frequency = state.frequency[layer] + self._increment(counts, xp)
        keep = ranks((frequency, state.recency.last_of(layer, demand, xp), *tie), xp)
        return Plan(keep, ranks((counts, *tie), xp), admits_all(demand, xp))

    def observe(self, state: LfuState, record: StepRecord, xp) -> LfuState:
        """Counts decode forwards."""
        more = xp.where(is_prefill(record, xp), 0, self._increment(record.counts, xp))
        return LfuState(state.recency.seen(record, xp), state.frequency + more)

    def _increment(self, counts: Array, xp: Any) -> Array:
        counts = xp.asarray(counts, xp.int32)
        return counts if self.weight == "token" else (counts > 0).astype(xp.int32)


class LfudaState(NamedTuple):
    """In units of 1/256, int32 ``[L, E]``: ``count`` of a resident; ``key``, its count plus the layer's age when it was
    last wanted, minus the layer's age now; ``ghost``, what is remembered of a non-resident's count.

    The age itself only grows, and only differences to it matter, so it is not kept: when it rises, the keys fall.
    """

    recency: Recency
    count: Array
    key: Array
    ghost: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lfuda(TiedPolicy):
    """LFU with dynamic aging: evicts the smallest of (age when last wanted + count), and the age becomes the victim's.

    Counts stop at ``cap``; an evicted expert's count is remembered times ``ghost``, and grows by one each time it is
    wanted without being admitted. In prefill only admissions are noted.
    """

    name: ClassVar[str] = "lfuda"

    cap: int = parameter(12, low=1, high=2**12)
    ghost: float = parameter(0.5, high=1)

    def init(self, num_layers: int, num_experts: int, capacity: int, xp: Any, *, sequences: int = 1) -> LfudaState:
        """Recency, counts, keys, ghosts."""
        zeros = xp.zeros((num_layers, num_experts), xp.int32)
        return LfudaState(Recency.start(num_layers, num_experts, xp), zeros, zeros, zeros)

    def plan(self, state: LfudaState, layer, demand, counts, gates, resident, xp) -> Plan:
        """By key including this step; candidates by token count."""
        tie = self._tie_keys(state.recency, layer, demand, counts, xp)
        served = self._raised(xp.where(resident, state.count[layer], state.ghost[layer]), xp)
        key = xp.where(demand, served, state.key[layer])
        keep = ranks((key, state.recency.last_of(layer, demand, xp), *tie), xp)
        return Plan(keep, ranks((counts, *tie), xp), admits_all(demand, xp))

    def observe(self, state: LfudaState, record: StepRecord, xp) -> LfudaState:
        """Hits first, then evictions (which raise the age), then admissions and bypasses."""
        decode = ~is_prefill(record, xp)
        wanted = record.counts > 0
        hit = wanted & record.resident & decode
        count = xp.where(hit, self._raised(state.count, xp), state.count)
        key = xp.where(hit, count, state.key)
        aging = xp.max(xp.where(record.evicted, key, 0), axis=-1, keepdims=True)
        key = xp.maximum(key - xp.maximum(aging, 0), _OLDEST)
        ghost = xp.where(record.evicted, scaled(count, factor(self.ghost)), state.ghost)
        again = self._raised(state.ghost, xp)
        bypassed = wanted & ~record.resident & ~record.admitted & decode
        return LfudaState(
            state.recency.seen(record, xp),
            xp.where(record.admitted, again, count),
            xp.where(record.admitted, again, key),
            xp.where(bypassed, again, ghost),
        )

    def _raised(self, count: Array, xp: Any) -> Array:
        return xp.minimum(count + _COUNT_ONE, self.cap * _COUNT_ONE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StaticFrequency(RetentionPolicy):
    """Holds the experts most wanted in calibration, and never changes. ``counts`` ``[L, E]`` is required; ties by id.

    The state is the rank of each expert, int32 ``[L, E]``.
    """

    name: ClassVar[str] = "static-frequency"
    admits: ClassVar[bool] = False

    counts: Table | None = dataclasses.field(default=None, metadata={"axes": 2})

    @property
    def static_keep(self) -> bool:
        """Always."""
        return True

    def initial_residents(self, num_layers: int, num_experts: int, capacity: int) -> np.ndarray:
        """The ``capacity`` most frequent experts of each layer."""
        return self.init(num_layers, num_experts, capacity, np) >= num_experts - capacity

    def init(self, num_layers: int, num_experts: int, capacity: int, xp: Any, *, sequences: int = 1) -> Array:
        """Ranks by calibration count; OledError when there is not one count per layer and expert."""
        shape = self.counts.array.shape
        if shape != (num_layers, num_experts):
            raise OledError(
                f"policy {self.name}: counts has shape {list(shape)}, but the model has {num_layers} layers of "
                f"{num_experts} experts: give counts of this model, [{num_layers}, {num_experts}]"
            )
        # Ranked twice, because calibration counts may not fit the int32 that everything else is ranked in.
        dense = np.unique(self.counts.array, return_inverse=True)[1].reshape(shape)
        return xp.asarray(ranks((dense.astype(np.int32),), np))

    def plan(self, state, layer, demand, counts, gates, resident, xp) -> Plan:
        """Admits nobody."""
        return Plan(state[layer], ranks((counts,), xp), xp.full(demand.shape, False))

    def observe(self, state, record, xp) -> Array:
        """Nothing to learn."""
        return state

    def _problems(self):
        yield from super()._problems()
        if self.counts is None:
            yield "counts is missing: give how often each expert was wanted, [layers, experts]"
