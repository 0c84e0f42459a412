"""Policies that rank experts by what the tokens of the running block say: ``oled`` and ``status``.

Every token votes for the experts that it chose, and votes are added per expert. After a forward's sampling the sum
becomes the experts' *priority*, kept per sequence. While the next forward runs, its own confidences do not exist yet,
so its *gates* are the same sum over its own routing with the confidences and statuses of the forward before.
"""

import abc
import dataclasses
from typing import Any, ClassVar, NamedTuple

import numpy as np

from oled_jax.errors import OledError
from oled_jax.retention.arrays import Array, ranks, vote_sums
from oled_jax.retention.fixed_point import (
    FACTOR_BITS,
    FACTOR_ONE,
    PRIORITY_LIMIT,
    VOTE_BITS,
    VOTE_ONE,
    evidence_table,
    factor,
    scaled,
    to_fixed,
)
from oled_jax.retention.policy import Recency, Table, TiedPolicy, admits_all, parameter
from oled_jax.retention.record import (
    DENOISE,
    JUST_COMMITTED,
    MASKED,
    SETTLED,
    Plan,
    Routing,
    StepRecord,
    takes_part,
)
from oled_jax.retention.semantics import MODES


class Standing(NamedTuple):
    """What the votes left behind. ``sequence``, ``block`` int32 ``[S]``: whom each row belongs to, -1 for nobody;
    ``priority`` int32 ``[S, L, E]``: votes in units of 2^-16 (evidence in ``noisy-or``)."""

    recency: Recency
    sequence: Array
    block: Array
    priority: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class VotingPolicy(TiedPolicy):
    """The common part: priorities per sequence from weighted votes."""

    reads_tokens: ClassVar[bool] = True

    @abc.abstractmethod
    def _token_factor(self, confidence: Array, status: Array, xp: Any) -> Array:
        """How much a token's vote counts, int32 ``[T]`` in units of 2^-14."""

    def _votes(self, routing: Routing, factors: Array, xp: Any) -> Array:
        """Each token's vote for each expert it chose, int32 ``[..., T, K]``: its gate weight times its factor."""
        weights = to_fixed(routing.weights, VOTE_BITS, xp)
        return (weights * factors[:, None] + FACTOR_ONE // 2) >> FACTOR_BITS

    def _start(self, num_layers: int, num_experts: int, sequences: int, xp: Any) -> Standing:
        return Standing(
            Recency.start(num_layers, num_experts, xp),
            xp.full(sequences, -1, dtype=xp.int32),
            xp.full(sequences, -1, dtype=xp.int32),
            xp.zeros((sequences, num_layers, num_experts), xp.int32),
        )

    def _forgotten(self, standing: Standing, sequences: int, xp: Any) -> Standing:
        """``standing`` without its sequences, with ``sequences`` empty rows instead."""
        layers, experts = standing.recency.last.shape
        return self._start(layers, experts, sequences, xp)._replace(recency=standing.recency)

    def _provisional(self, routing: Routing, num_experts: int, counted: Array, xp: Any) -> Array:
        """The running forward's own votes, int32 ``[..., E]``, of the tokens in ``counted`` bool ``[T]``.

        What the forward before committed enters this one as a word, so its routing is fresh: as good as settled.
        """
        status = xp.asarray(routing.status, xp.int32)
        status = xp.where(status == JUST_COMMITTED, SETTLED, status)
        factors = self._token_factor(routing.confidence, status, xp)
        row = xp.where((routing.row >= 0) & counted, 0, -1)
        votes = self._votes(routing, factors, xp)
        return vote_sums(routing.ids, votes, row, 1, num_experts, xp)[0]

    def _voted(self, standing: Standing, record: StepRecord, votes: Array | int, rho_in: int, rho_bnd: int, xp: Any):
        """``standing`` after ``record``: decays, then adds ``votes`` int32 ``[S, L, E]`` (or 0); factors in 2^-14."""
        sequence = xp.asarray(record.sequence, xp.int32)
        block = xp.asarray(record.block, xp.int32)
        deciding = takes_part(record, xp)
        same = (sequence == standing.sequence) & (sequence >= 0)
        crossed = same & (standing.block >= 0) & (block != standing.block)
        old = xp.where(_rows(same), standing.priority, 0)
        decayed = xp.where(_rows(crossed), scaled(old, rho_bnd), old)
        updated = xp.minimum(scaled(decayed, rho_in) + votes, PRIORITY_LIMIT)
        return Standing(
            standing.recency.seen(record, xp),
            sequence,
            xp.where(deciding, block, xp.where(same, standing.block, -1)),
            xp.where(_rows(deciding), updated, old),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Oled(VotingPolicy):
    """Confidence-guided retention between iterations: a reconstruction of OLED-MoE's priority map.

    ``w`` maps a token's confidence c to the factor of its votes: ``identity`` (c; 1 once committed), ``one``, or
    ``calibrated``: the measured chance that the token asks for the same expert again, looked up in ``table``
    ``[3, bins]`` by status (masked, just committed, settled) and by confidence in equal bins. ``w_jc`` is an extra
    factor for tokens just committed. ``aggregation`` ``sum`` adds factor times gate weight; ``noisy-or`` adds the
    evidence ``-log2(1 - factor)``, which ranks as the chance that any token asks again, and leaves gate weights out.

    ``rho_in`` decays priorities from forward to forward, ``rho_bnd`` once more when a sequence enters its next block.
    ``c_init`` stands for the confidences that a new block does not have yet.
    """

    name: ClassVar[str] = "oled"

    w: str = parameter("identity", choices=("identity", "one", "calibrated"))
    aggregation: str = parameter("sum", choices=("sum", "noisy-or"))
    rho_in: float = parameter(0.0, high=1)
    rho_bnd: float = parameter(0.5, high=1)
    c_init: float = parameter(0.2, high=1)
    w_jc: float = parameter(1.0, high=1)
    table: Table | None = dataclasses.field(default=None, metadata={"axes": 2})

    @property
    def contested(self) -> bool:
        """A candidate is bypassed if its gates fall below the decayed priority of the resident it would replace."""
        return factor(self.rho_in) > 0

    def init(self, num_layers: int, num_experts: int, capacity: int, xp: Any, *, sequences: int = 1) -> Standing:
        """No priorities yet."""
        return self._start(num_layers, num_experts, sequences, xp)

    def for_batch(self, state: Standing, sequences: int, xp: Any) -> Standing:
        """Recency stays."""
        return self._forgotten(state, sequences, xp)

    def gates(self, state: Standing, routing: Routing, num_experts: int, xp: Any) -> Array:
        """The provisional priorities P~ of the running forward."""
        everybody = xp.full(routing.row.shape, True)
        return self._provisional(routing, num_experts, everybody, xp)

    def plan(self, state: Standing, layer, demand, counts, gates, resident, xp) -> Plan:
        """Wanted experts by P~, the others by decayed priority; equal ones by last use, then by the tie rule."""
        priority = state.priority[:, layer].sum(0, dtype=xp.int32)
        value = xp.where(demand, gates, scaled(priority, factor(self.rho_in)))
        tie = self._tie_keys(state.recency, layer, demand, counts, xp)
        rest = (state.recency.last_of(layer, demand, xp), *tie)
        if self.mode == "protect":
            # Only experts that nobody wants can be evicted, and they go by their priority itself: decayed by 0, all
            # would be equal.
            rest = (priority, *rest)
        return Plan(ranks((value, demand, *rest), xp), ranks((demand, gates, *tie), xp), admits_all(demand, xp))

    def observe(self, state: Standing, record: StepRecord, xp) -> Standing:
        """Adds the forward's votes with its own confidences."""
        decays = factor(self.rho_in), factor(self.rho_bnd)
        routing, experts = record.routing, state.recency.last.shape[-1]
        if routing is None:
            return self._voted(state, record, 0, *decays, xp)
        factors = self._token_factor(routing.confidence, routing.status, xp)
        votes = self._votes(routing, factors, xp)
        votes = vote_sums(routing.ids, votes, routing.row, state.sequence.shape[0], experts, xp)
        return self._voted(state, record, votes, *decays, xp)

    def _token_factor(self, confidence, status, xp) -> Array:
        status = xp.asarray(status, xp.int32)
        given = to_fixed(confidence, FACTOR_BITS, xp)
        known = xp.where(confidence >= 0, given, factor(self.c_init))
        if self.w == "calibrated":
            bins = self.table.array.shape[1]
            chosen = xp.minimum((known * bins) >> FACTOR_BITS, bins - 1)
            table = np.rint(self.table.array.astype(np.float64) * FACTOR_ONE).astype(np.int32)
            weight = xp.asarray(table)[xp.minimum(status, SETTLED), chosen]
        elif self.w == "identity":
            weight = xp.where(status == MASKED, known, FACTOR_ONE)
        else:
            weight = xp.full(status.shape, FACTOR_ONE, dtype=xp.int32)
        return xp.where(status == JUST_COMMITTED, scaled(weight, factor(self.w_jc)), weight)

    def _votes(self, routing, factors, xp) -> Array:
        if self.aggregation == "sum":
            return super()._votes(routing, factors, xp)
        return xp.asarray(evidence_table())[factors >> (FACTOR_BITS - 10)][:, None]

    def _problems(self):
        yield from super()._problems()
        if self.w == "calibrated" and self.table is None:
            yield "w is calibrated, which needs table: chances by status and confidence bin, [3, bins]"
        if self.w != "calibrated" and self.table is not None:
            yield f"table is given, but w is {self.w}: a table is read with w=calibrated only"
        if isinstance(self.table, Table) and self.table.array.ndim == 2:
            if self.table.array.shape[0] != 3 or not 1 <= self.table.array.shape[1] <= 1024:
                yield f"table has shape {list(self.table.array.shape)}; it must be [3, bins] with 1 to 1024 bins"
            elif not np.all((self.table.array >= 0) & (self.table.array <= 1)):
                yield "table holds values outside 0 to 1; it must hold probabilities"


class StatusState(NamedTuple):
    """``boundary`` int32 ``[L, E]`` in units of 2^-16: how regularly an expert is wanted by the first step of a block.
    ``finishing`` bool ``[S]``: no mask is left, so the coming forward is the last of its block. ``successors`` int32
    ``[L, V, A]``: experts that a token id wants once it is settled (V = 0 without a table)."""

    standing: Standing
    boundary: Array
    finishing: Array
    successors: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Status(VotingPolicy):
    """Gate mass with votes weighted by status: settled tokens count 1, masked ones ``masked``.

    A token just committed changes its input from mask to word, and its routing with it. With ``successors``
    ``[L, V, A]`` (expert ids by layer and token id, -1 for none) it votes for those instead of its own experts, a
    share of 1/A each; without, for its own. At the forward whose input holds no mask, the last of its block, a
    sequence's experts are ranked by the *boundary set* instead: a moving average (weight ``eta``) of who is wanted by
    the first steps of blocks. In a batch both scales are added as they are: at a block's first step the boundary set
    sums to the number of experts wanted, the gate mass to the number of tokens, and the two are of one size.
    """

    name: ClassVar[str] = "status"

    mode: str = parameter("select", choices=MODES)
    masked: float = parameter(0.3, high=1)
    eta: float = parameter(0.2, high=1)
    successors: Table | None = dataclasses.field(default=None, metadata={"axes": 3})

    def init(self, num_layers: int, num_experts: int, capacity: int, xp: Any, *, sequences: int = 1) -> StatusState:
        """No votes yet; OledError when ``successors`` names other layers or experts than the model has."""
        table = np.full((num_layers, 0, 1), -1, np.int32)
        if self.successors is not None:
            table = self.successors.array.astype(np.int32)
            if table.shape[0] != num_layers or table.shape[2] < 1 or table.max(initial=-1) >= num_experts:
                raise OledError(
                    f"policy {self.name}: successors has shape {list(table.shape)} and expert ids up to "
                    f"{table.max(initial=-1)}, but the model has {num_layers} layers of {num_experts} experts: give a "
                    "table of this model, [layers, vocabulary, experts per token]"
                )
        return StatusState(
            self._start(num_layers, num_experts, sequences, xp),
            xp.zeros((num_layers, num_experts), xp.int32),
            xp.full(sequences, False),
            xp.asarray(table),
        )

    def for_batch(self, state: StatusState, sequences: int, xp: Any) -> StatusState:
        """Recency and the boundary set stay."""
        standing = self._forgotten(state.standing, sequences, xp)
        return state._replace(standing=standing, finishing=xp.full(sequences, False))

    def gates(self, state: StatusState, routing: Routing, num_experts: int, xp: Any) -> Array:
        """The running forward's votes, of the sequences that are not at the end of their block."""
        finishing = state.finishing[xp.maximum(routing.row, 0)]
        return self._provisional(routing, num_experts, ~finishing, xp)

    def plan(self, state: StatusState, layer, demand, counts, gates, resident, xp) -> Plan:
        """Wanted experts by gates, the others last forward's priority; both plus the boundary set where it counts."""
        standing = state.standing
        boundary = state.boundary[layer] * state.finishing.sum(dtype=xp.int32)
        staying = standing.priority * ~state.finishing[:, None, None]
        priority = boundary + staying[:, layer].sum(0, dtype=xp.int32)
        tie = self._tie_keys(standing.recency, layer, demand, counts, xp)
        rest = (standing.recency.last_of(layer, demand, xp), *tie)
        if self.mode == "select":
            # Whom nobody wants now is worth its place at the boundary; last forward's votes only order equals.
            value = (boundary + xp.where(demand, gates, 0), demand)
            rest = (priority, *rest)
        else:
            value = (demand, xp.where(demand, boundary + gates, priority))
        return Plan(ranks((*value, *rest), xp), ranks((demand, boundary + gates, *tie), xp), admits_all(demand, xp))

    def observe(self, state: StatusState, record: StepRecord, xp) -> StatusState:
        """Adds the forward's votes, learns from first steps, and notes whose masks are gone."""
        routing = record.routing
        experts, rows = state.boundary.shape[1], state.finishing.shape[0]
        if routing is None:
            same = xp.asarray(record.sequence, xp.int32) == state.standing.sequence
            standing = self._voted(state.standing, record, 0, 0, 0, xp)
            return state._replace(standing=standing, finishing=state.finishing & same)
        status = xp.asarray(routing.status, xp.int32)
        factors = self._token_factor(routing.confidence, status, xp)
        foreseen = None
        if state.successors.shape[1]:
            factors = xp.where(status == JUST_COMMITTED, 0, factors)
            known = (routing.tokens >= 0) & (routing.tokens < state.successors.shape[1])
            successors = state.successors[:, xp.where(known, routing.tokens, 0)]
            share = VOTE_ONE // state.successors.shape[2]
            votes = xp.where((status == JUST_COMMITTED) & known, share, 0)[:, None]
            foreseen = vote_sums(successors, votes, _present(routing, xp), rows, experts, xp)
        votes = vote_sums(routing.ids, self._votes(routing, factors, xp), routing.row, rows, experts, xp)
        votes = votes if foreseen is None else votes + foreseen
        denoising = takes_part(record, xp) & (xp.asarray(record.phase) == DENOISE)
        return StatusState(
            self._voted(state.standing, record, votes, 0, 0, xp),
            self._boundary_after(state, record, denoising, xp),
            self._finishing_after(state, record, denoising, xp),
            state.successors,
        )

    def _boundary_after(self, state: StatusState, record: StepRecord, denoising: Array, xp: Any) -> Array:
        first = denoising & (xp.asarray(record.step) == 0)
        routing = record.routing
        row = xp.where((routing.row >= 0) & first[xp.maximum(routing.row, 0)], 0, -1)
        wanted = vote_sums(routing.ids, xp.ones((1, 1), xp.int32), row, 1, state.boundary.shape[1], xp)[0] > 0
        change = (xp.where(wanted, VOTE_ONE, 0).astype(xp.int32) - state.boundary) * factor(self.eta)
        moved = state.boundary + ((change + FACTOR_ONE // 2) >> FACTOR_BITS)
        return xp.where(xp.any(first), moved, state.boundary)

    def _finishing_after(self, state: StatusState, record: StepRecord, denoising: Array, xp: Any) -> Array:
        row, rows = _present(record.routing, xp), xp.arange(state.finishing.shape[0])
        masked = (row == rows[:, None]) & (xp.asarray(record.routing.status) == MASKED)
        same = xp.asarray(record.sequence, xp.int32) == state.standing.sequence
        idle = same & ~xp.any(row == rows[:, None], axis=1)
        return xp.where(idle, state.finishing, denoising & ~xp.any(masked, axis=1))

    def _token_factor(self, confidence, status, xp) -> Array:
        status = xp.asarray(status, xp.int32)
        return xp.where(status == MASKED, factor(self.masked), FACTOR_ONE).astype(xp.int32)


def _rows(flags: Array) -> Array:
    """``[S]`` as ``[S, 1, 1]``."""
    return flags[:, None, None]


def _present(routing: Routing, xp: Any) -> Array:
    """The row of each token that counts, -1 for the others, int32 ``[T]``."""
    counted = xp.any(routing.ids >= 0, axis=(0, 2))
    return xp.where(counted, xp.asarray(routing.row, xp.int32), -1)
