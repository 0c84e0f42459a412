"""The link between host and device: one transfer at a time, what is wanted now before what is only predicted.

Promises: a transfer that has begun is finished; a predicted one begins only while nothing wanted is waiting, earliest
deadline first, and not once its deadline has passed. A predicted one takes ``seconds_per_load``. Times are simulated
seconds.
"""

import heapq
from collections.abc import Callable, Iterable
from typing import NamedTuple


class Wish(NamedTuple):
    """A predicted expert. ``forward``, ``layer``: where it will be wanted; ``order``: what begins first has less, among
    those of one forward."""

    forward: int
    order: tuple[int, ...]
    layer: int
    expert: int


Claim = Callable[[Wish], bool]  # finds a place for a transfer about to begin; False if there is none


class Link:
    """Busy until ``busy_until``; ``arriving``: the predicted expert that is on its way, if any; ``dropped``: wishes
    that came to nothing, for want of time, since somebody last emptied the list."""

    def __init__(self, seconds_per_load: float):
        self.seconds_per_load = seconds_per_load
        self.busy_until = 0.0
        self.arriving: Wish | None = None
        self.dropped: list[Wish] = []
        self._wishes: list[Wish] = []
        self._since = 0.0
        self._passed = (-1, -1)

    def wish(self, wishes: Iterable[Wish]) -> None:
        """Adds predictions, made at the time that ``advance`` last reached."""
        for wish in wishes:
            heapq.heappush(self._wishes, wish)

    def replace(self, wishes: Iterable[Wish]) -> None:
        """Drops what has not begun, and takes ``wishes`` instead."""
        self.dropped += self._wishes
        self._wishes = list(wishes)
        heapq.heapify(self._wishes)

    def halt(self) -> None:
        """A prompt comes in between: what is on its way has landed before that is over, and the rest is dropped."""
        self.replace([])
        self.arriving = None

    def expire(self, forward: int, layer: int) -> None:
        """The step of a layer begins: what was predicted for it, or for an earlier one, is not begun any more."""
        self._passed = forward, layer
        while self._wishes and self._late(self._wishes[0]):
            self.dropped.append(heapq.heappop(self._wishes))

    def advance(self, now: float, claim: Claim) -> None:
        """Lets time pass until ``now``."""
        while self.busy_until <= now:
            self.arriving = None
            begins = max(self.busy_until, self._since)
            if begins >= now or not self._wishes:
                break
            wish = heapq.heappop(self._wishes)
            if self._late(wish):
                self.dropped.append(wish)
            elif claim(wish):
                self.arriving = wish
                self.busy_until = begins + self.seconds_per_load
        self._since = now

    def demand(self, now: float, seconds: float) -> None:
        """From ``now`` on what is wanted is sent for so many seconds, after the one on its way."""
        if seconds:
            self.busy_until = max(now, self.busy_until) + seconds
            self.arriving = None  # it lands before the first of them, and so before anybody asks again

    def _late(self, wish: Wish) -> bool:
        return (wish.forward, wish.layer) <= self._passed
