"""Policies that rank experts by what the tokens of the running block say: ``oled`` and ``status``."""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import numpy as np

from oled_jax.errors import OledError
from oled_jax.parameters import parameter
from oled_jax.retention.arrays import Array, ranks, vote_maxima, vote_sums
from oled_jax.retention.blocks import boundary_after, finishing_after, present_rows
from oled_jax.retention.fixed_point import FACTOR_BITS, FACTOR_ONE, VOTE_ONE, evidence_table, factor, scaled
from oled_jax.retention.policy import Table, admits_all, slots_array
from oled_jax.retention.record import JUST_COMMITTED, MASKED, SETTLED, Plan, Routing, StepRecord, is_prefill
from oled_jax.retention.semantics import MODES
from oled_jax.retention.voting import Standing, TokenPolicy, everybody, known_confidence, trusted


@dataclasses.dataclass(frozen=True, kw_only=True)
class Oled(TokenPolicy):
    """Confidence-guided retention between iterations: a reconstruction of OLED-MoE's priority map.

    ``w`` maps a token's confidence c to the factor of its votes: ``identity`` (c; 1 once committed), ``one``, or
    ``calibrated``: the measured chance that the token asks for the same expert again, looked up in ``table``
    ``[3, bins]`` by status (masked, just committed, settled) and by confidence in equal bins. ``w_jc`` is an extra
    factor for tokens just committed. ``aggregation`` ``sum`` adds factor times gate weight; ``noisy-or`` adds the
    evidence ``-log2(1 - factor)``, which ranks as the chance that any token asks again, and leaves gate weights out;
    ``max`` takes the largest factor times gate weight of a token of the sequence.

    ``rho_in`` decays priorities from forward to forward, ``rho_bnd`` once more when a sequence enters its next block.
    ``c_init`` stands for the confidences that a new block does not have yet.
    """

    name: ClassVar[str] = "oled"

    w: str = parameter("identity", choices=("identity", "one", "calibrated"))
    aggregation: str = parameter("sum", choices=("sum", "noisy-or", "max"))
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
        return Standing.start(num_layers, num_experts, sequences, xp)

    def for_batch(self, state: Standing, sequences: int, xp: Any) -> Standing:
        """Recency stays."""
        return state.forgotten(sequences, xp)

    def gates(self, state: Standing, routing: Routing, num_experts: int, xp: Any) -> Array:
        """The provisional priorities P~ of the running forward."""
        if self.aggregation == "max":  # taken by sequence, as priorities are
            rows = state.sequence.shape[0]
            return self._provisional(routing, routing.row, rows, num_experts, xp).sum(0, dtype=xp.int32)
        return self._provisional(routing, everybody(routing, xp), 1, num_experts, xp)[0]

    def plan(self, state: Standing, layer, demand, counts, gates, resident, xp) -> Plan:
        """Wanted experts by P~, the others by decayed priority; equal ones by last use, then by the tie rule."""
        keep = ranks(self._keep_keys(state, layer, demand, counts, gates, xp), xp)
        tie = self._tie_keys(state.recency, layer, demand, counts, xp)
        return Plan(keep, ranks((demand, gates, *tie), xp), admits_all(demand, xp))

    def observe(self, state: Standing, record: StepRecord, xp) -> Standing:
        """Adds the forward's votes with its own confidences."""
        votes, rows = 0, state.sequence.shape[0]
        if record.routing is not None:
            votes = self._sampled(record.routing, rows, state.recency.last.shape[-1], xp)
        return state.voted(record, votes, factor(self.rho_in), factor(self.rho_bnd), xp)

    def _keep_keys(self, state: Standing, layer, demand, counts, gates, xp) -> tuple[Array, ...]:
        priority = state.priority[:, layer].sum(0, dtype=xp.int32)
        value = xp.where(demand, gates, scaled(priority, factor(self.rho_in)))
        tie = self._tie_keys(state.recency, layer, demand, counts, xp)
        rest = (state.recency.last_of(layer, demand, xp), *tie)
        if self.mode == "protect":
            # Only experts that nobody wants can be evicted, and they go by their priority itself: decayed by 0, all
            # would be equal.
            rest = (priority, *rest)
        return (value, demand, *rest)

    def _token_factor(self, confidence, status, xp) -> Array:
        status = xp.asarray(status, xp.int32)
        if self.w == "calibrated":
            bins, known = self.table.array.shape[1], known_confidence(confidence, self.c_init, xp)
            chosen = xp.minimum((known * bins) >> FACTOR_BITS, bins - 1)
            table = np.rint(self.table.array.astype(np.float64) * FACTOR_ONE).astype(np.int32)
            weight = xp.asarray(table)[xp.minimum(status, SETTLED), chosen]
        elif self.w == "identity":
            weight = trusted(confidence, status, self.c_init, xp)
        else:
            weight = xp.full(status.shape, FACTOR_ONE, dtype=xp.int32)
        return xp.where(status == JUST_COMMITTED, scaled(weight, factor(self.w_jc)), weight)

    def _votes(self, routing, factors, xp) -> Array:
        if self.aggregation == "noisy-or":
            return xp.asarray(evidence_table())[factors >> (FACTOR_BITS - 10)][:, None]
        return super()._votes(routing, factors, xp)

    def _tally(self, routing, votes, row, rows, num_experts, xp) -> Array:
        if self.aggregation == "max":
            return vote_maxima(routing.ids, votes, row, rows, num_experts, xp)
        return super()._tally(routing, votes, row, rows, num_experts, xp)

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


_WIDTH_ONE = 1 << 8
_WIDTH_PACE = 5  # the moving average of the working set looks back some 2^5 forwards


class StatusState(NamedTuple):
    """``boundary`` int32 ``[L, E]``, the boundary set: how regularly an expert is wanted by the first step of a block.
    ``finishing`` bool ``[S]``: no mask is left, so the coming forward is the last of its block. ``popularity`` int32
    ``[L, E]``: decode steps that wanted an expert so far, and ``width`` int32 ``[L, 1]``, a moving average of the
    working set in units of 1/256: both are kept only where ``others`` looks at them. ``slots`` int32 ``[L, 1]``: C.
    ``successors`` int32 ``[L, V, A]``: experts that a token id wants once it is settled (V = 0 without a table)."""

    standing: Standing
    boundary: Array
    finishing: Array
    popularity: Array
    width: Array
    slots: Array
    successors: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Status(TokenPolicy):
    """Gate mass with votes weighted by status: settled tokens count 1, masked ones ``masked``.

    A token just committed changes its input from mask to word, and its routing with it. With ``successors``
    ``[L, V, A]`` (expert ids by layer and token id, -1 for none) it votes for those instead of its own experts, a
    share of 1/A each; without, for its own. At the forward whose input holds no mask, the last of its block, a
    sequence's experts are ranked by the *boundary set* instead: a moving average (weight ``eta``) of who is wanted by
    the first steps of blocks. In a batch both scales are added as they are: at a block's first step the boundary set
    sums to the number of experts wanted, the gate mass to the number of tokens, and the two are of one size.

    ``others`` orders the experts that nobody wants now: ``votes``, by last forward's; ``popular``, by how many decode
    steps wanted them so far, which pays where there are slots to spare for them; ``auto``, the latter in layers with at
    least as many slots as the working set has experts, on a moving average.
    """

    name: ClassVar[str] = "status"

    mode: str = parameter("select", choices=MODES)
    masked: float = parameter(0.3, high=1)
    eta: float = parameter(0.2, high=1)
    others: str = parameter("votes", choices=("votes", "popular", "auto"))
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
            Standing.start(num_layers, num_experts, sequences, xp),
            xp.zeros((num_layers, num_experts), xp.int32),
            xp.full(sequences, False),
            xp.zeros((num_layers, num_experts), xp.int32),
            xp.zeros((num_layers, 1), xp.int32),
            slots_array(num_layers, capacity, xp),
            xp.asarray(table),
        )

    def for_batch(self, state: StatusState, sequences: int, xp: Any) -> StatusState:
        """What is known of experts stays."""
        return state._replace(standing=state.standing.forgotten(sequences, xp), finishing=xp.full(sequences, False))

    def gates(self, state: StatusState, routing: Routing, num_experts: int, xp: Any) -> Array:
        """The running forward's votes, of the sequences that are not at the end of their block."""
        row = xp.where(state.finishing[xp.maximum(routing.row, 0)], -1, everybody(routing, xp))
        return self._provisional(routing, row, 1, num_experts, xp)[0]

    def plan(self, state: StatusState, layer, demand, counts, gates, resident, xp) -> Plan:
        """Wanted experts by gates, the others as ``others`` says; both plus the boundary set where it counts."""
        standing = state.standing
        boundary = state.boundary[layer] * state.finishing.sum(dtype=xp.int32)
        staying = standing.priority * ~state.finishing[:, None, None]
        priority = boundary + staying[:, layer].sum(0, dtype=xp.int32)
        behind = (priority,)
        if self.others != "votes":
            ample = self.others == "popular" or state.slots[layer] * _WIDTH_ONE >= state.width[layer]
            behind = (boundary, xp.where(ample, state.popularity[layer], 0), priority)
        tie = self._tie_keys(standing.recency, layer, demand, counts, xp)
        rest = (standing.recency.last_of(layer, demand, xp), *tie)
        if self.mode == "select":
            # Whom nobody wants now is worth its place at the boundary; what else is known of it only orders equals.
            keys = (boundary + xp.where(demand, gates, 0), demand, *behind, *rest)
        else:
            keys = (demand, xp.where(demand, boundary + gates, behind[0]), *behind[1:], *rest)
        return Plan(ranks(keys, xp), ranks((demand, boundary + gates, *tie), xp), admits_all(demand, xp))

    def observe(self, state: StatusState, record: StepRecord, xp) -> StatusState:
        """Adds the forward's votes, learns from first steps, and notes whose masks are gone."""
        routing = record.routing
        finishing = finishing_after(state.finishing, state.standing.same(record, xp), record, xp)
        if routing is None:
            return state._replace(standing=state.standing.voted(record, 0, 0, 0, xp), finishing=finishing)
        status, experts = xp.asarray(routing.status, xp.int32), state.boundary.shape[1]
        factors, foreseen = self._token_factor(routing.confidence, status, xp), 0
        rows = state.finishing.shape[0]
        if state.successors.shape[1]:
            factors = xp.where(status == JUST_COMMITTED, 0, factors)
            known = (routing.tokens >= 0) & (routing.tokens < state.successors.shape[1])
            successors = state.successors[:, xp.where(known, routing.tokens, 0)]
            share = VOTE_ONE // state.successors.shape[2]
            votes = xp.where((status == JUST_COMMITTED) & known, share, 0)[:, None]
            foreseen = vote_sums(successors, votes, present_rows(routing, xp), rows, experts, xp)
        votes = vote_sums(routing.ids, self._votes(routing, factors, xp), routing.row, rows, experts, xp)
        state = state if self.others == "votes" else self._popular_after(state, record, xp)
        return state._replace(
            standing=state.standing.voted(record, votes + foreseen, 0, 0, xp),
            boundary=boundary_after(state.boundary, record, factor(self.eta), xp),
            finishing=finishing,
        )

    def _popular_after(self, state: StatusState, record: StepRecord, xp: Any) -> StatusState:
        wanted = (xp.asarray(record.counts) > 0) & ~is_prefill(record, xp)
        size = wanted.sum(-1, keepdims=True, dtype=xp.int32) * _WIDTH_ONE
        width = xp.where(state.width > 0, state.width + ((size - state.width) >> _WIDTH_PACE), size)
        return state._replace(
            popularity=state.popularity + wanted.astype(xp.int32),
            width=xp.where(is_prefill(record, xp), state.width, width),
        )

    def _token_factor(self, confidence, status, xp) -> Array:
        status = xp.asarray(status, xp.int32)
        return xp.where(status == MASKED, factor(self.masked), FACTOR_ONE).astype(xp.int32)
