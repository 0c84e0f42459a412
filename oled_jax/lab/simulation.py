"""A replay in full: slots, staging, speculative transfers, and, on a machine, time and host execution.

Promises: a step's demand is judged against what is on the device when its layer begins; a transfer on its way is late,
not a hit; only experts that came to the device can stay there; every speculative transfer ends as used, late or wasted.
Without a machine transfers arrive at once. Without a prefetcher and a machine this counts as the short loop of
``replay`` does.

Prefill is served as the engine serves it, by ``after_prefill``; it takes no simulated time, and ends all speculation
that is under way.
"""

import numpy as np

from oled_jax.dispatch import LayerDemand
from oled_jax.lab.keeping import Keeper, Layers, after_prefill
from oled_jax.lab.link import Wish
from oled_jax.lab.prefetch import MOST_SCORE, Prefetcher, Speculation, exchange, seat
from oled_jax.lab.results import Times, Traffic
from oled_jax.lab.stream import Forward, Stream
from oled_jax.lab.timeline import Setup, Timeline

_SPECULATIVE, _BACKGROUND = 1, 2  # why something that nobody has used yet is on the device


class Simulation:
    """One policy at one capacity on one stream. Call ``serve`` for every forward in order, then ``finish``.

    ``traffic``, ``times`` (None without a machine) and ``resident`` as in ``Replay``.
    """

    def __init__(
        self,
        stream: Stream,
        keeper: Keeper,
        capacity: int,
        *,
        prefetch: Speculation | None = None,
        prefetcher: Prefetcher | None = None,
        setup: Setup | None = None,
    ):
        """``prefetcher``: what ``prefetch``, which says where transfers go, predicts with; both or neither."""
        shape = stream.num_layers, stream.num_experts
        self._stream, self._keeper = stream, keeper
        self._prefetch, self._prefetcher = prefetch, prefetcher
        self._limit = prefetch.limit(capacity) if prefetch else 0
        self._instant = prefetch is None or setup is None or not prefetch.takes_time
        layered = not self._instant or keeper.pooled or (prefetch is not None and prefetch.layer_by_layer)
        self._timeline = Timeline(setup, capacity, stepwise=layered) if setup else None
        self._scopes: list[Layers] = list(range(stream.num_layers)) if layered else [slice(None)]
        self.traffic = Traffic.zeros(stream)
        self.times = Times(*(np.zeros(len(stream)) for _ in Times._fields)) if setup else None
        self.resident = keeper.initial(stream).copy()
        self._staged = np.zeros(shape, bool)
        self._unused = np.zeros(shape, np.int8)
        self._hosted = np.zeros(shape, bool)  # ran on the host when it was last wanted
        self._last = np.full(shape, -1, np.int32)  # the forward in which it was last wanted, kept on a machine alone
        self._scores = np.zeros(shape, np.int64)  # what is predicted now
        self._worth = np.zeros(shape, np.int64)  # what residents are worth, as of their layer's last step
        self._forward: Forward | None = None

    def serve(self, forward: Forward) -> None:
        """One forward, and what is prefetched in it and after it."""
        self._forward = forward
        counts = self._stream.counts[forward.index]
        demand = counts > 0
        before = self.resident.copy()
        if forward.begins:
            self._keeper.begin(forward)
            if self._prefetcher:
                self._prefetcher.begin(forward)
        if forward.prefill:
            self._serve_prefill(counts, demand)
        else:
            for layers in self._scopes:
                self._serve_layers(layers, counts[layers], demand[layers], before)
            if self._timeline:
                times = self._timeline.end_forward(self._claim)
                for amounts, amount in zip(self.times, times, strict=True):
                    amounts[forward.index] = amount
        scores = self._prefetcher.after_forward(forward) if self._prefetcher else None
        if scores is not None and not forward.prefill:
            if self._timeline:
                self._timeline.link.replace([])  # predicted with less knowledge
            self._wish(slice(None), scores, demand, before)
        if self._timeline:
            for wish in self._timeline.link.dropped:
                self.traffic.cancelled[forward.index, wish.layer] += 1
            self._timeline.link.dropped.clear()
        self._keeper.observe(forward, demand, before, self.resident)

    def finish(self) -> None:
        """The end of the stream: what nobody has used was wasted."""
        self.traffic.wasted[-1] += np.count_nonzero(self._unused == _SPECULATIVE, axis=-1)
        self._unused[:] = 0

    def _serve_prefill(self, counts: np.ndarray, demand: np.ndarray) -> None:
        if self._timeline:
            self._timeline.link.halt()
        present = self.resident | self._staged
        self._count(slice(None), counts, demand & present)
        self.traffic.loads[self._forward.index] = np.count_nonzero(demand & ~present, axis=-1)
        if self._keeper.admits and (demand & ~self.resident).any():
            self.resident = after_prefill(counts, self.resident, self._keeper.slots)
        self._staged[:] = False
        self._drop_lost()

    def _serve_layers(self, layers: Layers, counts: np.ndarray, demand: np.ndarray, before: np.ndarray) -> None:
        forward, timeline, traffic = self._forward, self._timeline, self.traffic
        at = forward.index, layers
        if timeline:
            timeline.reach(forward.index, layers, self._claim)
        before[layers] = self.resident[layers]
        resident = before[layers]
        present = resident | self._staged[layers]
        late = self._late(layers, demand & present)
        hits = demand & present & ~late
        self._count(layers, counts, hits)
        missing = demand & ~hits & ~late
        fetched = missing
        if timeline:
            preference = self._keeper.preference(forward, layers, demand, resident)
            asked = LayerDemand(counts, hits, missing, preference, self._last[layers])
            fetched, on_host = timeline.run(asked, late, self._claim)
            self._last[layers][demand] = forward.index
            self._hosted[layers] = np.where(demand, missing & ~fetched, self._hosted[layers])
            traffic.handed[at] = on_host.any(-1)
            traffic.hosted[at] = np.count_nonzero(missing & ~fetched, axis=-1)
        traffic.loads[at] = np.count_nonzero(fetched, axis=-1)
        entering = (fetched | late | (hits & self._staged[layers])) & ~resident
        if entering.any() or self._keeper.pooled:
            self._keeper.settle(self.resident, forward, layers, demand, entering)
        if self._prefetch:
            self._predict(layers, demand, before)

    def _late(self, layers: Layers, wanted: np.ndarray) -> np.ndarray:
        """Which of the ``wanted``, who have a place, is on its way yet; counts it. Bool, in the shape of ``wanted``."""
        late = np.zeros(wanted.shape, bool)
        arriving = self._timeline.link.arriving if self._timeline else None
        if arriving and arriving.layer == layers and wanted[arriving.expert]:
            at = layers, arriving.expert
            late[arriving.expert] = True
            field = self.traffic.late_fills if self._unused[at] == _BACKGROUND else self.traffic.late
            field[self._forward.index, layers] = 1
            self._unused[at] = 0
        return late

    def _predict(self, layers: Layers, demand: np.ndarray, before: np.ndarray) -> None:
        """After a layer's step: empties its staging, and takes new predictions."""
        scores = self._prefetcher.after_layer(self._forward, layers)
        again = np.False_ if scores is None else (scores > 0) & ~self.resident[layers]
        self._staged[layers] &= again
        self._drop_lost()
        if scores is not None:
            self._wish(layers, scores, demand, before[layers])
        if self._prefetch.layer_by_layer:
            ahead = self._prefetcher.ahead(self._forward, layers)
            if ahead is not None:
                self._wish_ahead(layers, *ahead)

    def _wish(self, layers: Layers, scores: np.ndarray, demand: np.ndarray, resident: np.ndarray) -> None:
        """Predictions for the same layers in the next forward. ``demand``, ``resident``: of their step just served."""
        self._scores[layers] = scores
        candidates = self._candidates(layers)
        if not candidates.any():
            return
        self._worth[layers] = self._keeper.worth(self._forward, layers, demand, resident)
        if self._instant:
            self._place(layers, candidates)
        else:
            found = np.argwhere(candidates.reshape(-1, candidates.shape[-1]))
            number = np.arange(self._stream.num_layers)[layers].reshape(-1)[found[:, 0]].tolist()
            experts = found[:, 1].tolist()
            wishes = (
                Wish(self._forward.index + 1, (layer, -int(self._scores[layer, expert])), layer, expert)
                for layer, expert in zip(number, experts, strict=True)
            )
            self._timeline.link.wish(wishes)

    def _wish_ahead(self, layer: int, scores: np.ndarray, worth: np.ndarray) -> None:
        """Predictions for the layers after ``layer`` in this forward; ``worth`` of all residents, ``[L, E]``."""
        coming = slice(layer + 1, None)
        self._scores[coming] = scores[coming]
        candidates = np.zeros(scores.shape, bool)
        candidates[coming] = self._candidates(coming)
        self._worth = worth
        if self._instant:
            self._place(slice(None), candidates)
        else:
            found = np.argwhere(candidates).tolist()
            self._timeline.link.replace(
                Wish(self._forward.index, (-int(scores[where, expert]),), where, expert) for where, expert in found
            )

    def _candidates(self, layers: Layers) -> np.ndarray:
        """The predicted that have no place on the device, the first ones of each layer if there are too many."""
        scores, staged = self._scores[layers], self._staged[layers]
        candidates = (scores > 0) & ~self.resident[layers] & ~staged
        limit = self._limit - np.count_nonzero(staged, axis=-1)
        if (np.count_nonzero(candidates, axis=-1) > limit).any():
            order = np.argsort(np.where(candidates, -scores, MOST_SCORE), axis=-1, kind="stable")
            first = np.zeros(candidates.shape, bool)
            np.put_along_axis(first, order, np.arange(candidates.shape[-1]) < limit[..., None], axis=-1)
            candidates &= first
        return candidates

    def _claim(self, wish: Wish) -> bool:
        """Finds a place for one transfer; False if there is none or none is needed any more."""
        layer, expert = wish.layer, wish.expert
        if self.resident[layer, expert] or self._staged[layer, expert]:
            return False
        if self._prefetch.target == "extra":
            if np.count_nonzero(self._staged[layer]) >= self._limit:
                return False
            self._staged[layer, expert] = True
        elif not self._take_slot(layer, expert):
            return False
        filling = bool(self._hosted[layer, expert])
        self._unused[layer, expert] = _BACKGROUND if filling else _SPECULATIVE
        begun = self.traffic.background if filling else self.traffic.speculative
        begun[self._forward.index, layer] += 1
        return True

    def _take_slot(self, layer: int, expert: int) -> bool:
        pooled, experts = self._keeper.pooled, self._stream.num_experts
        scope: Layers = slice(None) if pooled else layer
        flat = [array[scope].reshape(-1) for array in (self.resident, self._scores, self._worth, self._unused)]
        pinned, slots = (flat[3] > 0) & (flat[1] > 0), int(self._keeper.slots[scope].sum())
        place = layer * experts + expert if pooled else expert
        gone = seat(flat[0], place, flat[1], flat[2], pinned, slots, self._prefetch.evict_predicted)
        if gone is None:
            return False
        if gone != place:
            leaving = divmod(gone, experts) if pooled else (layer, gone)
            self.resident[leaving] = False
            self.traffic.wasted[self._forward.index, leaving[0]] += self._unused[leaving] == _SPECULATIVE
            self._unused[leaving] = 0
        self.resident[layer, expert] = True
        return True

    def _place(self, layers: Layers, candidates: np.ndarray) -> None:
        """Transfers to ``candidates`` are made at once, in order of score, as far as there is room."""
        if self._prefetch.target == "extra":
            brought = candidates
            self._staged[layers] |= candidates
        else:
            old, slots, flat = self.resident[layers], self._keeper.slots[layers], candidates.shape
            if self._keeper.pooled:
                slots, flat = slots.sum(keepdims=True)[0], (-1,)
            scores, unused = self._scores[layers], self._unused[layers] > 0
            given = (old, candidates, scores, self._worth[layers], unused & (scores > 0))
            given = (array.reshape(flat) for array in given)
            new = exchange(*given, slots, self._prefetch.evict_predicted).reshape(candidates.shape)
            brought = new & ~old
            self.resident[layers] = new
            self._drop_lost()
        filling = brought & self._hosted[layers]
        kinds = np.where(filling, np.int8(_BACKGROUND), np.int8(_SPECULATIVE))
        self._unused[layers] = np.where(brought, kinds, self._unused[layers])
        self.traffic.background[self._forward.index, layers] += np.count_nonzero(filling, axis=-1)
        self.traffic.speculative[self._forward.index, layers] += np.count_nonzero(brought & ~filling, axis=-1)

    def _count(self, layers: Layers, counts: np.ndarray, hits: np.ndarray) -> None:
        at = self._forward.index, layers
        unused = self._unused[layers]
        self.traffic.hits[at] = np.count_nonzero(hits, axis=-1)
        self.traffic.token_hits[at] = (counts * hits).sum(-1, dtype=np.int64)
        self.traffic.occupied[at] = np.count_nonzero(self.resident[layers], axis=-1)
        self.traffic.used[at] = np.count_nonzero(hits & (unused == _SPECULATIVE), axis=-1)
        unused[hits] = 0

    def _drop_lost(self) -> None:
        """What has gone without having been used was wasted."""
        lost = (self._unused > 0) & ~self.resident & ~self._staged
        if lost.any():
            wasted = np.count_nonzero(lost & (self._unused == _SPECULATIVE), axis=-1)
            self.traffic.wasted[self._forward.index] += wasted
            self._unused[lost] = 0
