"""Who stays after a forward: retention policies at work on a stream, all layers at once or one after another.

A ``Keeper`` is one policy with its state, driven by ``replay``. ``PolicyKeeper`` runs any policy of
``oled_jax.retention`` through the same calls in the same order as the engine; ``LruKeeper`` decides as the general one
does for ``lru``, by one partition instead of three sorts, because every comparison needs that yardstick.
"""

import abc
from typing import Any

import numpy as np

from oled_jax.lab.stream import Forward, Stream, Tokens
from oled_jax.retention import Plan, RetentionPolicy, StepRecord, step
from oled_jax.retention.arrays import ranks
from oled_jax.retention.policy import slots_array
from oled_jax.retention.recency import Lru

_UNWANTED_BITS = 61
_UNWANTED = 1 << _UNWANTED_BITS  # above every key of an expert that is not wanted now, see LruKeeper


Layers = int | slice  # one layer, or slice(None) for all of them


class Keeper(abc.ABC):
    """For each forward: ``begin`` if a batch begins with it; ``after`` where anything is missing; ``observe``.

    ``layers`` is a layer, and the arrays that come with it are bool ``[E]``, or ``slice(None)``, and they are
    ``[L, E]``. ``resident``: who has a slot before the layer's step.
    """

    admits = True
    """False if experts are never admitted, so that prefill leaves no one either."""
    pooled = False
    """True if the slots of all layers are one pool, so that a layer's step may cost another layer's expert its slot;
    ``layers`` is then always one layer, and ``worth`` is unique over all of them."""

    def __init__(self, slots: np.ndarray):
        """``slots``: of each layer, int32 ``[L, 1]``."""
        self.slots = slots
        self._equal = int(slots[0, 0]) if (slots == slots[0]).all() else None

    def room(self, layers: Layers) -> int | np.ndarray:
        """The slots of ``layers``, as one number if all layers have equally many."""
        return self.slots[layers] if self._equal is None else self._equal

    def initial(self, stream: Stream) -> np.ndarray:
        """Residents before the first forward."""
        return np.zeros((stream.num_layers, stream.num_experts), bool)

    def begin(self, forward: Forward) -> None:  # noqa: B027  (most know nothing of batches)
        """A batch begins."""

    @abc.abstractmethod
    def after(
        self, forward: Forward, layers: Layers, demand: np.ndarray, resident: np.ndarray, fetched: np.ndarray
    ) -> np.ndarray:
        """Who is resident once a step has been served, of those resident before and those ``fetched``: the wanted
        ones that came to the device. What ran on the host cannot stay."""

    def settle(
        self, residents: np.ndarray, forward: Forward, layers: Layers, demand: np.ndarray, fetched: np.ndarray
    ) -> None:
        """Brings ``residents``, bool ``[L, E]`` of all layers, up to date in place: ``after`` of ``layers``."""
        residents[layers] = self.after(forward, layers, demand, residents[layers], fetched)

    @abc.abstractmethod
    def worth(self, forward: Forward, layers: Layers, demand: np.ndarray, resident: np.ndarray) -> np.ndarray:
        """Once a step has been served, who should keep its slot when a speculative transfer asks for one: int64, more
        stays, unique within a layer; for all experts, of which residents matter."""

    @abc.abstractmethod
    def preference(self, forward: Forward, layers: Layers, demand: np.ndarray, resident: np.ndarray) -> np.ndarray:
        """Of what a step misses, who should rather come to the device: more first, int32, not negative."""

    @abc.abstractmethod
    def observe(self, forward: Forward, demand: np.ndarray, resident: np.ndarray, after: np.ndarray) -> None:
        """The forward is over, its tokens are sampled; called for prefill too."""


class PolicyKeeper(Keeper):
    """Any retention policy, as the engine runs it."""

    def __init__(self, policy: RetentionPolicy, stream: Stream, slots: np.ndarray):
        shape = stream.num_layers, stream.num_experts
        super().__init__(slots)
        self._policy, self._stream = policy, stream
        self.admits = policy.admits
        self._state = policy.init(*shape, self.slots, np)
        self._tokens = Tokens(stream.trace) if policy.reads_tokens else None
        self._routing: tuple[Any, Any] = (None, None)
        self._at = -1
        self._planned: tuple[Any, Plan | None] = (None, None)

    def initial(self, stream: Stream) -> np.ndarray:
        """What the policy places before it starts."""
        return self._policy.initial_residents(stream.num_layers, stream.num_experts, self.slots)

    def begin(self, forward: Forward) -> None:
        """Forgets earlier sequences."""
        self._state = self._policy.for_batch(self._state, forward.batch_size, np)

    def after(self, forward, layers, demand, resident, fetched) -> np.ndarray:
        """By the policy's plan and the one rule of a step."""
        plan = self._plan(forward, layers, demand, resident)
        options = {"mode": self._policy.mode, "contested": self._policy.contested, "fetched": fetched}
        return step(resident, demand, plan, self.slots[layers], np, **options).resident

    def worth(self, forward, layers, demand, resident) -> np.ndarray:
        """The order in which the policy's plan for this step keeps experts."""
        return self._plan(forward, layers, demand, resident).keep_rank.astype(np.int64)

    def preference(self, forward, layers, demand, resident) -> np.ndarray:
        """The order in which the policy's plan for this step admits experts."""
        return self._plan(forward, layers, demand, resident).admit_rank

    def _plan(self, forward: Forward, layers: Layers, demand: np.ndarray, resident: np.ndarray) -> Plan:
        """Made once per step."""
        step_of = forward.index, layers
        if self._planned[0] != step_of:
            policy, counts = self._policy, self._counts(forward)[layers]
            before, _ = self._read(forward)
            if before is not None:
                before = before._replace(ids=before.ids[layers], weights=before.weights[layers])
            gates = None if before is None else policy.gates(self._state, before, self._stream.num_experts, np)
            self._planned = step_of, policy.plan(self._state, layers, demand, counts, gates, resident, np)
        return self._planned[1]

    def observe(self, forward: Forward, demand: np.ndarray, resident: np.ndarray, after: np.ndarray) -> None:
        """Hands the policy the record of the forward."""
        trace, rows, batch_rows = self._stream.trace, forward.rows, forward.batch_rows

        def of_batch(values: np.ndarray, absent: int) -> np.ndarray:
            full = np.full(forward.batch_size, absent, np.int32)
            full[batch_rows[::-1]] = values[rows][::-1]  # of several rows of a sequence, the first
            return full

        record = StepRecord(
            forward=forward.index,
            sequence=of_batch(trace.sequence, -1),
            block=of_batch(trace.block, 0),
            step=of_batch(trace.step, 0),
            phase=of_batch(trace.phase, 0),
            counts=self._counts(forward),
            resident=resident,
            admitted=after & ~resident,
            evicted=resident & ~after,
            routing=self._read(forward)[1],
        )
        self._state = self._policy.observe(self._state, record, np)

    def _counts(self, forward: Forward) -> np.ndarray:
        return self._stream.counts[forward.index].astype(np.int32)

    def _read(self, forward: Forward) -> tuple[Any, Any]:
        """Routing before and after sampling, made once per forward; None for a policy that reads no tokens."""
        if self._tokens is not None and self._at != forward.index:
            self._at, self._routing = forward.index, self._tokens.next(forward)
        return self._routing


class LruKeeper(Keeper):
    """``lru`` with ``tie=id`` or ``tie=load``. Every expert has one key that orders by last use, then by the tie rule.

    A key is (1 + the forward of the last use) * 2^32, plus the tie: 2^16 * its tokens then (``load``), plus what puts
    the smaller id first. Keys are unique within a layer, so that the largest C are found without sorting.
    """

    def __init__(self, policy: Lru, stream: Stream, slots: np.ndarray):
        super().__init__(slots)
        self._stream = stream
        self._select, self._load = policy.mode == "select", policy.tie == "load"
        self._by_id = np.arange(stream.num_experts)[::-1].astype(np.int64)
        self._keys = np.zeros((stream.num_layers, stream.num_experts), np.int64) + self._by_id

    @staticmethod
    def serves(policy: RetentionPolicy) -> bool:
        """Whether ``policy`` is one that this keeper can stand for."""
        return type(policy) is Lru and policy.tie in ("id", "load")

    def after(self, forward, layers, demand, resident, fetched) -> np.ndarray:
        """The C best; in mode ``protect`` hits first, then candidates by the tie rule, then the others."""
        if self._select:
            scores = self.worth(forward, layers, demand, resident)
        else:  # the order among hits does not matter, since all of them stay
            scores = np.where(demand, self._tie(forward, layers) + _UNWANTED, self._keys[layers])
            scores += (demand & resident).astype(np.int64) << _UNWANTED_BITS
        return best(resident | fetched, scores, self.room(layers))

    def worth(self, forward, layers, demand, resident) -> np.ndarray:
        """The keys as this step leaves them."""
        return np.where(demand, self._key(forward, self._tie(forward, layers)), self._keys[layers])

    def preference(self, forward, layers, demand, resident) -> np.ndarray:
        """By the tie rule, as everybody is equally recent."""
        return np.broadcast_to(self._tie(forward, layers), demand.shape)

    def observe(self, forward: Forward, demand: np.ndarray, resident: np.ndarray, after: np.ndarray) -> None:
        """Notes the uses."""
        self._keys = self.worth(forward, slice(None), demand, resident)

    def _tie(self, forward: Forward, layers: Layers) -> np.ndarray:
        if not self._load:
            return self._by_id
        return (self._stream.counts[forward.index, layers].astype(np.int64) << 16) + self._by_id

    @staticmethod
    def _key(forward: Forward, tie: np.ndarray) -> np.ndarray:
        return tie + ((forward.index + 1) << 32)


def keeper_of(policy: RetentionPolicy, stream: Stream, capacity: int, budget: np.ndarray | None = None) -> Keeper:
    """The keeper that runs ``policy``; OledError if one of its tables is of another model. ``budget``: the slots of
    each layer, int32 ``[L, 1]``, where the policy does not share out the capacity by itself."""
    kind = LruKeeper if LruKeeper.serves(policy) else PolicyKeeper
    slots = policy.slots(stream.num_layers, stream.num_experts, capacity)
    if budget is not None and policy.equal_slots:
        slots = budget
    return kind(policy, stream, slots_array(stream.num_layers, slots, np))


def after_prefill(counts: np.ndarray, resident: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """Residents after a forward of prefill, as the engine leaves them under every policy that admits anyone: of those
    resident or wanted, as many as there are ``slots`` (int32 ``[L, 1]``), most tokens first; ties by id. ``counts``
    integers ``[L, E]``."""
    order = ranks((counts,), np)
    plan = Plan(order, order, np.ones(counts.shape, bool))
    return step(resident, counts > 0, plan, slots, np, mode="select").resident


def best(members: np.ndarray, scores: np.ndarray, slots: int | np.ndarray) -> np.ndarray:
    """As many members as there are ``slots`` (a number, or integers ``[..., 1]``), those with the highest scores, or
    all: bool ``[..., E]``.

    ``scores`` int64 ``[..., E]``, not negative, and unique within a layer.
    """
    experts = members.shape[-1]
    scores = np.where(members, scores, -1)
    if isinstance(slots, int):
        return members & (scores >= np.partition(scores, experts - slots, axis=-1)[..., experts - slots, None])
    least = np.take_along_axis(np.sort(scores, axis=-1), np.minimum(experts - slots, experts - 1), axis=-1)
    return members & (scores >= least) & (slots > 0)
