"""What a layer's parts cost, and when its two sides are done: the model that dispatch decides by and replays count by.

Source: specification, section 5, "Timing model". One serial link brings the fetched experts in their order; the device
runs the hits at once, and each fetched expert when it has landed and the one before it is done. The host runs its
experts one after another. The layer is done when both sides are. Where one product over all slots computes hits and
fetched experts together, those that find no slot take rounds of their own, as many at a time as there is staging for.

All costs are integers, in ticks of 10 ns, and all sums int32: numpy and XLA then decide alike, and no float decides a
tie. ``LayerCosts`` bounds each cost, so that the sums of 256 experts and of 8,192 choices of an expert by a token fit.

Deliberately not here: where the costs come from (``oled_jax.lab.machine``).
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from oled_jax.errors import OledError, problem_list
from oled_jax.retention.arrays import Array, ranks

TICK = 1e-8  # seconds

_MOST = 1 << 21  # 21 ms
_MOST_OF_A_TOKEN = 1 << 15  # 0.33 ms


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerCosts:
    """Costs of one MoE layer on one machine, in ticks of 10 ns. Plain integers: static under jit.

    ``hits_start``, ``hit``, ``hit_token``: the device's time for all hits is g0 + g1 * experts + g2 * tokens.
    ``device_expert``, ``device_token``: for a fetched expert with n tokens, t_dev(n). ``load``: one expert over the
    link; ``load_shared``: the same while the host computes. ``host_start``: h0, once per layer; ``host_expert``,
    ``host_token``: a + b * n; ``host_expert_shared``: a while the link is busy; ``host_read``: reading an expert's
    weights at the host memory's whole bandwidth. ``attention``: everything of the layer before its experts; ``join``:
    bringing both sides together. ``round``: a product over all slots for fetched experts that found none of the
    ``slots``, ``staging`` at a time (the first of these are computed with the hits); 0 where there are no rounds.
    ``overlaps``: whether transfers proceed while the device computes. ``has_host``: whether experts can run on the host
    at all.

    OledError for what is no integer from 0 to 21 ms (0.33 ms for the costs of a token).
    """

    hits_start: int = 0
    hit: int = 0
    hit_token: int = 0
    device_expert: int = 0
    device_token: int = 0
    load: int
    load_shared: int
    host_start: int = 0
    host_expert: int = 0
    host_expert_shared: int = 0
    host_token: int = 0
    host_read: int = 0
    attention: int = 0
    join: int = 0
    round: int = 0
    slots: int = 0
    staging: int = 1
    overlaps: bool = True
    has_host: bool = True

    def __post_init__(self):
        problems = []
        for field in dataclasses.fields(self):
            value, most = getattr(self, field.name), _MOST_OF_A_TOKEN if field.name.endswith("_token") else _MOST
            if field.type is int and not (type(value) is int and 0 <= value <= most):
                unit = "" if field.name in ("slots", "staging") else " ticks of 10 ns"
                problems.append(f"{field.name} is {value!r}{unit}; it must be an integer from 0 to {most}")
        if self.staging == 0:
            problems.append("staging is 0; it must be at least 1")
        if problems:
            raise OledError(problem_list("costs of a layer", problems))

    def hits_time(self, experts: Array, tokens: Array) -> Array:
        """``T_hit`` for so many hits with so many tokens; 0 only where the costs are."""
        return self.hits_start + self.hit * experts + self.hit_token * tokens

    def device_time(self, tokens: Array) -> Array:
        """``t_dev(n)``."""
        return self.device_expert + self.device_token * tokens

    def round_time(self, fetched: Array, hits: Array) -> Array:
        """What the last of so many fetched experts adds in rounds, beside so many hits."""
        beyond = fetched + hits - self.slots - 1  # of those without a slot, whom staging has room for
        return self.round * ((beyond > 0) & (beyond % self.staging == 0))

    def host_time(self, tokens: Array, *, shared: bool = True) -> Array:
        """``t_host(n)``, while the link is busy or not."""
        return (self.host_expert_shared if shared else self.host_expert) + self.host_token * tokens


class LayerDemand(NamedTuple):
    """What a layer wants, ``[..., E]`` each. ``counts`` int32: tokens per expert; ``hits`` bool: wanted and on the
    device; ``missing`` bool: wanted and not there; ``reuse`` int32, not negative: predicted reuse P~, or any other
    order of preference, such as ``Plan.admit_rank``; ``last`` int32: the forward of the last use, -1 if never."""

    counts: Array
    hits: Array
    missing: Array
    reuse: Array
    last: Array

    def whole(self, xp: Any) -> "LayerDemand":
        """With numbers as int32, whatever integers they are: traces hold small unsigned ones, in which sums wrap."""
        counts, reuse, last = (xp.asarray(x, xp.int32) for x in (self.counts, self.reuse, self.last))
        return LayerDemand(counts, self.hits, self.missing, reuse, last)


class Dispatch(NamedTuple):
    """What runs where, ``[..., E]`` each. ``to_device`` bool: misses that are fetched (F); ``to_host`` bool: misses
    that run on the host (X), and hits that do; ``link_rank`` int32: who has more is fetched first, unique in a layer.
    """

    to_device: Array
    to_host: Array
    link_rank: Array


class Line(NamedTuple):
    """Experts in the order in which the device takes them, ``[..., Q]`` each, Q at least 1; who is in none of the masks
    and has no ``device`` time is not there.

    ``device`` int32: time of each; ``loads`` bool: has to be transferred; ``late`` bool: is being transferred since
    before the layer began, and lands when the link is free for the layer: ``backlog``, int32 ``[..., 1]``. ``hits``
    int32 ``[..., 1]``: how many experts hold slots that they do not yield.
    """

    device: Array
    loads: Array
    hits: Array
    late: Array | bool = False
    backlog: Array | int = 0


def sums_up_to(values: Array, xp: Any) -> Array:
    """Sums along the last axis up to and including each place; int32."""
    return xp.cumsum(values, axis=-1, dtype=xp.int32)


def highest_up_to(values: Array, xp: Any) -> Array:
    """Maxima along the last axis up to and including each place."""
    if xp is np:
        return np.maximum.accumulate(values, axis=-1)
    from jax import lax  # only for who computes with jax anyway; jax.numpy's own accumulate is a loop

    return lax.cummax(values, axis=values.ndim - 1)


def device_finishes(line: Line, start: Array | int, costs: LayerCosts, load: Array | int, xp: Any) -> Array:
    """When the device is done with each expert of ``line`` and with all before it, int32 ``[..., Q]``.

    ``start``: when it may begin (``T_hit``), ``load``: a transfer; integers or int32 ``[..., 1]``. The recursion
    ``f_j = max(f_{j-1}, j * load) + device_j`` as a sum and a maximum; without overlap
    ``f_j = f_{j-1} + load + device_j``.
    """
    worked, idle = _worked_and_idle(line, costs, load, xp)
    return worked + xp.maximum(start, highest_up_to(idle, xp))


def device_finish(line: Line, start: Array | int, costs: LayerCosts, load: Array | int, xp: Any) -> Array:
    """When the device is done with all of ``line``, int32 ``[..., 1]``; arguments as in ``device_finishes``."""
    worked, idle = _worked_and_idle(line, costs, load, xp)
    return worked[..., -1:] + xp.maximum(start, xp.max(idle, axis=-1, keepdims=True))


def _worked_and_idle(line: Line, costs: LayerCosts, load: Array | int, xp: Any) -> tuple[Array, Array]:
    """The device's own time up to each place, and how long it must at least have idled before each."""
    waits, backlog = line.loads | line.late, xp.asarray(line.backlog, xp.int32)
    fetched = sums_up_to(line.loads, xp)
    device = line.device + line.loads * costs.round_time(fetched, line.hits) if costs.round else line.device
    if not costs.overlaps:
        return sums_up_to(device + line.loads * load, xp), xp.where(waits, backlog, 0)
    worked = sums_up_to(device, xp)
    return worked, xp.where(waits, backlog + fetched * load - (worked - device), 0)


def finish_times(costs: LayerCosts, demand: LayerDemand, dispatch: Dispatch, xp: Any) -> tuple[Array, Array]:
    """``T_dev`` and ``T_host`` of a layer without backlog, int32 ``[...]`` each. Shared costs count where both the link
    and the host have work. The larger of the two is what a dispatch rule minimises."""
    demand = demand.whole(xp)
    linked, hosted = (xp.any(mask, axis=-1, keepdims=True) for mask in (dispatch.to_device, dispatch.to_host))
    load = xp.where(hosted, xp.int32(costs.load_shared), xp.int32(costs.load))
    hits, start = hits_and_time(costs, demand.counts, demand.hits & ~dispatch.to_host, xp)
    order, _ = by_rank(dispatch.link_rank, dispatch.to_device, xp)
    sent = xp.take_along_axis(dispatch.to_device, order, axis=-1)
    device = xp.where(sent, costs.device_time(xp.take_along_axis(demand.counts, order, axis=-1)), 0)
    done = device_finish(Line(device, sent, hits), start, costs, load, xp)
    times = xp.where(linked, costs.host_time(demand.counts), costs.host_time(demand.counts, shared=False))
    host = xp.where(dispatch.to_host, times, 0).sum(-1, dtype=xp.int32)
    return done[..., 0], xp.where(hosted[..., 0], costs.host_start + host, 0)


def hits_and_time(costs: LayerCosts, counts: Array, hits: Array, xp: Any) -> tuple[Array, Array]:
    """How many ``hits`` (bool ``[..., E]``) there are, and ``T_hit``; int32 ``[..., 1]`` each."""
    experts = hits.sum(-1, keepdims=True, dtype=xp.int32)
    return experts, costs.hits_time(experts, xp.where(hits, counts, 0).sum(-1, keepdims=True, dtype=xp.int32))


def by_rank(rank: Array, members: Array, xp: Any) -> tuple[Array, Array]:
    """Ids in descending order of ``rank`` (int32, unique, not negative), members first, and each id's place in that
    order: int32 ``[..., E]``, inverse to one another."""
    experts = rank.shape[-1]
    place = experts - 1 - ranks((xp.where(members, rank, -1),), xp)
    ids = xp.arange(experts, dtype=xp.int32)
    if xp is np:
        order = np.empty(place.shape, np.int32)
        np.put_along_axis(order, place, np.broadcast_to(ids, place.shape), axis=-1)
        return order, place
    # E * E comparisons fuse into one kernel, where a sort or a scatter would stand alone.
    return xp.where(place[..., None, :] == ids[:, None], ids, 0).sum(-1, dtype=xp.int32), place
