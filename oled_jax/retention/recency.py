"""Policies that look at time alone: ``ondemand``, ``lru``, ``fifo``, ``random``."""

import dataclasses
from typing import Any, ClassVar, NamedTuple

from oled_jax.parameters import parameter
from oled_jax.retention.arrays import Array, ranks
from oled_jax.retention.fixed_point import hashed
from oled_jax.retention.policy import Recency, RetentionPolicy, TiedPolicy, admits_all
from oled_jax.retention.record import Plan, StepRecord

_KEEP_SALT, _ADMIT_SALT = 2, 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnDemand(RetentionPolicy):
    """Retains nothing: every wanted expert is fetched in every step. The upper bound on traffic. No state."""

    name: ClassVar[str] = "ondemand"
    admits: ClassVar[bool] = False

    @property
    def static_keep(self) -> bool:
        """Always."""
        return True

    def init(self, num_layers: int, num_experts: int, capacity: int, xp: Any, *, sequences: int = 1) -> tuple[()]:
        """No state."""
        return ()

    def plan(self, state, layer, demand, counts, gates, resident, xp) -> Plan:
        """Admits nobody."""
        order = ranks((counts,), xp)
        return Plan(ranks((xp.zeros_like(counts),), xp), order, xp.full(demand.shape, False))

    def observe(self, state, record, xp) -> tuple[()]:
        """Nothing to learn."""
        return state


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lru(TiedPolicy):
    """Evicts what was wanted longest ago; every demand counts as a use, admitted or not. The reference baseline.

    Admission follows the tie rule and not the token counts, so that the baseline stays blind to load.
    """

    name: ClassVar[str] = "lru"

    def init(self, num_layers: int, num_experts: int, capacity: int, xp: Any, *, sequences: int = 1) -> Recency:
        """Recency."""
        return Recency.start(num_layers, num_experts, xp)

    def plan(self, state, layer, demand, counts, gates, resident, xp) -> Plan:
        """By last use, then by the tie rule."""
        tie = self._tie_keys(state, layer, demand, counts, xp)
        keep = ranks((state.last_of(layer, demand, xp), *tie), xp)
        return Plan(keep, ranks((demand, *tie), xp), admits_all(demand, xp))

    def observe(self, state, record, xp) -> Recency:
        """Updates recency."""
        return state.seen(record, xp)


class FifoState(NamedTuple):
    """``admitted_at`` int32 ``[L, E]``: the forward of the last admission, -1 if never."""

    recency: Recency
    admitted_at: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fifo(TiedPolicy):
    """Evicts what was admitted longest ago; hits change nothing. Equal admissions and candidates by the tie rule."""

    name: ClassVar[str] = "fifo"

    def init(self, num_layers: int, num_experts: int, capacity: int, xp: Any, *, sequences: int = 1) -> FifoState:
        """Recency (for the tie rule) and times of admission."""
        return FifoState(
            Recency.start(num_layers, num_experts, xp), xp.full((num_layers, num_experts), -1, dtype=xp.int32)
        )

    def plan(self, state, layer, demand, counts, gates, resident, xp) -> Plan:
        """By time of admission; a candidate would be admitted now."""
        tie = self._tie_keys(state.recency, layer, demand, counts, xp)
        entering = demand & ~resident
        keep = ranks((xp.where(entering, state.recency.forward, state.admitted_at[layer]), *tie), xp)
        return Plan(keep, ranks((demand, *tie), xp), admits_all(demand, xp))

    def observe(self, state: FifoState, record: StepRecord, xp) -> FifoState:
        """Notes who was admitted."""
        now = xp.asarray(record.forward, xp.int32)
        return FifoState(state.recency.seen(record, xp), xp.where(record.admitted, now, state.admitted_at))


class RandomState(NamedTuple):
    """``forward`` int32 ``[]``: the forward to come. ``layers`` int32 ``[L]``: the layers' own numbers."""

    forward: Array
    layers: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Random(RetentionPolicy):
    """Evicts and admits in random order, drawn anew for each (``seed``, forward, layer) by a counter-based hash."""

    name: ClassVar[str] = "random"

    seed: int = parameter(0, high=2**31 - 1)

    @property
    def static_keep(self) -> bool:
        """Always: the draw does not look at the demand."""
        return True

    def init(self, num_layers: int, num_experts: int, capacity: int, xp: Any, *, sequences: int = 1) -> RandomState:
        """The counter."""
        return RandomState(xp.zeros((), xp.int32), xp.arange(num_layers, dtype=xp.int32))

    def plan(self, state: RandomState, layer, demand, counts, gates, resident, xp) -> Plan:
        """Two independent draws."""
        number, experts = state.layers[layer], demand.shape[-1]
        keep = hashed(self.seed, state.forward, number, experts, _KEEP_SALT, xp)
        admit = hashed(self.seed, state.forward, number, experts, _ADMIT_SALT, xp)
        return Plan(ranks((keep,), xp), ranks((admit,), xp), admits_all(demand, xp))

    def observe(self, state: RandomState, record: StepRecord, xp) -> RandomState:
        """Counts on."""
        return RandomState(xp.asarray(record.forward, xp.int32) + 1, state.layers)
