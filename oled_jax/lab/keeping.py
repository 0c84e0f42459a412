"""Who stays after a forward: retention policies at work on a stream, all layers at once.

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
from oled_jax.retention.recency import Lru

_UNWANTED_BITS = 61
_UNWANTED = 1 << _UNWANTED_BITS  # above every key of an expert that is not wanted now, see LruKeeper


class Keeper(abc.ABC):
    """Residents are bool ``[L, E]`` throughout. For each forward: ``begin`` if a batch begins with it; ``after`` if
    anything is missing; ``observe``."""

    admits = True
    """False if experts are never admitted, so that prefill leaves no one either."""

    def initial(self, stream: Stream) -> np.ndarray:
        """Residents before the first forward."""
        return np.zeros((stream.num_layers, stream.num_experts), bool)

    def begin(self, forward: Forward) -> None:  # noqa: B027  (most know nothing of batches)
        """A batch begins."""

    @abc.abstractmethod
    def after(self, forward: Forward, demand: np.ndarray, resident: np.ndarray) -> np.ndarray:
        """Who is resident once a decoding forward has been served, of those resident before or wanted."""

    @abc.abstractmethod
    def observe(self, forward: Forward, demand: np.ndarray, resident: np.ndarray, after: np.ndarray) -> None:
        """The forward is over, its tokens are sampled; called for prefill too."""


class PolicyKeeper(Keeper):
    """Any retention policy, as the engine runs it."""

    def __init__(self, policy: RetentionPolicy, stream: Stream, capacity: int):
        self._policy, self._stream, self._capacity = policy, stream, capacity
        self.admits = policy.admits
        self._state = policy.init(stream.num_layers, stream.num_experts, capacity, np)
        self._tokens = Tokens(stream.trace) if policy.reads_tokens else None
        self._routing: tuple[Any, Any] = (None, None)
        self._at = -1

    def initial(self, stream: Stream) -> np.ndarray:
        """What the policy places before it starts."""
        return self._policy.initial_residents(stream.num_layers, stream.num_experts, self._capacity)

    def begin(self, forward: Forward) -> None:
        """Forgets earlier sequences."""
        self._state = self._policy.for_batch(self._state, forward.batch_size, np)

    def after(self, forward: Forward, demand: np.ndarray, resident: np.ndarray) -> np.ndarray:
        """By the policy's plan and the one rule of a step."""
        policy, counts = self._policy, self._counts(forward)
        before, _ = self._read(forward)
        gates = None if before is None else policy.gates(self._state, before, self._stream.num_experts, np)
        plan = policy.plan(self._state, slice(None), demand, counts, gates, resident, np)
        options = {"mode": policy.mode, "contested": policy.contested}
        return step(resident, demand, plan, self._capacity, np, **options).resident

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

    def __init__(self, policy: Lru, stream: Stream, capacity: int):
        self._stream, self._capacity = stream, capacity
        self._select, self._load = policy.mode == "select", policy.tie == "load"
        self._by_id = np.arange(stream.num_experts)[::-1].astype(np.int64)
        self._keys = np.zeros((stream.num_layers, stream.num_experts), np.int64) + self._by_id

    @staticmethod
    def serves(policy: RetentionPolicy) -> bool:
        """Whether ``policy`` is one that this keeper can stand for."""
        return type(policy) is Lru and policy.tie in ("id", "load")

    def after(self, forward: Forward, demand: np.ndarray, resident: np.ndarray) -> np.ndarray:
        """The C best; in mode ``protect`` hits first, then candidates by the tie rule, then the others."""
        tie = self._tie(forward)
        if self._select:
            scores = np.where(demand, self._key(forward, tie), self._keys)
        else:  # the order among hits does not matter, since all of them stay
            scores = np.where(demand, tie + _UNWANTED, self._keys)
            scores += (demand & resident).astype(np.int64) << _UNWANTED_BITS
        return best(resident | demand, scores, self._capacity)

    def observe(self, forward: Forward, demand: np.ndarray, resident: np.ndarray, after: np.ndarray) -> None:
        """Notes the uses."""
        self._keys = np.where(demand, self._key(forward, self._tie(forward)), self._keys)

    def _tie(self, forward: Forward) -> np.ndarray:
        if not self._load:
            return self._by_id
        return (self._stream.counts[forward.index].astype(np.int64) << 16) + self._by_id

    @staticmethod
    def _key(forward: Forward, tie: np.ndarray) -> np.ndarray:
        return tie + ((forward.index + 1) << 32)


def keeper_of(policy: RetentionPolicy, stream: Stream, capacity: int) -> Keeper:
    """The keeper that runs ``policy``; OledError if one of its tables is of another model."""
    kind = LruKeeper if LruKeeper.serves(policy) else PolicyKeeper
    return kind(policy, stream, capacity)


def after_prefill(counts: np.ndarray, resident: np.ndarray, capacity: int) -> np.ndarray:
    """Residents after a forward of prefill, as the engine leaves them under every policy that admits anyone: of those
    resident or wanted, the ``capacity`` experts with most tokens; ties by id. ``counts`` integers ``[L, E]``."""
    order = ranks((counts,), np)
    plan = Plan(order, order, np.ones(counts.shape, bool))
    return step(resident, counts > 0, plan, capacity, np, mode="select").resident


def best(members: np.ndarray, scores: np.ndarray, capacity: int) -> np.ndarray:
    """The ``capacity`` members with the highest scores, or all: bool ``[L, E]``.

    ``scores`` int64 ``[L, E]``, not negative, and unique within a layer.
    """
    experts = members.shape[-1]
    scores = np.where(members, scores, -1)
    least = np.partition(scores, experts - capacity, axis=-1)[:, experts - capacity]
    return members & (scores >= least[:, None])
