"""Residency of other published systems: what each keeps on the device, apart from what it prefetches or runs on a host.

Their dispatch rules are not here, and a row of a table that says ``fiddler`` or ``dali`` under a dispatch that fetches
every miss compares their residency alone. Two of them, and one of the two meanings of mixtral-offloading, keep what
``lru`` or ``static-frequency`` keeps; they have names of their own so that a table can say what it compares with.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple

from oled_jax.parameters import parameter
from oled_jax.retention.arrays import Array, best, ranks
from oled_jax.retention.fixed_point import FACTOR_ONE, PRIORITY_LIMIT, factor, scaled
from oled_jax.retention.frequency import StaticFrequency
from oled_jax.retention.policy import Recency, TiedPolicy, admits_all
from oled_jax.retention.recency import Lru
from oled_jax.retention.record import Plan, Routing, StepRecord, is_prefill
from oled_jax.retention.voting import TokenPolicy, everybody

_MEAN_BITS = 8  # a mean vote of tokens is kept in units of 2^-24, a moving token count in units of 2^-8


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtralLru(Lru):
    """mixtral-offloading as published: ``lru`` per layer. (``mixtral-tide`` is what TIDE means by it.) It also copies
    what it evicts back to the host, which weights that never change do not need."""

    name: ClassVar[str] = "mixtral-lru"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FreeToken(Lru):
    """FreeToken (arXiv 2608.16157): ``lru`` per layer; its own is how it splits misses between device and host."""

    name: ClassVar[str] = "freetoken"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fiddler(StaticFrequency):
    """Fiddler (arXiv 2402.07033): ``static-frequency``; its own is which misses it runs on the host."""

    name: ClassVar[str] = "fiddler"


class ScoreState(NamedTuple):
    """``score`` int32 ``[L, E]``: a moving average, in units that its policy tells."""

    recency: Recency
    score: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Scoring(TiedPolicy):
    """A policy with one moving average per expert."""

    def init(self, num_layers: int, num_experts: int, capacity: int, xp: Any, *, sequences: int = 1) -> ScoreState:
        """All 0."""
        return ScoreState(Recency.start(num_layers, num_experts, xp), xp.zeros((num_layers, num_experts), xp.int32))

    def _moved(self, score: Array, towards: Array, weight: int) -> Array:
        return scaled(towards, weight) + scaled(score, FACTOR_ONE - weight)

    def _learned(self, state: ScoreState, record: StepRecord, score: Array, xp: Any) -> ScoreState:
        """With ``score`` in place, unless ``record`` is of prefill."""
        kept = xp.where(is_prefill(record, xp), state.score, score)
        return ScoreState(state.recency.seen(record, xp), kept)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HybriMoe(_Scoring, TokenPolicy):
    """HybriMoE (arXiv 2504.05897): evicts the lowest score, a moving average (weight ``alpha``) of the router's scores.

    The scores of a forward are their mean over its tokens, of which the 2K largest count, K being the experts that a
    token chooses. Only the weights of chosen experts are known here, not the router's scores for all, so an expert that
    nobody chose has score 0. The score includes the running forward. In units of 2^-24.
    """

    name: ClassVar[str] = "hybrimoe"

    alpha: float = parameter(0.5, high=1)

    def gates(self, state: ScoreState, routing: Routing, num_experts: int, xp: Any) -> Array:
        """The scores of the running forward."""
        return self._scores(routing, num_experts, xp)

    def plan(self, state: ScoreState, layer, demand, counts, gates, resident, xp) -> Plan:
        """By score, then by last use."""
        tie = self._tie_keys(state.recency, layer, demand, counts, xp)
        score = self._moved(state.score[layer], gates, factor(self.alpha))
        keep = ranks((score, state.recency.last_of(layer, demand, xp), *tie), xp)
        return Plan(keep, ranks((counts, *tie), xp), admits_all(demand, xp))

    def observe(self, state: ScoreState, record: StepRecord, xp) -> ScoreState:
        """Moves the scores of decode forwards."""
        if record.routing is None:
            return self._learned(state, record, state.score, xp)
        scores = self._scores(record.routing, state.score.shape[1], xp)
        return self._learned(state, record, self._moved(state.score, scores, factor(self.alpha)), xp)

    def _scores(self, routing: Routing, num_experts: int, xp: Any) -> Array:
        row = everybody(routing, xp)
        votes = self._provisional(routing, row, 1, num_experts, xp)[0]
        counted = xp.any(routing.ids >= 0, axis=-1) & (row >= 0)
        tokens = xp.maximum(counted.sum(-1, keepdims=True, dtype=xp.int32), 1)
        mean = ((votes // tokens) << _MEAN_BITS) + ((votes % tokens) << _MEAN_BITS) // tokens
        return xp.where(best(mean > 0, mean, 2 * routing.ids.shape[-1], xp), mean, 0)

    def _token_factor(self, confidence, status, xp) -> Array:
        return xp.full(confidence.shape, FACTOR_ONE, dtype=xp.int32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dali(_Scoring):
    """DALI (arXiv 2602.03495): evicts the lowest moving average (weight ``alpha``) of tokens per step, this one's too.

    A candidate below the resident that it would replace is bypassed. In units of 2^-8 tokens.
    """

    name: ClassVar[str] = "dali"

    alpha: float = parameter(0.5, high=1)

    @property
    def contested(self) -> bool:
        """As the rule says."""
        return True

    def plan(self, state: ScoreState, layer, demand, counts, gates, resident, xp) -> Plan:
        """By load; equal ones by last use, so that at equal loads a candidate enters."""
        tie = self._tie_keys(state.recency, layer, demand, counts, xp)
        load = self._load(state.score[layer], counts, xp)
        keep = ranks((load, state.recency.last_of(layer, demand, xp), *tie), xp)
        return Plan(keep, ranks((counts, *tie), xp), admits_all(demand, xp))

    def observe(self, state: ScoreState, record: StepRecord, xp) -> ScoreState:
        """Moves the loads of decode forwards."""
        return self._learned(state, record, self._load(state.score, record.counts, xp), xp)

    def _load(self, score: Array, counts: Array, xp: Any) -> Array:
        tokens = xp.minimum(xp.asarray(counts, xp.int32), PRIORITY_LIMIT >> _MEAN_BITS) << _MEAN_BITS
        return self._moved(score, tokens, factor(self.alpha))
