"""Slots in one pool over all layers: ``lru-global``, and the pool of ``moe-infinity``.

There are C slots per layer on average, and a layer's step may take those of other layers. Its own hits stay; whoever it
has fetched enters, in the order of token counts, as far as there is room beside them.
"""

import abc
import dataclasses
from typing import ClassVar

import numpy as np

from oled_jax.lab.keeping import Keeper
from oled_jax.lab.prefetch import Prefetcher, System
from oled_jax.lab.stream import Stream
from oled_jax.retention.policy import slots_array

_MOST_VISITS = 1 << 16


class Pool(Keeper):
    """The common part. ``predicted`` bool ``[L, E]``: whom demand evicts last, set by a prefetcher."""

    pooled = True

    def __init__(self, stream: Stream, capacity: int):
        shape = stream.num_layers, stream.num_experts
        super().__init__(slots_array(stream.num_layers, capacity, np))
        self._counts = stream.counts
        self._place = np.arange(stream.num_layers * stream.num_experts)[::-1].reshape(shape)
        self.predicted = np.zeros(shape, bool)

    @abc.abstractmethod
    def standing(self) -> np.ndarray:
        """``worth`` of everybody, int64 ``[L, E]``, unique, from 0 to 2^60."""

    @abc.abstractmethod
    def _note(self, forward: int, layer: int, demand: np.ndarray, hits: np.ndarray) -> None:
        """A layer's demand, before anybody is evicted for it."""

    def settle(self, residents, forward, layers, demand, fetched) -> None:
        """See the module."""
        hits = demand & residents[layers]
        self._note(forward.index, layers, demand, hits)
        self.predicted[layers] = False
        if not fetched.any():
            return
        residents[layers] |= fetched
        leaving = np.count_nonzero(residents) - self.slots.sum()
        if leaving <= 0:
            return
        scores = self.standing() + (self.predicted.astype(np.int64) << 60)
        scores[layers] += hits.astype(np.int64) << 62
        entering = (1 << 61) + (self._counts[forward.index, layers].astype(np.int64) << 32) + self._place[layers]
        scores[layers] = np.where(fetched, entering, scores[layers])
        scores = np.where(residents, scores, np.iinfo(np.int64).max).reshape(-1)
        residents.reshape(-1)[np.argpartition(scores, leaving - 1)[:leaving]] = False

    def after(self, forward, layers, demand, resident, fetched) -> np.ndarray:
        """Not for a pool."""
        raise NotImplementedError("a pool is settled")

    def worth(self, forward, layers, demand, resident) -> np.ndarray:
        """That of everybody."""
        return self.standing()[layers]

    def preference(self, forward, layers, demand, resident) -> np.ndarray:
        """By token counts."""
        return self._counts[forward.index, layers].astype(np.int32)


class RecencyPool(Pool):
    """By the last use, a forward's later layer being the more recent one; then the smaller id."""

    def __init__(self, stream: Stream, capacity: int):
        super().__init__(stream, capacity)
        self._last = np.zeros(self._place.shape, np.int64)

    def standing(self) -> np.ndarray:
        """See ``Pool``."""
        return self._last * self._place.size + self._place

    def _note(self, forward: int, layer: int, demand: np.ndarray, hits: np.ndarray) -> None:
        self._last[layer][demand] = 1 + forward * len(self._last) + layer

    def observe(self, forward, demand, resident, after) -> None:
        """A prompt's uses count as well."""
        if forward.prefill:
            for layer in range(len(demand)):
                self._note(forward.index, layer, demand[layer], demand[layer])


class VisitPool(Pool):
    """By hits since an expert came in, its own admission being the first; then the last use; then the first by layer
    and id."""

    def __init__(self, stream: Stream, capacity: int):
        super().__init__(stream, capacity)
        self._forwards = len(stream)
        self._visits = np.zeros(self._place.shape, np.int64)
        self._last = np.zeros(self._place.shape, np.int64)

    def standing(self) -> np.ndarray:
        """See ``Pool``."""
        return (self._visits * (self._forwards + 1) + self._last) * self._place.size + self._place

    def settle(self, residents, forward, layers, demand, fetched) -> None:
        """Whoever goes starts anew when it comes back."""
        super().settle(residents, forward, layers, demand, fetched)
        self._visits[~residents] = 0

    def _note(self, forward: int, layer: int, demand: np.ndarray, hits: np.ndarray) -> None:
        visits = self._visits[layer]
        visits[hits] = np.minimum(visits[hits] + 1, _MOST_VISITS)
        visits[demand & ~hits] = 1
        self._last[layer][demand] = forward + 1

    def observe(self, forward, demand, resident, after) -> None:
        """A prompt is no visit."""
        self._visits[~after] = 0
        if forward.prefill:
            self._last[demand] = forward.index + 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolOnly(System):
    """A pool without prefetching, so without parameters."""

    prefetches: ClassVar[bool] = False

    target: str = dataclasses.field(default="shared", init=False, metadata={"choices": ("shared",)})
    evict_predicted: str = dataclasses.field(default="lower", init=False, metadata={"choices": ("lower",)})
    max_prefetch: int = dataclasses.field(default=0, init=False, metadata={"low": 0, "high": 0})


@dataclasses.dataclass(frozen=True, kw_only=True)
class LruGlobal(PoolOnly):
    """LRU over the slots of all layers."""

    name: ClassVar[str] = "lru-global"

    def start(self, stream: Stream, capacity: int, study: Stream | None = None) -> tuple[Keeper, Prefetcher]:
        """See ``System``."""
        return RecencyPool(stream, capacity), Prefetcher()


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoeInfinityLfu(PoolOnly):
    """The pool of ``moe-infinity`` alone, which is what its public code does for most models."""

    name: ClassVar[str] = "moe-infinity-lfu"

    def start(self, stream: Stream, capacity: int, study: Stream | None = None) -> tuple[Keeper, Prefetcher]:
        """See ``System``."""
        return VisitPool(stream, capacity), Prefetcher()
