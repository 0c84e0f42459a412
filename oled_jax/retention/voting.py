"""Votes of tokens for the experts that they chose: what policies that look at single tokens have in common.

Every token votes for its experts with its gate weights, times a factor that depends on its status and confidence. After
a forward's sampling the votes become the experts' *priority*, kept per sequence. While the next forward runs, its own
confidences do not exist yet, so its *gates* are the same votes over its own routing with the confidences and statuses
of the forward before.
"""

import abc
import dataclasses
from typing import Any, ClassVar, NamedTuple

from oled_jax.retention.arrays import Array, vote_sums
from oled_jax.retention.fixed_point import (
    FACTOR_BITS,
    FACTOR_ONE,
    PRIORITY_LIMIT,
    VOTE_BITS,
    factor,
    scaled,
    to_fixed,
)
from oled_jax.retention.policy import Recency, TiedPolicy
from oled_jax.retention.record import JUST_COMMITTED, MASKED, SETTLED, Routing, StepRecord, takes_part


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenPolicy(TiedPolicy):
    """A policy that counts what single tokens say."""

    reads_tokens: ClassVar[bool] = True

    @abc.abstractmethod
    def _token_factor(self, confidence: Array, status: Array, xp: Any) -> Array:
        """How much a token's vote counts, int32 ``[T]`` in units of 2^-14."""

    def _votes(self, routing: Routing, factors: Array, xp: Any) -> Array:
        """Each token's vote for each expert it chose, int32 ``[..., T, K]``: its gate weight times its factor."""
        weights = to_fixed(routing.weights, VOTE_BITS, xp)
        return (weights * factors[:, None] + FACTOR_ONE // 2) >> FACTOR_BITS

    def _tally(self, routing: Routing, votes: Array, row: Array, rows: int, num_experts: int, xp: Any) -> Array:
        """The votes for each expert, taken together per sequence: int32 ``[rows, ..., E]``. Here their sum."""
        return vote_sums(routing.ids, votes, row, rows, num_experts, xp)

    def _sampled(self, routing: Routing, rows: int, num_experts: int, xp: Any) -> Array:
        """A forward's votes after its sampling, int32 ``[rows, ..., E]``."""
        factors = self._token_factor(routing.confidence, routing.status, xp)
        return self._tally(routing, self._votes(routing, factors, xp), routing.row, rows, num_experts, xp)

    def _provisional(self, routing: Routing, row: Array, rows: int, num_experts: int, xp: Any) -> Array:
        """The running forward's votes before its sampling, int32 ``[rows, ..., E]``; ``row`` int32 ``[T]``, -1 for
        tokens to leave out.

        What the forward before committed enters this one as a word, so its routing is fresh: as good as settled.
        """
        status = xp.asarray(routing.status, xp.int32)
        status = xp.where(status == JUST_COMMITTED, SETTLED, status)
        factors = self._token_factor(routing.confidence, status, xp)
        return self._tally(routing, self._votes(routing, factors, xp), row, rows, num_experts, xp)


class Standing(NamedTuple):
    """What the votes left behind. ``sequence``, ``block`` int32 ``[S]``: whom each row belongs to, -1 for nobody;
    ``priority`` int32 ``[S, L, E]``: votes in units of 2^-16 (evidence in ``noisy-or``)."""

    recency: Recency
    sequence: Array
    block: Array
    priority: Array

    @classmethod
    def start(cls, num_layers: int, num_experts: int, sequences: int, xp: Any) -> "Standing":
        """Nobody voted yet."""
        return cls(
            Recency.start(num_layers, num_experts, xp),
            xp.full(sequences, -1, dtype=xp.int32),
            xp.full(sequences, -1, dtype=xp.int32),
            xp.zeros((sequences, num_layers, num_experts), xp.int32),
        )

    def forgotten(self, sequences: int, xp: Any) -> "Standing":
        """Without its sequences, with ``sequences`` empty rows instead; recency stays."""
        layers, experts = self.recency.last.shape
        return Standing.start(layers, experts, sequences, xp)._replace(recency=self.recency)

    def same(self, record: StepRecord, xp: Any) -> Array:
        """Which rows still hold the sequence that they held before ``record``, bool ``[S]``."""
        sequence = xp.asarray(record.sequence, xp.int32)
        return (sequence == self.sequence) & (sequence >= 0)

    def voted(self, record: StepRecord, votes: Array | int, rho_in: int, rho_bnd: int, xp: Any) -> "Standing":
        """After ``record``: decays, then adds ``votes`` int32 ``[S, L, E]`` (or 0); factors in 2^-14."""
        block = xp.asarray(record.block, xp.int32)
        deciding, same = takes_part(record, xp), self.same(record, xp)
        crossed = same & (self.block >= 0) & (block != self.block)
        old = xp.where(_rows(same), self.priority, 0)
        decayed = xp.where(_rows(crossed), scaled(old, rho_bnd), old)
        updated = xp.minimum(scaled(decayed, rho_in) + votes, PRIORITY_LIMIT)
        return Standing(
            self.recency.seen(record, xp),
            xp.asarray(record.sequence, xp.int32),
            xp.where(deciding, block, xp.where(same, self.block, -1)),
            xp.where(_rows(deciding), updated, old),
        )


def trusted(confidence: Array, status: Array, c_init: float, xp: Any) -> Array:
    """A token's confidence as a factor, int32 ``[T]`` in units of 2^-14: 1 once it is committed, ``c_init`` where a new
    block has none yet."""
    return xp.where(xp.asarray(status, xp.int32) == MASKED, known_confidence(confidence, c_init, xp), FACTOR_ONE)


def known_confidence(confidence: Array, c_init: float, xp: Any) -> Array:
    """Confidences in units of 2^-14, int32 ``[T]``; ``c_init`` where there is none."""
    return xp.where(confidence >= 0, to_fixed(confidence, FACTOR_BITS, xp), factor(c_init))


def everybody(routing: Routing, xp: Any) -> Array:
    """The row 0 for every token that counts, -1 for the others, int32 ``[T]``: all sequences taken together."""
    return xp.where(xp.asarray(routing.row, xp.int32) >= 0, 0, -1)


def _rows(flags: Array) -> Array:
    """``[S]`` as ``[S, 1, 1]``."""
    return flags[:, None, None]
