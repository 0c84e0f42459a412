"""The dispatch rules: which misses of a layer are fetched to the device, in what order, and which run on the host.

Source: specification, section 5; tags there say what is published and what is our reconstruction. Every rule is a
frozen dataclass with ``split``, a pure function of the layer's demand and the machine's costs, in numpy or inside a
jitted program. Every miss goes to exactly one side. While they decide, rules reckon with the costs of a machine whose
link and host are both busy. Where a rule looks like a loop over experts it is written as sums and maxima over them in
order: a loop inside a jitted step costs the device a wait for each turn. ``dali`` alone cannot be.

Decoding only: prompts are served by ``all-device``, whatever the rule. Without a host every rule is ``all-device``.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import numpy as np

from oled_jax.dispatch.costs import (
    Dispatch,
    LayerCosts,
    LayerDemand,
    Line,
    by_rank,
    device_finish,
    device_finishes,
    finish_times,
    hits_and_time,
    sums_up_to,
)
from oled_jax.parameters import YES_NO, Parameterised, parameter
from oled_jax.retention.arrays import Array, best, ranks
from oled_jax.retention.fixed_point import factor, scaled

LOAD_ORDER, REUSE_ORDER = "load", "reuse"  # who is fetched first: whom most tokens want, who is wanted again


@dataclasses.dataclass(frozen=True, kw_only=True)
class DispatchRule(Parameterised, abc.ABC):
    """Splits the misses of a layer. Frozen and hashable (static under jit)."""

    noun: ClassVar[str] = "dispatch rule"

    @property
    def link_order(self) -> str:
        """In what order misses are fetched where there is no host: ``load`` (most tokens first) or ``reuse``."""
        return LOAD_ORDER

    def split(self, demand: LayerDemand, costs: LayerCosts, xp: Any) -> Dispatch:
        """What runs where; arrays ``[..., E]``, each leading index a layer of its own. All-device without a host."""
        demand = demand.whole(xp)
        return (
            self._split(demand, costs, xp) if costs.has_host else _fetching(demand.missing, demand, self.link_order, xp)
        )

    @abc.abstractmethod
    def _split(self, demand: LayerDemand, costs: LayerCosts, xp: Any) -> Dispatch:
        """``split`` where there is a host."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllDevice(DispatchRule):
    """Fetches every miss (5.1): what most tokens want first, or by predicted reuse."""

    name: ClassVar[str] = "all-device"

    order: str = parameter(LOAD_ORDER, choices=(LOAD_ORDER, REUSE_ORDER))

    @property
    def link_order(self) -> str:
        """As chosen."""
        return self.order

    def _split(self, demand: LayerDemand, costs: LayerCosts, xp: Any) -> Dispatch:
        return _fetching(demand.missing, demand, self.order, xp)


ALL_DEVICE = AllDevice()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fiddler(DispatchRule):
    """By threshold (5.2; arXiv 2402.07033): to the host if ``t_host(n) < t_load + t_dev(n)``, each miss for itself."""

    name: ClassVar[str] = "fiddler"

    def _split(self, demand: LayerDemand, costs: LayerCosts, xp: Any) -> Dispatch:
        n = demand.counts
        slower = costs.host_time(n) >= costs.load_shared + costs.device_time(n)
        return _fetching(demand.missing & slower, demand, LOAD_ORDER, xp)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FreeToken(DispatchRule):
    """A share of the misses by bandwidth (5.3; arXiv 2608.16157); fetches the most recently wanted ones.

    With link p and host c, both while both run, ``form=code`` fetches p / (p + c) of them, if c > 2 p, else all;
    rounded to where the slower side is done first. ``form=paper`` fetches the link's share of the host memory's whole
    bandwidth, rounded to nearest. Blind to how many tokens want an expert. The released p / (2 p + c) for host copies
    that are not pinned is left out: here they all are.
    """

    name: ClassVar[str] = "freetoken"

    form: str = parameter("code", choices=("code", "paper"))

    def _split(self, demand: LayerDemand, costs: LayerCosts, xp: Any) -> Dispatch:
        missing = demand.missing
        misses = missing.sum(-1, keepdims=True, dtype=xp.int32)
        if self.form == "paper":
            q = xp.minimum(misses, (misses * costs.host_read + costs.load // 2) // max(costs.load, 1))
        elif costs.load_shared <= 2 * costs.host_expert_shared:
            q = misses
        else:
            link, host = costs.load_shared, costs.host_expert_shared
            floor = misses * host // (link + host)
            below, above = (xp.maximum(q * link, (misses - q) * host) for q in (floor, floor + 1))
            q = floor + (above < below)
        # One more, because who was never wanted counts from -1 and scores must not be negative.
        fetched = best(missing, demand.last + 1, q, xp)
        rank = ranks((demand.last,), xp)
        return Dispatch(fetched, missing & ~fetched, rank)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HybriMoE(DispatchRule):
    """Two-ended greedy (5.4; arXiv 2504.05897): hits, then misses, each by tokens; the device takes from the front and
    the host from the back, whichever would be done first (the device, if equal).

    With ``host_hits`` the host may go on to the hits, as released. The greedy is a merge of two rising sequences, the
    finish times of the device from the front and of the host from the back: who is at place p goes to the device just
    if the device would be done with p no later than the host.
    """

    name: ClassVar[str] = "hybrimoe"

    host_hits: str = parameter("false", choices=YES_NO)

    def _split(self, demand: LayerDemand, costs: LayerCosts, xp: Any) -> Dispatch:
        counts, hits, missing = demand.counts, demand.hits, demand.missing
        rank = ranks((hits, counts), xp)
        order, place = by_rank(rank, hits | missing, xp)
        n, hit, miss = (xp.take_along_axis(x, order, axis=-1) for x in (counts, hits, missing))
        device = xp.where(miss, costs.device_time(n), xp.where(hit, costs.hit + costs.hit_token * n, 0))
        resident, _ = hits_and_time(costs, counts, hits, xp)
        done = device_finishes(Line(device, miss, resident), costs.hits_start, costs, costs.load_shared, xp)
        movable = hit | miss if self.host_hits == "true" else miss
        to_host = movable & (done > _host_from_here(costs, n, movable, xp))
        to_host = xp.take_along_axis(to_host, place, axis=-1)
        return Dispatch(missing & ~to_host, to_host, rank)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dali(DispatchRule):
    """Greedy 0-1 assignment (4.16; arXiv 2602.03495, details ours): misses by tokens, each to the side that would be
    done with it first (the device, if equal)."""

    name: ClassVar[str] = "dali"

    def _split(self, demand: LayerDemand, costs: LayerCosts, xp: Any) -> Dispatch:
        missing = demand.missing
        rank = ranks((demand.counts,), xp)
        order, place = by_rank(rank, missing, xp)
        n, miss = (xp.take_along_axis(x, order, axis=-1) for x in (demand.counts, missing))
        device, host = costs.device_time(n), costs.host_time(n)
        turn = xp.arange(missing.shape[-1], dtype=xp.int32)
        hits, start = (x[..., 0] for x in hits_and_time(costs, demand.counts, demand.hits, xp))
        zero = xp.zeros_like(start)

        def assign(i: Any, state: tuple[Array, ...]) -> tuple[Array, ...]:
            device_done, landed, sent, host_done, to_host = state
            next_landed = (landed if costs.overlaps else device_done) + costs.load_shared
            on_device = xp.maximum(device_done, next_landed) + device[..., i] + costs.round_time(sent + 1, hits)
            on_host = host_done + host[..., i] + xp.where(host_done == 0, costs.host_start, 0)
            hosted = miss[..., i] & (on_host < on_device)
            fetched = miss[..., i] & ~hosted
            return (
                xp.where(fetched, on_device, device_done),
                xp.where(fetched, next_landed, landed),
                sent + fetched,
                xp.where(hosted, on_host, host_done),
                to_host | (hosted[..., None] & (turn == i)),
            )

        turns = xp.max(miss.sum(-1, dtype=xp.int32), initial=0)
        *_, to_host = _loop(turns, assign, (start, zero, zero, zero, xp.zeros_like(miss)), xp)
        to_host = xp.take_along_axis(to_host, place, axis=-1)
        return Dispatch(missing & ~to_host, to_host, rank)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Oled(DispatchRule):
    """Reuse-first with bounded swaps (5.5; our reconstruction).

    Misses by predicted reuse are moved from host to device while the device would be done with one no later than the
    host with all that it still has, this one included. Then at most ``swaps`` times the least reusable of the fetched
    is exchanged for the one of the host's that most tokens want, where that brings the layer's end forward by more than
    the share ``epsilon``; the number of transfers stays. ``fill`` goes on moving while the layer's end rises by at most
    ``epsilon`` in all: a transfer behind the hits is free and feeds retention. ``margin``: most that a swap may give up
    of the highest predicted reuse. ``order=load`` sends what was chosen by tokens and not by reuse, which is never done
    later; finish times are reckoned in reuse order all the same.
    """

    name: ClassVar[str] = "oled"

    swaps: int = parameter(4, high=64)
    epsilon: float = parameter(0.01, high=1)
    fill: str = parameter("false", choices=YES_NO)
    margin: float = parameter(1.0, high=1)
    order: str = parameter(REUSE_ORDER, choices=(REUSE_ORDER, LOAD_ORDER))

    @property
    def link_order(self) -> str:
        """As chosen."""
        return self.order

    def _split(self, demand: LayerDemand, costs: LayerCosts, xp: Any) -> Dispatch:
        missing = demand.missing
        order, place = by_rank(ranks((demand.reuse, demand.counts), xp), missing, xp)
        n, reuse, miss = (xp.take_along_axis(x, order, axis=-1) for x in (demand.counts, demand.reuse, missing))
        layer = _Sorted(n, reuse, miss, *hits_and_time(costs, demand.counts, demand.hits, xp))
        fetched = self._swapped(layer, self._reuse_first(layer, costs, xp), costs, xp)
        return _fetching(xp.take_along_axis(fetched, place, axis=-1), demand, self.order, xp)

    def _reuse_first(self, layer: "_Sorted", costs: LayerCosts, xp: Any) -> Array:
        """Whom to fetch. Both conditions below hold up to some place and not beyond."""
        miss = layer.miss
        line = Line(xp.where(miss, costs.device_time(layer.n), 0), miss, layer.hits)
        device = device_finishes(line, layer.start, costs, costs.load_shared, xp)
        fetched = miss & (device <= _host_from_here(costs, layer.n, miss, xp))
        if self.fill == "false":
            return fetched
        end = _end(layer, fetched, costs, xp)
        return miss & (fetched | (device <= end + scaled(end, factor(self.epsilon))))

    def _swapped(self, layer: "_Sorted", fetched: Array, costs: LayerCosts, xp: Any) -> Array:
        n, reuse, miss = layer.n, layer.reuse, layer.miss
        place = xp.arange(n.shape[-1], dtype=xp.int32)
        most = scaled(xp.max(xp.where(miss, reuse, 0), axis=-1, keepdims=True), factor(self.margin))
        end = _end(layer, fetched, costs, xp)
        going = xp.any(fetched, axis=-1, keepdims=True) & xp.any(miss & ~fetched, axis=-1, keepdims=True)
        for _ in range(self.swaps):
            if xp is np and not going.any():
                break
            leaving = xp.max(xp.where(fetched, place, 0), axis=-1, keepdims=True)
            entering = xp.argmax(xp.where(miss & ~fetched, n, -1), axis=-1, keepdims=True)
            swapped = (fetched & (place != leaving)) | (place == entering)
            n_out, n_in = (xp.take_along_axis(n, who, axis=-1) for who in (leaving, entering))
            given_up = xp.take_along_axis(reuse, leaving, axis=-1) - xp.take_along_axis(reuse, entering, axis=-1)
            new_end = _end(layer, swapped, costs, xp)
            better = end - new_end > scaled(end, factor(self.epsilon))
            going = going & (n_in > n_out) & better & (given_up <= most)
            fetched, end = xp.where(going, swapped, fetched), xp.where(going, new_end, end)
        return fetched


@dataclasses.dataclass(frozen=True, kw_only=True)
class Auto(DispatchRule):
    """``oled`` where the costs say that a layer is done earlier by more than the share ``gain``, else all-device."""

    name: ClassVar[str] = "auto"

    gain: float = parameter(0.02, high=1)

    def _split(self, demand: LayerDemand, costs: LayerCosts, xp: Any) -> Dispatch:
        alone, divided = ALL_DEVICE.split(demand, costs, xp), _OLED.split(demand, costs, xp)
        now, then = (xp.maximum(*finish_times(costs, demand, d, xp)) for d in (alone, divided))
        pays = (now - then > scaled(now, factor(self.gain)))[..., None]
        return Dispatch(*(xp.where(pays, theirs, ours) for ours, theirs in zip(alone, divided, strict=True)))


_OLED = Oled()


def _fetching(fetched: Array, demand: LayerDemand, order: str, xp: Any) -> Dispatch:
    """The fetched in an order by tokens or by reuse, equals by the other; the rest of the misses to the host."""
    keys = (demand.counts, demand.reuse)
    rank = ranks(keys if order == LOAD_ORDER else keys[::-1], xp)
    return Dispatch(fetched, demand.missing & ~fetched, rank)


def _host_from_here(costs: LayerCosts, n: Array, members: Array, xp: Any) -> Array:
    """When the host is done if it runs each member and all behind it, int32 ``[..., Q]``."""
    times = xp.where(members, costs.host_time(n), 0)
    before = sums_up_to(times, xp) - times
    return costs.host_start + times.sum(-1, keepdims=True, dtype=xp.int32) - before


class _Sorted(NamedTuple):
    """A layer's experts in order of reuse, misses first: ``n``, ``reuse``, ``miss`` ``[..., E]``; ``hits``, ``start``
    as of ``hits_and_time``."""

    n: Array
    reuse: Array
    miss: Array
    hits: Array
    start: Array


def _end(layer: _Sorted, fetched: Array, costs: LayerCosts, xp: Any) -> Array:
    """When both sides are done, int32 ``[..., 1]``."""
    line = Line(xp.where(fetched, costs.device_time(layer.n), 0), fetched, layer.hits)
    hosted = layer.miss & ~fetched
    host = xp.where(hosted, costs.host_time(layer.n), 0).sum(-1, keepdims=True, dtype=xp.int32)
    host = xp.where(xp.any(hosted, axis=-1, keepdims=True), costs.host_start + host, 0)
    return xp.maximum(device_finish(line, layer.start, costs, costs.load_shared, xp), host)


def _loop(turns: Any, body: Callable[[Any, tuple], tuple], state: tuple, xp: Any) -> tuple:
    """``body(i, state)`` for i below ``turns``."""
    if xp is not np:
        from jax import lax  # only for who computes with jax anyway

        return lax.fori_loop(0, turns, body, state)
    for i in range(int(turns)):
        state = body(i, state)
    return state
