"""Simulated time: when the layers of a forward are done on a machine, given what was dispatched where.

Source: specification, section 5, "Timing model", with the costs and the recursion that the dispatch rules decide by
(``oled_jax.dispatch``), so that the two cannot disagree. Demand goes before speculation on the link, and a transfer
that is running is not aborted: what such a one takes of a layer's time is its ``backlog``. Times are a model and no
measurement; misses are exact.

Deliberately not here: what is transferred on speculation and when (whoever steps through time says what is still on the
link when a layer begins), and where the costs come from (``oled_jax.lab.machine``).
"""

from typing import NamedTuple

import numpy as np

from oled_jax.dispatch import TICK, Dispatch, LayerCosts, LayerDemand
from oled_jax.dispatch.costs import Line, device_finish


class LayerTimes(NamedTuple):
    """Seconds, float64 ``[...]`` each.

    ``layer``: attention, experts and what joins them; ``device``, ``host``: when either side is done with its experts;
    ``exposed_transfer``: how much longer the layer takes than if transfers took no time; ``exposed_host``: how much
    longer the host takes than the device; ``link``: time that the layer's own transfers take on the link.
    """

    layer: np.ndarray
    device: np.ndarray
    host: np.ndarray
    exposed_transfer: np.ndarray
    exposed_host: np.ndarray
    link: np.ndarray


def layer_times(
    costs: LayerCosts,
    demand: LayerDemand,
    dispatch: Dispatch,
    *,
    backlog: np.ndarray | float = 0.0,
    late: np.ndarray | None = None,
    serial: bool = False,
) -> LayerTimes:
    """Times of layers ``[...]``, one for each leading index of ``demand`` and ``dispatch`` (``[..., E]``).

    ``backlog``: seconds ``[...]`` from a layer's beginning until its first transfer can start. ``late`` bool
    ``[..., E]``: wanted, neither hit nor missing, and landing when the backlog ends; at most one in a layer, and the
    device takes it first. ``serial``: device and host work one after the other.
    """
    hits, hosted = demand.hits & ~dispatch.to_host, dispatch.to_host
    return packed_layer_times(
        costs,
        hits=np.count_nonzero(hits, axis=-1),
        hit_tokens=_tokens(demand.counts, hits),
        fetched=_packed(demand.counts, dispatch),
        hosted=np.count_nonzero(hosted, axis=-1),
        hosted_tokens=_tokens(demand.counts, hosted),
        backlog=backlog,
        late_tokens=0 if late is None else _tokens(demand.counts, late),
        serial=serial,
    )


def packed_layer_times(
    costs: LayerCosts,
    *,
    hits: np.ndarray,
    hit_tokens: np.ndarray,
    fetched: np.ndarray,
    hosted: np.ndarray | int = 0,
    hosted_tokens: np.ndarray | int = 0,
    backlog: np.ndarray | float = 0.0,
    late_tokens: np.ndarray | int = 0,
    serial: bool = False,
) -> LayerTimes:
    """``layer_times`` of what has been counted already; integers ``[...]``, but ``fetched`` ``[..., Q]``.

    ``fetched``: tokens of each fetched expert in link order, 0 behind the last. ``hosted``: experts that run on the
    host. ``late_tokens``: tokens of the late expert, 0 if there is none.
    """
    hits, hit_tokens, hosted, hosted_tokens, late_tokens = (
        np.asarray(x, np.int64)[..., None] for x in (hits, hit_tokens, hosted, hosted_tokens, late_tokens)
    )
    tokens = np.empty((*fetched.shape[:-1], 1 + fetched.shape[-1]), np.int64)
    tokens[..., :1], tokens[..., 1:] = late_tokens, fetched
    first = np.arange(tokens.shape[-1]) == 0
    late, loads = (tokens > 0) & first, (tokens > 0) & ~first
    experts = np.count_nonzero(loads, axis=-1)[..., None]
    on_link, on_host = experts > 0, hosted > 0

    load = np.where(on_host, costs.load_shared, costs.load)
    waiting = np.rint(np.maximum(backlog, 0) / TICK).astype(np.int64)[..., None]
    device = np.where(tokens > 0, costs.device_time(tokens), 0)
    start = costs.hits_time(hits, hit_tokens)
    done = device_finish(Line(device, loads, hits, late, waiting), start, costs, load, np)
    without_transfers = device_finish(Line(device, loads, hits), start, costs, 0, np)
    reading = np.where(on_link, costs.host_expert_shared, costs.host_expert) * hosted
    host = np.where(on_host, costs.host_start + reading + costs.host_token * hosted_tokens, 0)

    def together(device: np.ndarray) -> np.ndarray:
        return device + host if serial else np.maximum(device, host)

    both = together(done)
    ticks = (
        costs.attention + both + costs.join,
        done,
        host,
        both - together(without_transfers),
        np.maximum(0, host - done),
        experts * load,
    )
    whole = np.zeros(fetched.shape[:-1])  # what is the same for all layers takes their shape
    return LayerTimes(*((whole + amount[..., 0]) * TICK for amount in ticks))


def _tokens(counts: np.ndarray, mask: np.ndarray) -> np.ndarray:
    return np.where(mask, counts, 0).sum(-1, dtype=np.int64)


def _packed(counts: np.ndarray, dispatch: Dispatch) -> np.ndarray:
    """Tokens of the fetched experts in link order, int64 ``[..., Q]``, zeros behind the last; Q at least 1."""
    experts = counts.shape[-1]
    sent = dispatch.to_device.reshape(-1, experts)
    row, expert = np.nonzero(sent)
    rank = dispatch.link_rank.reshape(-1, experts)[row, expert]
    order = np.argsort(row.astype(np.int64) * experts - rank)  # by row, then from the highest rank down
    amounts = np.count_nonzero(sent, axis=-1)
    place = np.arange(len(row)) - np.repeat(np.cumsum(amounts) - amounts, amounts)
    packed = np.zeros((len(sent), max(1, int(amounts.max(initial=0)))), np.int64)
    packed[row, place] = counts.reshape(-1, experts)[row, expert][order]
    return packed.reshape(*counts.shape[:-1], -1)
