"""``s3fifo``: two queues and a memory of who left, for steps in which many experts are wanted at once.

A newcomer enters a *small* queue, or the *main* one if it is still remembered in the *ghost* queue. Room is made first,
for all newcomers of the step together, from the queues as they stand:

- while the small queue holds its share or more, its head goes: to the main queue if it was hit at least twice, else
  out, and into the ghost queue;
- otherwise the main queue's head goes out if its counter is 0; else the counter falls by one and the head goes to the
  tail, round after round;
- a head that this step wants goes to the tail of its own queue as it is; a queue with none but such heads is passed
  over, and where that is the main one, the small queue's oldest other goes out, whatever its share.

Counters count the steps that hit an expert, up to 3. (In the original, newcomers come one at a time and no head can be
wanted; the rounds of the main queue end after at most four, counters being what they are.)

Arrays cannot queue, but they need not: within a round nobody overtakes, so the experts leave the main queue in order
of counter, then of place, and the queue that stays behind is the old one cut at the last head that was looked at.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple

from oled_jax.parameters import parameter
from oled_jax.retention.arrays import Array, best, ranks
from oled_jax.retention.fixed_point import factor, scaled
from oled_jax.retention.policy import Recency, TiedPolicy, admits_all, slots_array
from oled_jax.retention.record import Plan, StepRecord, is_prefill

_MOST_HITS, _TO_MAIN = 3, 2
_SMALL, _MAIN, _LATE = 0, 1, 2  # from which queue an expert leaves; late: from the small one, beyond its share


class QueueState(NamedTuple):
    """``slots`` and ``share`` int32 ``[L, 1]``: C, and how many the small queue may hold. ``main`` bool ``[L, E]``: in
    the main queue, if resident. int32 ``[L, E]``: ``place``, the larger the nearer to the tail; ``hits``, the counter;
    ``ghost``, 0 for an expert that is not remembered, else the larger the later it left. Places are 0 to E-1, and
    outlive their use: those of non-residents mean nothing."""

    recency: Recency
    slots: Array
    share: Array
    main: Array
    place: Array
    hits: Array
    ghost: Array


class _Leaving(NamedTuple):
    """The order in which experts would leave, ``[..., E]``. ``queue`` int32: from where; ``counter`` int32: after how
    many rounds; ``moves`` bool: goes to the main queue at its turn in the small one; ``small`` bool: is in that one."""

    queue: Array
    counter: Array
    moves: Array
    small: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class S3Fifo(TiedPolicy):
    """S3-FIFO. The small queue's share is ``small`` of the slots, at least 1; the ghost queue has as many as there are.

    Wanted experts stay before all others, so both modes decide alike. In prefill only comings and goings are noted.
    """

    name: ClassVar[str] = "s3fifo"

    small: float = parameter(0.1, high=1)

    @property
    def static_keep(self) -> bool:
        """Never: whom the small queue gives up depends on who is wanted."""
        return False

    def init(self, num_layers: int, num_experts: int, capacity: int, xp: Any, *, sequences: int = 1) -> QueueState:
        """Empty queues."""
        slots = slots_array(num_layers, capacity, xp)
        zeros = xp.zeros((num_layers, num_experts), xp.int32)
        place = zeros + xp.arange(num_experts - 1, -1, -1, dtype=xp.int32)
        share = xp.maximum(scaled(slots, factor(self.small)), 1)
        recency = Recency.start(num_layers, num_experts, xp)
        return QueueState(recency, slots, share, zeros > 0, place, zeros, zeros)

    def plan(self, state: QueueState, layer, demand, counts, gates, resident, xp) -> Plan:
        """The reverse of the order of leaving; candidates by token count."""
        tie = self._tie_keys(state.recency, layer, demand, counts, xp)
        enter = ranks((counts, *tie), xp)
        queues = (state.share[layer], state.main[layer], state.place[layer], state.hits[layer])
        leaving = _leaving(*queues, demand, resident, xp)
        value = xp.where(demand & ~resident, enter, leaving.counter)
        keys = (demand & resident, demand, leaving.queue, value, leaving.moves, state.place[layer])
        return Plan(ranks(keys, xp), enter, admits_all(demand, xp))

    def observe(self, state: QueueState, record: StepRecord, xp) -> QueueState:
        """Lets the queues go on as the step did."""
        wanted, decode = record.counts > 0, ~is_prefill(record, xp)
        leaving = _leaving(state.share, state.main, state.place, state.hits, wanted, record.resident, xp)
        evicted, admitted, counter = record.evicted & decode, record.admitted, leaving.counter
        out = leaving.small & evicted & (leaving.queue != _MAIN)
        beyond = xp.any(evicted & (leaving.queue != _SMALL), axis=-1, keepdims=True)
        # Heads of the small queue have been looked at up to here.
        cut = xp.max(xp.where(out | (leaving.moves & beyond), state.place, -1), axis=-1, keepdims=True)
        moved = leaving.moves & (state.place <= cut)
        # Heads of the main queue: every one in ``rounds`` whole rounds, and once more up to the last that went out.
        order = ranks((moved, state.place), xp)
        from_main = evicted & (leaving.queue == _MAIN)
        rounds = xp.max(xp.where(from_main, counter, 0), axis=-1, keepdims=True)
        last = xp.max(xp.where(from_main & (counter == rounds), order, -1), axis=-1, keepdims=True)
        in_main = state.main | moved
        cut_off = xp.where(in_main, order <= last, state.place <= cut) & decode
        looked_at = xp.where(wanted | ~in_main, 0, rounds + (order <= last))
        hits = xp.maximum(xp.where(moved, 0, state.hits) - looked_at, 0)
        hits = xp.where(wanted & record.resident & decode, xp.minimum(hits + 1, _MOST_HITS), hits)
        tie = self._tie_keys(state.recency, slice(None), wanted, record.counts, xp)
        enter = xp.where(admitted, ranks((record.counts, *tie), xp), 0)
        remembered = state.ghost > 0
        return state._replace(
            recency=state.recency.seen(record, xp),
            main=xp.where(admitted, remembered, in_main),
            # Newcomers at the tail, the first admitted foremost; before them what was cut off, then the rest.
            place=ranks((admitted, -enter, cut_off, moved, state.place), xp),
            hits=xp.where(admitted, 0, hits),
            ghost=self._ghosts(state, out, leaving, admitted, xp),
        )

    def _ghosts(self, state: QueueState, out: Array, leaving: _Leaving, admitted: Array, xp: Any) -> Array:
        later = ranks((out, xp.where(out, leaving.queue, 0), xp.where(out, state.place, state.ghost)), xp) + 1
        kept = best((state.ghost > 0) | out, later, state.slots, xp)
        return xp.where(kept & ~admitted, later, 0)


def _leaving(share, main, place, hits, demand, resident, xp) -> _Leaving:
    """Who would leave when; arrays of one layer or of all."""
    small = resident & ~main
    free = small & ~demand
    size = small.sum(-1, keepdims=True, dtype=xp.int32)
    # The small queue gives up heads until it is below its share: the oldest, of those that nobody wants.
    exposed = best(free, place.shape[-1] - 1 - place, xp.maximum(size - share + 1, 0), xp)
    moves = exposed & (hits >= _TO_MAIN)
    from_small, from_main = exposed & ~moves, (resident & main) | moves
    queue = xp.where(from_small, _SMALL, xp.where(from_main, _MAIN, _LATE)).astype(xp.int32)
    counter = xp.where(resident & main, hits, 0)
    return _Leaving(queue, counter, moves, small)
