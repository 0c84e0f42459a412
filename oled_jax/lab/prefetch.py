"""Speculation: experts moved to the device before anybody wants them, and where they go.

A ``Prefetch`` holds a prefetcher's parameters; ``start`` sets it to work on a stream, beside any retention policy. A
``System`` is a prefetcher that brings its own retention. A ``Prefetcher`` only predicts, by scores; what is
transferred, into which place and when it arrives is decided by whoever asks it (``oled_jax.lab.simulation``), by the
same rules for all of them:

- only what has no place on the device is transferred, in order of score, at most ``max_prefetch`` experts of a layer at
  a time, and always behind what is wanted now;
- with ``target=shared`` it takes a slot. A free one, or that of the resident worth least to the retention policy, the
  layer being idle. Predicted residents come last, and whether they yield at all says ``evict_predicted``;
- with ``target=extra`` it goes into staging beside the slots, until its layer's next step is over. What is used from
  there is a candidate for a slot like an expert that was fetched for this step; what is not is dropped, unless it has
  been predicted again. Retention then decides as it would without prefetching.

Here too: ``last-step`` and ``oracle-next``.
"""

import abc
import dataclasses
from typing import ClassVar

import numpy as np

from oled_jax.lab.keeping import Keeper, Layers
from oled_jax.lab.stream import Forward, Stream
from oled_jax.parameters import YES_NO, Parameterised, parameter

MOST_SCORE = 1 << 40  # scores are below it


class Prefetcher:
    """Predicts, one stream long. Scores are int64, 0 for an expert that is not predicted, else what comes first has
    more. For each decoding forward: ``begin`` if a batch begins with it; for each layer in order ``after_layer`` and
    ``ahead``; ``after_forward``. Whoever has nothing to say says None."""

    def begin(self, forward: Forward) -> None:
        """A batch begins."""

    def after_layer(self, forward: Forward, layers: Layers) -> np.ndarray | None:
        """What the same layer will want in the next forward: scores ``[E]``, or ``[L, E]`` for all layers."""
        return None

    def ahead(self, forward: Forward, layer: int) -> tuple[np.ndarray, np.ndarray] | None:
        """What the layers after ``layer`` will want in this forward: scores ``[L, E]``, zero up to ``layer``, and the
        worth of all residents (``Keeper.worth``). It takes the place of what was predicted before and not begun."""
        return None

    def after_forward(self, forward: Forward) -> np.ndarray | None:
        """What the next forward will want: scores ``[L, E]``, in place of what was predicted for it before. Called once
        the forward's tokens have been sampled, and for prefill too, where the answer is ignored."""
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speculation(Parameterised, abc.ABC):
    """What prefetchers share: where transfers go and how many there may be, ``max_prefetch`` 0 standing for C."""

    noun: ClassVar[str] = "prefetcher"
    layer_by_layer: ClassVar[bool] = False
    """True if it predicts for layers to come of the running forward."""

    target: str = parameter("shared", choices=("shared", "extra"))
    evict_predicted: str = parameter("lower", choices=("lower", "any", "never"))
    max_prefetch: int = parameter(0, high=1 << 16)

    @property
    def takes_time(self) -> bool:
        """False if transfers are to take no time even where a machine is given."""
        return True

    @property
    def needs_machine(self) -> bool:
        """Whether it makes no sense without one."""
        return False

    def limit(self, capacity: int) -> int:
        """Transfers per layer at a time."""
        return self.max_prefetch or capacity


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prefetch(Speculation):
    """A prefetcher that goes with any retention policy."""

    @abc.abstractmethod
    def start(self, stream: Stream, study: Stream | None = None) -> Prefetcher:
        """The prefetcher at work, having learnt from ``study`` if it learns."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class System(Speculation):
    """A prefetcher together with the retention that belongs to it."""

    mode: ClassVar[str] = "protect"
    prefetches: ClassVar[bool] = True

    @abc.abstractmethod
    def start(self, stream: Stream, capacity: int, study: Stream | None = None) -> tuple[Keeper, Prefetcher]:
        """Both at work, the prefetcher having learnt from ``study``; it is not asked where ``prefetches`` is false."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LastStep(Prefetch):
    """Fetches again what the last ``m`` forwards wanted and what has lost its place since; most tokens first."""

    name: ClassVar[str] = "last-step"

    m: int = parameter(1, low=1, high=64)

    def start(self, stream: Stream, study: Stream | None = None) -> Prefetcher:
        """See ``Prefetch``."""
        return _LastStep(stream, self.m)


class _LastStep(Prefetcher):
    def __init__(self, stream: Stream, m: int):
        self._stream, self._m = stream, m
        self._first = 0

    def begin(self, forward: Forward) -> None:
        self._first = forward.index  # what an earlier batch wanted predicts nothing

    def after_layer(self, forward: Forward, layers: Layers) -> np.ndarray:
        """Tokens at the latest of the last m forwards that wanted an expert; the later forward comes first."""
        counts, scores = self._stream.counts, None
        for age in range(min(self._m, forward.index - self._first + 1)):
            wanted = counts[forward.index - age, layers].astype(np.int64)
            wanted += (wanted > 0) * ((self._m - 1 - age) << 20)
            scores = wanted if scores is None else np.where(scores > 0, scores, wanted)
        return scores


@dataclasses.dataclass(frozen=True, kw_only=True)
class OracleNext(Prefetch):
    """Knows what the next ``h`` decoding forwards want, nearest first, then most tokens; its own never yield.

    ``timed=false``: everything arrives in time and the link is free, also on a machine. ``timed=true`` needs a machine,
    and what does not fit on its link is not there. It saves misses, not bytes.
    """

    name: ClassVar[str] = "oracle-next"

    evict_predicted: str = parameter("never", choices=("never",))
    h: int = parameter(1, low=1, high=64)
    timed: str = parameter("false", choices=YES_NO)

    @property
    def takes_time(self) -> bool:
        """As ``timed`` says."""
        return self.timed == "true"

    @property
    def needs_machine(self) -> bool:
        """As ``timed`` says."""
        return self.timed == "true"

    def start(self, stream: Stream, study: Stream | None = None) -> Prefetcher:
        """See ``Prefetch``."""
        return _OracleNext(stream, self.h)


class _OracleNext(Prefetcher):
    def __init__(self, stream: Stream, h: int):
        self._stream, self._h = stream, h

    def after_layer(self, forward: Forward, layers: Layers) -> np.ndarray | None:
        """The nearest forward first; within it most tokens."""
        counts, scores = self._stream.counts, None
        for ahead in range(1, self._h + 1):
            index = forward.index + ahead
            if index >= len(counts) or self._stream.prefill[index]:
                break
            wanted = counts[index, layers].astype(np.int64)
            wanted += (wanted > 0) * ((self._h - ahead) << 20)
            scores = wanted if scores is None else np.where(scores > 0, scores, wanted)
        return scores


def exchange(
    resident: np.ndarray,
    candidates: np.ndarray,
    scores: np.ndarray,
    worth: np.ndarray,
    pinned: np.ndarray,
    slots: np.ndarray,
    evict_predicted: str,
) -> np.ndarray:
    """Residents after ``candidates`` have asked for slots, in order of score: bool ``[..., E]``.

    ``scores`` int64 as of a ``Prefetcher``; ``worth`` int64 as of a ``Keeper``; ``pinned`` bool: residents that do not
    yield to anybody; ``slots`` integers ``[..., 1]``. Free slots go first, then those of residents that are not
    predicted, least worth first, then those of predicted ones: none of them (``never``); those with a lower score than
    the candidate, lowest first (``lower``); all, least worth first (``any``). Who finds no slot is left out, and
    everybody after it.
    """
    count = int(np.count_nonzero(candidates, axis=-1).max(initial=0))
    if not count:
        return resident
    predicted = scores > 0
    yielding = resident & ~pinned
    if evict_predicted == "never":
        yielding = yielding & ~predicted
    entering = np.argsort(np.where(candidates, -scores, MOST_SCORE), axis=-1, kind="stable")[..., :count]
    rank = np.where(predicted, scores, 0) if evict_predicted == "lower" else np.zeros_like(scores)
    leaving = np.lexsort((worth, rank, predicted, ~yielding), axis=-1)
    place = np.arange(count)
    free = slots - np.count_nonzero(resident, axis=-1)[..., None]
    victim = np.take_along_axis(leaving, np.clip(place - free, 0, resident.shape[-1] - 1), axis=-1)
    has_victim = place - free < np.count_nonzero(yielding, axis=-1)[..., None]
    if evict_predicted == "lower":
        theirs, ours = np.take_along_axis(scores, victim, axis=-1), np.take_along_axis(scores, entering, axis=-1)
        has_victim = has_victim & (theirs < ours)
    enters = (place < np.count_nonzero(candidates, axis=-1)[..., None]) & ((place < free) | has_victim)
    leaves = enters & (place >= free)
    gone = np.zeros(resident.shape, bool)
    np.put_along_axis(gone, victim, leaves, axis=-1)  # of equal places the last counts; they stand for no victim
    after = resident & ~gone
    np.put_along_axis(after, entering, np.take_along_axis(after, entering, axis=-1) | enters, axis=-1)
    return after


def seat(
    resident: np.ndarray,
    expert: int,
    scores: np.ndarray,
    worth: np.ndarray,
    pinned: np.ndarray,
    slots: int,
    evict_predicted: str,
) -> int | None:
    """Who leaves its slot to ``expert``, which has none: what ``exchange`` does for a single candidate, in a tenth of
    the time. ``expert`` itself if a slot is free; None if nobody leaves. Arrays ``[E]``."""
    if np.count_nonzero(resident) < slots:
        return expert
    yielding = resident & ~pinned
    plain = yielding & (scores == 0)
    if not plain.any():
        plain = yielding
        if evict_predicted == "lower":
            least = np.where(yielding, scores, MOST_SCORE).min()
            plain = yielding & (scores == least) & (least < scores[expert])
        if evict_predicted == "never" or not plain.any():
            return None
    return int(np.argmin(np.where(plain, worth, np.iinfo(np.int64).max)))
