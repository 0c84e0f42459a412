"""The dispatch rules as the specification words them: plain Python, one expert after another, on lists of misses.

A miss is ``(expert, n, reuse)``, hits are token counts; times are the costs' own integers. Nothing here is shared with
the package but the costs' names.
"""

import itertools
import math

import numpy as np
from hypothesis import strategies as st

from oled_jax.dispatch import LayerCosts, LayerDemand

EXPERTS = 14


def device_finish(costs, hits, fetched, load=None):
    """``fetched``: token counts in link order."""
    load = costs.load_shared if load is None else load
    f = costs.hits_start + sum(costs.hit + costs.hit_token * n for n in hits)
    for j, n in enumerate(fetched, 1):
        start = max(f, j * load) if costs.overlaps else f + load
        more = rounds(costs, len(hits), j) - rounds(costs, len(hits), j - 1)
        f = start + costs.device_expert + costs.device_token * n + more * costs.round
    return f


def rounds(costs, hits, fetched):
    """Extra products for those that find no slot: the last ``staging`` of them are computed with the hits."""
    without = max(0, hits + fetched - costs.slots)
    return math.ceil(max(0, without - costs.staging) / costs.staging)


def host_finish(costs, hosted, expert=None):
    """``hosted``: token counts."""
    expert = costs.host_expert_shared if expert is None else expert
    return costs.host_start + sum(expert + costs.host_token * n for n in hosted) if hosted else 0


def makespan(costs, hits, fetched, hosted):
    """When both sides are done; shared costs only where both have work."""
    load = costs.load_shared if hosted else costs.load
    expert = costs.host_expert_shared if fetched else costs.host_expert
    return max(device_finish(costs, hits, fetched, load), host_finish(costs, hosted, expert))


def brute(costs, hits, misses):
    """The best makespan of all splits, each sent in the best order, which is by tokens."""
    amounts = sorted((n for _, n, _ in misses), reverse=True)
    best = None
    for chosen in itertools.product((False, True), repeat=len(amounts)):
        fetched = [n for n, goes in zip(amounts, chosen, strict=True) if goes]
        hosted = [n for n, goes in zip(amounts, chosen, strict=True) if not goes]
        end = makespan(costs, hits, fetched, hosted)
        best = end if best is None else min(best, end)
    return best


def oled(costs, hits, misses, swaps=4, epsilon=0.01, fill=False, margin=1.0):
    """Spec 5.5; returns the experts fetched."""

    def tokens(members):
        return [n for _, n, _ in members]

    def end(fetched, hosted):
        return max(device_finish(costs, hits, tokens(fetched)), host_finish(costs, tokens(hosted)))

    order = sorted(misses, key=lambda miss: (-miss[2], -miss[1], miss[0]))
    fetched, hosted = [], list(order)
    for miss in order:
        if device_finish(costs, hits, [*tokens(fetched), miss[1]]) > host_finish(costs, tokens(hosted)):
            break
        fetched, hosted = [*fetched, miss], hosted[1:]
    if fill:
        allowed = end(fetched, hosted)
        while hosted and end([*fetched, hosted[0]], hosted[1:]) <= allowed + _share(allowed, epsilon):
            fetched, hosted = [*fetched, hosted[0]], hosted[1:]
    for _ in range(swaps):
        if not fetched or not hosted:
            break
        out, into = fetched[-1], max(hosted, key=lambda miss: miss[1])  # the first of equals
        new_fetched = sorted({*fetched, into} - {out}, key=order.index)
        new_hosted = sorted({*hosted, out} - {into}, key=order.index)
        gain = end(fetched, hosted) - end(new_fetched, new_hosted)
        dear = out[2] - into[2] > _share(max(miss[2] for miss in misses), margin)
        if into[1] <= out[1] or gain <= _share(end(fetched, hosted), epsilon) or dear:
            break
        fetched, hosted = new_fetched, new_hosted
    return {expert for expert, _, _ in fetched}


def _share(x, part):
    """``part`` of x in units of 2^-14, rounded half up: what both sides agree to call a percentage."""
    return (x * round(part * 2**14) + 2**13) // 2**14


def hybrimoe(costs, hits, misses, host_hits=False):
    """Spec 5.4; ``hits`` is a list of ``(expert, n)``; returns the experts that run on the host."""
    queue = [(expert, n, True) for expert, n in sorted(hits, key=lambda hit: (-hit[1], hit[0]))]
    queue += [(expert, n, False) for expert, n, _ in sorted(misses, key=lambda miss: (-miss[1], miss[0]))]
    device, host, link, sent = costs.hits_start, 0, 0, 0
    on_host = set()
    while queue:
        _, n, is_hit = queue[0]
        if is_hit:
            finish = device + costs.hit + costs.hit_token * n
        else:
            landed = max(device, link + costs.load_shared) if costs.overlaps else device + costs.load_shared
            more = rounds(costs, len(hits), sent + 1) - rounds(costs, len(hits), sent)
            finish = landed + costs.device_expert + costs.device_token * n + more * costs.round
        last, n_last, last_is_hit = queue[-1]
        host_finish = (host or costs.host_start) + costs.host_expert_shared + costs.host_token * n_last
        if finish <= host_finish or (last_is_hit and not host_hits):
            device, link, sent = finish, link + (0 if is_hit else costs.load_shared), sent + (not is_hit)
            queue.pop(0)
        else:
            host = host_finish
            on_host.add(last)
            queue.pop()
    return on_host


def dali(costs, hits, misses):
    """Spec 4.16; returns the experts fetched."""
    fetched, hosted, experts = [], [], set()
    for expert, n, _ in sorted(misses, key=lambda miss: (-miss[1], miss[0])):
        if device_finish(costs, hits, [*fetched, n]) <= host_finish(costs, [*hosted, n]):
            fetched.append(n)
            experts.add(expert)
        else:
            hosted.append(n)
    return experts


@st.composite
def layer_costs(draw, *, shared=True):
    """Small costs, so that ties are common; ``shared`` False: working side by side slows neither side down."""
    small, more = st.integers(0, 30), st.integers(0, 20)
    load, host = draw(st.integers(0, 60)), draw(small)
    names = ("hits_start", "hit", "hit_token", "device_expert", "device_token", "host_token", "host_read")
    return LayerCosts(
        **{name: draw(st.integers(0, 12)) for name in names},
        load=load,
        load_shared=load + (draw(more) if shared else 0),
        host_start=draw(st.integers(1, 80)),
        host_expert=host,
        host_expert_shared=host + (draw(more) if shared else 0),
        round=draw(st.sampled_from((0, 0, 7, 40))),
        slots=draw(st.integers(0, 10)),
        staging=draw(st.integers(1, 3)),
        overlaps=draw(st.booleans()),
    )


@st.composite
def demands(draw, misses=9):
    """One layer: up to ``misses`` misses and some hits among ``EXPERTS``."""
    kinds = draw(st.lists(st.sampled_from("hm "), min_size=EXPERTS, max_size=EXPERTS))
    counts = np.asarray(draw(st.lists(st.integers(1, 6), min_size=EXPERTS, max_size=EXPERTS)), np.int32)
    reuse = np.asarray(draw(st.lists(st.integers(0, 5), min_size=EXPERTS, max_size=EXPERTS)), np.int32)
    last = np.asarray(draw(st.lists(st.integers(-1, 4), min_size=EXPERTS, max_size=EXPERTS)), np.int32)
    missing = np.asarray([kind == "m" for kind in kinds])
    missing &= np.cumsum(missing) <= misses
    hits = np.asarray([kind == "h" for kind in kinds])
    return LayerDemand(np.where(missing | hits, counts, 0), hits, missing, reuse, last)


def listed(demand):
    """The hits' ``(expert, n)`` and the misses."""
    counts, reuse = demand.counts.tolist(), demand.reuse.tolist()
    hits = [(expert, counts[expert]) for expert in np.flatnonzero(demand.hits).tolist()]
    return hits, [(expert, counts[expert], reuse[expert]) for expert in np.flatnonzero(demand.missing).tolist()]
