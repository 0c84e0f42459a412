"""Clairvoyant rules, which know the whole trace: ``min-bypass``, the bound, and ``belady``, for reference.

``min-bypass`` misses least of all rules that move an expert only when it is wanted, in either mode, from the same
start: after each forward it keeps, of the residents and the wanted, those whose next use is nearest. (With unit costs,
sets that are wanted at once, and bypass allowed this is optimal: whatever is kept until its next use saves one miss,
and where more intervals overlap than there are slots, the one that ends last is dropped.) ``belady`` works in mode
``protect`` and always admits, so it is no bound.

With prefill included, what a forward of prefill leaves is not theirs to decide (``keeping.after_prefill``), as for any
policy; they choose between two of them.
"""

import abc
import dataclasses
from typing import ClassVar

import numpy as np

from oled_jax.lab.keeping import Keeper, best
from oled_jax.lab.stream import Forward, Stream


@dataclasses.dataclass(frozen=True)
class Bound(abc.ABC):
    """A clairvoyant rule by ``name``; ``mode`` as for retention policies."""

    name: ClassVar[str]
    mode: ClassVar[str]

    @property
    def label(self) -> str:
        """The name: there are no parameters."""
        return self.name

    @abc.abstractmethod
    def keeper(self, stream: Stream, slots: np.ndarray) -> Keeper:
        """The rule at work on a stream; ``slots`` of each layer, int32 ``[L, 1]``."""


@dataclasses.dataclass(frozen=True)
class MinBypass(Bound):
    """Keeps the nearest next uses; never-again last, ties by id."""

    name: ClassVar[str] = "min-bypass"
    mode: ClassVar[str] = "select"

    def keeper(self, stream: Stream, slots: np.ndarray) -> Keeper:
        """See ``Bound``."""
        return _Clairvoyant(stream, slots, protect=False)


@dataclasses.dataclass(frozen=True)
class Belady(Bound):
    """Admits whatever there is room for, nearest next use first; evicts the furthest of those that nobody wants."""

    name: ClassVar[str] = "belady"
    mode: ClassVar[str] = "protect"

    def keeper(self, stream: Stream, slots: np.ndarray) -> Keeper:
        """See ``Bound``."""
        return _Clairvoyant(stream, slots, protect=True)


BOUNDS = {bound.name: bound for bound in (MinBypass(), Belady())}


def next_uses(counts: np.ndarray) -> np.ndarray:
    """The next forward after each that wants an expert, N if none does: int32 ``[N, L, E]`` from ``counts``."""
    coming = np.full(counts.shape[1:], len(counts), np.int32)
    uses = np.empty(counts.shape, np.int32)
    for index in range(len(counts) - 1, -1, -1):
        uses[index] = coming
        np.copyto(coming, np.int32(index), where=counts[index] > 0)
    return uses


class _Clairvoyant(Keeper):
    def __init__(self, stream: Stream, slots: np.ndarray, *, protect: bool):
        super().__init__(slots)
        self._protect = protect
        self._uses = next_uses(stream.counts)
        self._by_id = np.arange(stream.num_experts)[::-1]

    def after(self, forward, layers, demand, resident, fetched) -> np.ndarray:
        """In mode ``protect`` hits come first, then who enters, then the others; each by nearness."""
        scores = self.worth(forward, layers, demand, resident)
        if self._protect:
            beyond = (len(self._uses) + 1) * len(self._by_id)
            scores += beyond * (demand.astype(np.int64) + (demand & resident))
        return best(resident | fetched, scores, self.room(layers))

    def worth(self, forward, layers, demand, resident) -> np.ndarray:
        """The nearness of the next use."""
        forwards, experts = len(self._uses), len(self._by_id)
        return (forwards - self._uses[forward.index, layers].astype(np.int64)) * experts + self._by_id

    def preference(self, forward, layers, demand, resident) -> np.ndarray:
        """The nearness of the next use."""
        return (len(self._uses) - self._uses[forward.index, layers]).astype(np.int32)

    def observe(self, forward: Forward, demand: np.ndarray, resident: np.ndarray, after: np.ndarray) -> None:
        """It knew."""
