"""Votes and the end of the block: ``oled-steps`` and ``boundary``, two ways to let the next block speak in time.

Both add to ``oled`` the *boundary set*: a moving average (weight ``eta``) of who is wanted by the first steps of
blocks. ``oled-steps`` shifts to it by degrees as the block nears its end, ``boundary`` at its last forward only. What
either could fetch ahead of demand, while the link is idle, would be speculation and is not here.
"""

import dataclasses
import math
from typing import Any, ClassVar, NamedTuple

import numpy as np

from oled_jax.parameters import parameter
from oled_jax.retention.arrays import Array, best, ranks
from oled_jax.retention.blocks import boundary_after, denoises, finishing_after, row_tokens
from oled_jax.retention.fixed_point import FACTOR_BITS, FACTOR_ONE, factor, scaled, shares
from oled_jax.retention.policy import admits_all, slots_array
from oled_jax.retention.priority import Oled
from oled_jax.retention.record import KV_WRITE, Plan, Routing, StepRecord, takes_part
from oled_jax.retention.voting import Standing

_PACE_BITS = 8
_PACE_ONE = 1 << _PACE_BITS
_UNKNOWN = 1 << 20  # forwards left of a block of which nothing is known: so many that its end does not matter


class StepsState(NamedTuple):
    """``boundary`` int32 ``[L, E]``, the boundary set. By sequence, int32 ``[S]``: ``pace``, a moving average of tokens
    committed per forward in units of 1/256, 0 before the first; ``left``, the forwards of its block expected after the
    coming one."""

    standing: Standing
    boundary: Array
    pace: Array
    left: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class OledSteps(Oled):
    """``oled`` that knows how many forwards its block has left: P = (1 - beta) P_in + beta P_bnd.

    P_in is the priority of ``oled``, P_bnd the boundary set, both as shares of their sum in the layer. beta = exp(-r /
    ``rho_r``), where r forwards of the block are expected after the coming one: whoever stays through that one is there
    for those. After a sampling r = ceil(masks left / tokens per forward), the latter a moving average (weight ``pace``)
    of at least 1, with the forward that writes the finished block included; after that forward, the same with a whole
    block of masks. So beta is 1 for the forward whose input holds no mask. In a batch each sequence has its own beta,
    and all are added.

    Wanted experts are ranked with the gates in place of P_in, others with P_in decayed by ``rho_in``; in mode
    ``protect`` with ``rho_in`` 0, where only experts that nobody wants are compared, with P_in itself.
    """

    name: ClassVar[str] = "oled-steps"

    rho_r: float = parameter(1.0, low=0.01, high=100)
    eta: float = parameter(0.2, high=1)
    pace: float = parameter(0.5, high=1)

    def init(self, num_layers: int, num_experts: int, capacity: int, xp: Any, *, sequences: int = 1) -> StepsState:
        """No votes yet, and no boundary."""
        standing = Standing.start(num_layers, num_experts, sequences, xp)
        return StepsState(standing, xp.zeros((num_layers, num_experts), xp.int32), *self._rows(sequences, xp))

    def for_batch(self, state: StepsState, sequences: int, xp: Any) -> StepsState:
        """Recency and the boundary set stay."""
        return StepsState(state.standing.forgotten(sequences, xp), state.boundary, *self._rows(sequences, xp))

    def gates(self, state: StepsState, routing: Routing, num_experts: int, xp: Any) -> Array:
        """(1 - beta) P~ of the running forward, each sequence's as shares, in units of 2^-24."""
        votes = self._provisional(routing, routing.row, state.left.shape[0], num_experts, xp)
        within = (FACTOR_ONE - self._beta(state, xp)).reshape(-1, *(1,) * (votes.ndim - 1))
        return scaled(shares(votes, xp), within).sum(0, dtype=xp.int32)

    def plan(self, state: StepsState, layer, demand, counts, gates, resident, xp) -> Plan:
        """By P; equal ones by last use, then by the tie rule."""
        standing, beta = state.standing, self._beta(state, xp)
        votes = standing.priority[:, layer]
        within = (FACTOR_ONE - beta).reshape(-1, *(1,) * (votes.ndim - 1))
        priority = scaled(shares(votes, xp), within).sum(0, dtype=xp.int32)
        decays = self.mode == "select" or self.contested
        next_block = scaled(shares(state.boundary[layer], xp)[None], beta.reshape(within.shape)).sum(0, dtype=xp.int32)
        staying = scaled(priority, factor(self.rho_in)) if decays else priority
        value = next_block + xp.where(demand, gates, staying)
        tie = self._tie_keys(standing.recency, layer, demand, counts, xp)
        keys = (value, demand, priority, standing.recency.last_of(layer, demand, xp), *tie)
        return Plan(ranks(keys, xp), ranks((demand, gates + next_block, *tie), xp), admits_all(demand, xp))

    def observe(self, state: StepsState, record: StepRecord, xp) -> StepsState:
        """Adds the forward's votes; learns from first steps, and how fast masks go."""
        standing = super().observe(state.standing, record, xp)
        same = state.standing.same(record, xp)
        pace, left = xp.where(same, state.pace, 0), xp.where(same, state.left, _UNKNOWN)
        if record.routing is None:
            return StepsState(standing, state.boundary, pace, left)
        tokens = row_tokens(record.routing, left.shape[0], xp)
        sampled, now = denoises(record, xp) & (tokens.total > 0), tokens.committed << _PACE_BITS
        change = ((now - pace) * factor(self.pace) + FACTOR_ONE // 2) >> FACTOR_BITS
        pace = xp.where(sampled, xp.where(pace > 0, pace + change, now), pace)
        written = takes_part(record, xp) & (xp.asarray(record.phase) == KV_WRITE)
        masks = xp.where(written, tokens.total, tokens.masked) << _PACE_BITS
        divisor = xp.maximum(pace, _PACE_ONE)
        expected = (masks + divisor - 1) // divisor
        left = xp.where(sampled | (written & (tokens.total > 0)), expected, left)
        return StepsState(standing, boundary_after(state.boundary, record, factor(self.eta), xp), pace, left)

    def _rows(self, sequences: int, xp: Any) -> tuple[Array, Array]:
        return xp.zeros(sequences, xp.int32), xp.full(sequences, _UNKNOWN, dtype=xp.int32)

    def _beta(self, state: StepsState, xp: Any) -> Array:
        """Of each sequence, a factor int32 ``[S]`` in units of 2^-14."""
        beyond = math.ceil(self.rho_r * (FACTOR_BITS + 1) * math.log(2)) + 1  # where beta has come to round to 0
        table = np.asarray([factor(math.exp(-left / self.rho_r)) for left in range(beyond + 1)], np.int32)
        return xp.asarray(table)[xp.minimum(state.left, beyond)]


class BoundaryState(NamedTuple):
    """``boundary`` int32 ``[L, E]``, the boundary set. ``finishing`` bool ``[S]``: no mask is left, so the coming
    forward is the last of its block. ``guarded`` int32 ``[L, 1]``: how many experts are protected then."""

    standing: Standing
    boundary: Array
    finishing: Array
    guarded: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Boundary(Oled):
    """Protects, in the last forward of a block, the experts that the next block's first step is likely to want.

    These are the K_b best of the boundary set among residents and wanted, K_b being ``share`` of the slots; in a batch
    that times the part of its sequences that are in the last forward of their block. Before and behind them, experts go
    as ``base`` says: ``lru``, or ``oled`` with its parameters.
    """

    name: ClassVar[str] = "boundary"

    base: str = parameter("lru", choices=("lru", "oled"))
    share: float = parameter(0.5, high=1)
    eta: float = parameter(0.2, high=1)

    @property
    def static_keep(self) -> bool:
        """Never: who is protected depends on who is there."""
        return False

    def init(self, num_layers: int, num_experts: int, capacity: int, xp: Any, *, sequences: int = 1) -> BoundaryState:
        """No boundary yet."""
        standing = Standing.start(num_layers, num_experts, sequences, xp)
        guarded = scaled(slots_array(num_layers, capacity, xp), factor(self.share))
        return BoundaryState(
            standing, xp.zeros((num_layers, num_experts), xp.int32), xp.full(sequences, False), guarded
        )

    def for_batch(self, state: BoundaryState, sequences: int, xp: Any) -> BoundaryState:
        """Recency and the boundary set stay."""
        return state._replace(standing=state.standing.forgotten(sequences, xp), finishing=xp.full(sequences, False))

    def gates(self, state: BoundaryState, routing: Routing, num_experts: int, xp: Any) -> Array:
        """Those of ``oled``, or 0 for ``lru``."""
        if self.base == "lru":
            return xp.zeros((*routing.ids.shape[:-2], num_experts), xp.int32)
        return super().gates(state.standing, routing, num_experts, xp)

    def plan(self, state: BoundaryState, layer, demand, counts, gates, resident, xp) -> Plan:
        """The protected first, then as the base ranks; candidates by the base."""
        standing, boundary = state.standing, state.boundary[layer]
        sequences = xp.maximum((standing.sequence >= 0).sum(dtype=xp.int32), 1)
        count = state.guarded[layer] * state.finishing.sum(dtype=xp.int32) // sequences
        guarded = best((resident | demand) & (boundary > 0), boundary, count, xp)
        keep = ranks((guarded, *self._keep_keys(standing, layer, demand, counts, gates, xp)), xp)
        tie = self._tie_keys(standing.recency, layer, demand, counts, xp)
        return Plan(keep, ranks((demand, gates, *tie), xp), admits_all(demand, xp))

    def observe(self, state: BoundaryState, record: StepRecord, xp) -> BoundaryState:
        """As the base; learns from first steps, and notes whose masks are gone."""
        finishing = finishing_after(state.finishing, state.standing.same(record, xp), record, xp)
        if self.base == "lru":
            standing = state.standing.voted(record, 0, 0, 0, xp)
        else:
            standing = super().observe(state.standing, record, xp)
        if record.routing is None:
            return state._replace(standing=standing, finishing=finishing)
        boundary = boundary_after(state.boundary, record, factor(self.eta), xp)
        return state._replace(standing=standing, boundary=boundary, finishing=finishing)
