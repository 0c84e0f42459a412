"""Placements that change every few steps only: ``tide``, ``interval``, ``mixtral-tide`` and ``tide-paper``.

After TIDE (arXiv 2605.20179), its placement alone. Between two refreshes nobody enters. Where the misses of those steps
run is the dispatch's affair and not decided here: TIDE runs them on the host, while in the interval refresh of the
second paper they are streamed to the device and not kept. Under a dispatch that fetches every miss, both are the same.
TIDE's release also demotes before it serves, so that a demoted expert that is wanted runs on the host; here hits are
judged before anything changes, as for every policy.
"""

import abc
import dataclasses
from typing import Any, ClassVar, NamedTuple

import numpy as np

from oled_jax.parameters import parameter
from oled_jax.retention.arrays import Array, ranks
from oled_jax.retention.policy import Recency, TiedPolicy, slots_array
from oled_jax.retention.record import KV_WRITE, Plan, StepRecord, is_prefill, takes_part
from oled_jax.retention.semantics import MODES

_FAR = 1 << 30  # beyond every step of a block


class TideState(NamedTuple):
    """``slots`` int32 ``[L, 1]``: C. By sequence, int32 ``[S]``: ``sequence``, whom a row belongs to, -1 for nobody;
    ``first``, its first generated block, -1 before that; ``block`` and ``step``, where its coming forward is expected:
    in the next block after the forward that wrote keys and values, else one step on. ``used`` int32 ``[L, E]``: tokens
    that wanted an expert so far, kept by ``tide-paper`` alone."""

    recency: Recency
    slots: Array
    sequence: Array
    first: Array
    block: Array
    step: Array
    used: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class RefreshPolicy(TiedPolicy):
    """The common part: when to refresh. Starts with experts 0 to C-1, as TIDE's release does, or with ``start=empty``
    like all other policies: what is placed beforehand was never missed, which no bound on misses allows for.

    Every step of a sequence's first generated block is a refresh, then every step whose index in its block is a
    multiple of the period; in a batch, that of the sequence nearest to the start of its block counts.
    """

    mode: str = parameter("select", choices=MODES)
    start: str = parameter("filled", choices=("filled", "empty"))

    @property
    @abc.abstractmethod
    def _period(self) -> int:
        """Steps from refresh to refresh."""

    def initial_residents(self, num_layers: int, num_experts: int, capacity: int) -> np.ndarray:
        """The first ``capacity`` experts, or none."""
        first = ranks((np.zeros((num_layers, num_experts), np.int32),), np)
        return (first >= num_experts - capacity) & (self.start == "filled")

    def init(self, num_layers: int, num_experts: int, capacity: int, xp: Any, *, sequences: int = 1) -> TideState:
        """Nothing seen."""
        recency, slots = Recency.start(num_layers, num_experts, xp), slots_array(num_layers, capacity, xp)
        used = xp.zeros((num_layers, num_experts), xp.int32)
        return TideState(recency, slots, *_unknown(sequences, xp), used)

    def for_batch(self, state: TideState, sequences: int, xp: Any) -> TideState:
        """Forgets the sequences."""
        return TideState(state.recency, state.slots, *_unknown(sequences, xp), state.used)

    def observe(self, state: TideState, record: StepRecord, xp) -> TideState:
        """Notes where each sequence goes on."""
        sequence, block = xp.asarray(record.sequence, xp.int32), xp.asarray(record.block, xp.int32)
        deciding = takes_part(record, xp)
        same = (sequence == state.sequence) & (sequence >= 0)
        written = xp.asarray(record.phase) == KV_WRITE
        first, place, step = (xp.where(same, x, -1) for x in (state.first, state.block, state.step))
        return state._replace(
            recency=state.recency.seen(record, xp),
            sequence=sequence,
            first=xp.where(deciding & (first < 0), block, first),
            block=xp.where(deciding, block + written.astype(xp.int32), place),
            step=xp.where(deciding, xp.where(written, 0, xp.asarray(record.step, xp.int32) + 1), step),
        )

    def _refreshes(self, state: TideState, xp: Any) -> Array:
        """Whether the coming forward is one, bool ``[]``; so it is while nothing is known of any sequence."""
        present = state.sequence >= 0
        nearest = xp.min(xp.where(present, state.step, _FAR))
        known = (nearest >= 0) & (nearest < _FAR)
        return ~known | xp.any(present & (state.block == state.first)) | (nearest % self._period == 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ByTokens(RefreshPolicy):
    """At a refresh, the C experts that most tokens want now stay or enter, and as many others as must leave: those that
    fewest tokens want now, then the least recently wanted. In mode ``protect`` what is wanted does not leave."""

    def plan(self, state: TideState, layer, demand, counts, gates, resident, xp) -> Plan:
        """By tokens now."""
        tie = self._tie_keys(state.recency, layer, demand, counts, xp)
        order = ranks((counts, *tie), xp)
        target = demand & (order >= order.shape[-1] - state.slots[layer])
        keep = ranks((target, counts, state.recency.last_of(layer, demand, xp), *tie), xp)
        return Plan(keep, order, target & self._refreshes(state, xp))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tide(_ByTokens):
    """TIDE's placement: the C experts that most tokens want, taken anew every ``tau`` steps."""

    name: ClassVar[str] = "tide"

    tau: int = parameter(4, low=1, high=2**20)

    @property
    def _period(self) -> int:
        return self.tau


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interval(Tide):
    """Interval refresh as the second paper compares with: ``tide``, for a dispatch that streams all misses."""

    name: ClassVar[str] = "interval"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixtralTide(_ByTokens):
    """What TIDE compares with under the name of mixtral-offloading: the C experts that most tokens want, every step."""

    name: ClassVar[str] = "mixtral-tide"

    @property
    def _period(self) -> int:
        return 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class TidePaper(Tide):
    """TIDE as its paper tells it: at a refresh, experts wanted most so far take the place of those wanted least so far.

    Counts tokens of decode forwards, this one included. An exchange must improve: at equal counts the resident stays.
    Only experts that this step wants are exchanged in, since moving others would be speculation.
    """

    name: ClassVar[str] = "tide-paper"

    @property
    def contested(self) -> bool:
        """A candidate must have been wanted more than the resident that it replaces."""
        return True

    def plan(self, state: TideState, layer, demand, counts, gates, resident, xp) -> Plan:
        """By tokens so far."""
        tie = self._tie_keys(state.recency, layer, demand, counts, xp)
        used = state.used[layer] + counts
        keep = ranks((used, resident, state.recency.last_of(layer, demand, xp), *tie), xp)
        return Plan(keep, ranks((used, *tie), xp), demand & self._refreshes(state, xp))

    def observe(self, state: TideState, record: StepRecord, xp) -> TideState:
        """Counts decode forwards."""
        more = xp.where(is_prefill(record, xp), 0, xp.asarray(record.counts, xp.int32))
        return super().observe(state, record, xp)._replace(used=state.used + more)


def _unknown(sequences: int, xp: Any) -> tuple[Array, ...]:
    """What a state holds by sequence, for rows of nobody: four arrays, since each may be donated."""
    return tuple(xp.full(sequences, -1, dtype=xp.int32) for _ in range(4))
