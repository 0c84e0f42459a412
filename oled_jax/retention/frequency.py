"""Policies that count: ``lfu`` and its variants, ``lfuda`` (dynamic aging with remembered counts) and its variant,
``static-frequency`` (counts of calibration)."""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import numpy as np

from oled_jax.errors import OledError
from oled_jax.parameters import parameter
from oled_jax.retention.arrays import Array, ranks
from oled_jax.retention.fixed_point import FACTOR_ONE, VOTE_BITS, factor, scaled
from oled_jax.retention.policy import Recency, Table, TiedPolicy, admits_all
from oled_jax.retention.record import Plan, Routing, StepRecord, is_prefill
from oled_jax.retention.static import FixedPolicy
from oled_jax.retention.voting import TokenPolicy, everybody, trusted

_COUNT_BITS = 8  # lfuda counts in units of 1/256, so that a halved count can be halved again
_COUNT_ONE = 1 << _COUNT_BITS
_OLDEST = -(1 << 24)
_RATIO_BITS = 12  # of lfru's ratio
_MOST_COUNTED = 1 << 18  # so that the ratio fits an int32


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
        value = self._value(state, frequency, layer, demand, xp)
        keep = ranks((value, state.recency.last_of(layer, demand, xp), *tie), xp)
        return Plan(keep, ranks((counts, *tie), xp), admits_all(demand, xp))

    def observe(self, state: LfuState, record: StepRecord, xp) -> LfuState:
        """Counts decode forwards."""
        more = xp.where(is_prefill(record, xp), 0, self._increment(record.counts, xp))
        return LfuState(state.recency.seen(record, xp), state.frequency + more)

    def _value(self, state: LfuState, frequency: Array, layer: Any, demand: Array, xp: Any) -> Array:
        return frequency

    def _increment(self, counts: Array, xp: Any) -> Array:
        counts = xp.asarray(counts, xp.int32)
        return counts if self.weight == "token" else (counts > 0).astype(xp.int32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LfuInCache(Lfu):
    """LFU that starts a count anew with each stay: what is evicted, or was not admitted, has count 0."""

    name: ClassVar[str] = "lfu-incache"

    def observe(self, state: LfuState, record: StepRecord, xp) -> LfuState:
        """Counts decode forwards of residents."""
        after = super().observe(state, record, xp)
        staying = (record.resident & ~record.evicted) | record.admitted
        return after._replace(frequency=xp.where(staying, after.frequency, 0))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lfru(Lfu):
    """Evicts the smallest count per time since last use, f / (1 + i - last). A reconstruction of our own.

    The ratio is rounded down to units of 2^-12, and counts stop at 2^18: what is equal then goes by last use.
    """

    name: ClassVar[str] = "lfru"

    def _value(self, state: LfuState, frequency: Array, layer: Any, demand: Array, xp: Any) -> Array:
        age = 1 + state.recency.forward - state.recency.last_of(layer, demand, xp)
        return (xp.minimum(frequency, _MOST_COUNTED) << _RATIO_BITS) // age


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
        served = self._raised(
            xp.where(resident, state.count[layer], state.ghost[layer]), self._worth_now(gates, xp), xp
        )
        key = xp.where(demand, served, state.key[layer])
        keep = ranks((key, state.recency.last_of(layer, demand, xp), *tie), xp)
        return Plan(keep, ranks((counts, *tie), xp), admits_all(demand, xp))

    def observe(self, state: LfudaState, record: StepRecord, xp) -> LfudaState:
        """Hits first, then evictions (which raise the age), then admissions and bypasses."""
        decode, worth = ~is_prefill(record, xp), self._worth_after(record, xp)
        wanted = record.counts > 0
        hit = wanted & record.resident & decode
        count = xp.where(hit, self._raised(state.count, worth, xp), state.count)
        key = xp.where(hit, count, state.key)
        aging = xp.max(xp.where(record.evicted, key, 0), axis=-1, keepdims=True)
        key = xp.maximum(key - xp.maximum(aging, 0), _OLDEST)
        ghost = xp.where(record.evicted, scaled(count, factor(self.ghost)), state.ghost)
        again = self._raised(state.ghost, worth, xp)
        bypassed = wanted & ~record.resident & ~record.admitted & decode
        return LfudaState(
            state.recency.seen(record, xp),
            xp.where(record.admitted, again, count),
            xp.where(record.admitted, again, key),
            xp.where(bypassed, again, ghost),
        )

    def _raised(self, count: Array, worth: Array | int, xp: Any) -> Array:
        return xp.minimum(count + worth, self.cap * _COUNT_ONE)

    def _worth_now(self, gates: Array | None, xp: Any) -> Array | int:
        """What being wanted by the running forward adds to a count, in units of 1/256: one."""
        return _COUNT_ONE

    def _worth_after(self, record: StepRecord, xp: Any) -> Array | int:
        """What having been wanted in ``record`` adds: one."""
        return _COUNT_ONE


@dataclasses.dataclass(frozen=True, kw_only=True)
class LfudaConf(Lfuda, TokenPolicy):
    """``lfuda`` in which being wanted adds the votes of the tokens that want, at most 1, in place of 1.

    A token votes with its gate weights times its confidence (1 once it is committed, ``c_init`` where a new block has
    none yet), or with ``w=one`` with its gate weights as they are. While a forward runs, its votes are provisional.
    What prefill admits counts 1.
    """

    name: ClassVar[str] = "lfuda-conf"

    w: str = parameter("identity", choices=("identity", "one"))
    c_init: float = parameter(0.2, high=1)

    def gates(self, state: LfudaState, routing: Routing, num_experts: int, xp: Any) -> Array:
        """The provisional votes of the running forward."""
        return self._provisional(routing, everybody(routing, xp), 1, num_experts, xp)[0]

    def _worth_now(self, gates: Array | None, xp: Any) -> Array | int:
        return xp.minimum(gates >> (VOTE_BITS - _COUNT_BITS), _COUNT_ONE)

    def _worth_after(self, record: StepRecord, xp: Any) -> Array | int:
        if record.routing is None:
            return _COUNT_ONE
        everyone = record.routing._replace(row=everybody(record.routing, xp))
        votes = self._sampled(everyone, 1, record.counts.shape[-1], xp)[0]
        return xp.where(is_prefill(record, xp), _COUNT_ONE, self._worth_now(votes, xp))

    def _token_factor(self, confidence, status, xp) -> Array:
        if self.w == "one":
            return xp.full(confidence.shape, FACTOR_ONE, dtype=xp.int32)
        return trusted(confidence, status, self.c_init, xp)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StaticFrequency(FixedPolicy):
    """Holds the experts most wanted in calibration, for good. ``counts`` ``[L, E]`` is required; ties by id."""

    name: ClassVar[str] = "static-frequency"

    counts: Table | None = dataclasses.field(default=None, metadata={"axes": 2})

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

    def _problems(self):
        yield from super()._problems()
        if self.counts is None:
            yield "counts is missing: give how often each expert was wanted, [layers, experts]"
        elif isinstance(self.counts, Table) and self.counts.array.ndim == 2:
            counts = self.counts.array
            wrong = np.argwhere(~(np.isfinite(counts) & (counts >= 0)))
            if len(wrong):
                (layer, expert), file = wrong[0], f" of {self.counts.source}" if self.counts.source else ""
                yield (
                    f"counts holds {counts[layer, expert]} at layer {layer}, expert {expert}{file}; "
                    "it must hold finite numbers that are not negative"
                )
