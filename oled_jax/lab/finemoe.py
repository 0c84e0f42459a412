"""FineMoE (arXiv 2502.05370), as far as a trace allows: ``finemoe``.

It keeps *maps*: what the router chose, layer by layer, for one token in one forward, 1000 of them. After layer l, each
token's choices so far are compared with the maps (mean cosine of the layers 0 to l), and the nearest one predicts what
the token will choose at layer l + d: its experts by descending weight until their mass exceeds 1 - similarity, and at
least k of them. A prediction counts its weight times 1 - d / (L + 1); tokens are united by their largest. Slots, C per
layer, go by the product of the weight last predicted for an expert and the hits it has had since it came in; both are
forgotten when it goes.

A trace holds the k chosen experts and their weights instead of all router probabilities, and no embeddings. So there
is no search by embedding, and the first d layers are never predicted; of two maps in a full store the one goes that is
most like the new one. With ``maps=block`` there is one map for each row of a forward, the mean of its tokens'.
"""

import dataclasses
from typing import ClassVar

import numpy as np

from oled_jax.lab.keeping import Keeper, best
from oled_jax.lab.prefetch import Prefetcher, System
from oled_jax.lab.stream import Forward, Stream
from oled_jax.lab.trace import PADDING
from oled_jax.parameters import parameter
from oled_jax.retention.policy import slots_array

_SCORE_ONE = 1 << 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class FineMoe(System):
    """The published system; ``d``: how far ahead it predicts; ``store``: how many maps it keeps."""

    name: ClassVar[str] = "finemoe"
    layer_by_layer: ClassVar[bool] = True

    d: int = parameter(6, low=1, high=1 << 16)
    store: int = parameter(1000, low=1, high=1 << 13)
    maps: str = parameter("token", choices=("token", "block"))

    def start(self, stream: Stream, capacity: int, study: Stream | None = None) -> tuple[Keeper, Prefetcher]:
        """See ``System``."""
        slots = _ProbableVisits(stream, capacity)
        return slots, _Trajectories(stream, slots, self, study)


class _ProbableVisits(Keeper):
    """Slots by probability times visits; then the last use; then the smaller id. ``probable`` float32 ``[L, E]``."""

    def __init__(self, stream: Stream, capacity: int):
        shape = stream.num_layers, stream.num_experts
        super().__init__(slots_array(stream.num_layers, capacity, np))
        self._counts = stream.counts
        self._visits = np.zeros(shape, np.int64)
        self._last = np.zeros(shape, np.int64)
        self._by_id = np.arange(stream.num_experts)[::-1]
        self.probable = np.zeros(shape, np.float32)

    def after(self, forward, layers, demand, resident, fetched) -> np.ndarray:
        """Hits stay, whoever was fetched enters in the order of token counts."""
        counts = self._counts[forward.index, layers].astype(np.int64)
        scores = self.worth(forward, layers, demand, resident)
        scores = np.where(fetched, (1 << 61) + (counts << 32) + self._by_id, scores)
        return best(resident | fetched, scores + ((demand & resident).astype(np.int64) << 62), self.room(layers))

    def worth(self, forward, layers, demand, resident) -> np.ndarray:
        """Ranks within each layer."""
        visits = np.where(demand, np.where(resident, self._visits[layers], 0) + 1, self._visits[layers])
        last = np.where(demand, forward.index + 1, self._last[layers])
        order = np.lexsort((np.broadcast_to(self._by_id, last.shape), last, self.probable[layers] * visits), axis=-1)
        ranks = np.empty(order.shape, np.int64)
        np.put_along_axis(ranks, order, np.broadcast_to(np.arange(order.shape[-1]), order.shape), axis=-1)
        return ranks

    def preference(self, forward, layers, demand, resident) -> np.ndarray:
        """By token counts."""
        return self._counts[forward.index, layers].astype(np.int32)

    def observe(self, forward, demand, resident, after) -> None:
        """Counts visits of decoding forwards; who has gone is forgotten."""
        if not forward.prefill:
            self._visits += demand
        self._visits[~after] = 0
        self.probable[~after] = 0
        self._last[demand] = forward.index + 1


class _Trajectories(Prefetcher):
    def __init__(self, stream: Stream, slots: _ProbableVisits, settings: FineMoe, study: Stream | None):
        self._stream, self._slots, self._settings = stream, slots, settings
        shape = stream.num_layers, stream.num_experts
        self._maps = np.zeros((stream.num_layers, settings.store, stream.num_experts), np.float32)
        self._units = np.zeros_like(self._maps)  # the same at unit length, layer by layer
        self._kept = 0
        self._at = -1
        self._own = np.zeros((0, *shape), np.float32)
        self._own_units = np.zeros((0, *shape), np.float32)
        self._alike = np.zeros((0, 0), np.float32)  # own maps by kept ones: cosines so far, added up
        self._scores = np.zeros(shape, np.int64)
        for forward in study.forwards if study else ():
            if not forward.prefill:
                self._look_at(study, forward)
                for layer in range(study.num_layers):
                    self._compare(layer)
                self._keep()

    def ahead(self, forward: Forward, layer: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Adds the prediction for layer + d to those for the layers before it."""
        if self._at != forward.index:
            self._at = forward.index
            self._look_at(self._stream, forward)
            self._scores[:] = 0
        if not self._alike.shape[1]:
            return None
        self._compare(layer)
        self._scores[layer] = 0
        coming = layer + self._settings.d
        if coming < self._stream.num_layers:
            nearest = np.argmax(self._alike, axis=-1)
            similarity = self._alike[np.arange(len(nearest)), nearest] / (layer + 1)
            probable = self._likely(self._maps[coming, nearest], similarity).max(0)
            self._slots.probable[coming] = probable
            near = 1 - self._settings.d / (self._stream.num_layers + 1)
            self._scores[coming] = np.ceil(probable * near * _SCORE_ONE)
        nobody = np.zeros(self._scores.shape, bool)
        return self._scores, self._slots.worth(forward, slice(None), nobody, nobody)

    def after_forward(self, forward: Forward) -> None:
        """Stores the forward's maps."""
        if not forward.prefill:
            self._keep()

    def _look_at(self, stream: Stream, forward: Forward) -> None:
        """A forward's maps, of which nothing has been compared yet."""
        self._own = self._maps_of(stream, forward)
        self._own_units = self._own / _lengths(self._own)
        self._alike = np.zeros((len(self._own), self._kept), np.float32)

    def _compare(self, layer: int) -> None:
        """Takes one more layer into account."""
        self._alike += self._own_units[:, layer] @ self._units[layer, : self._alike.shape[1]].T

    def _keep(self) -> None:
        """Stores the maps of the forward just seen, in a full store each in place of the one that it is most like."""
        for index, own in enumerate(self._own):
            if self._kept < self._settings.store:
                place, self._kept = self._kept, self._kept + 1
            else:
                place = int(np.argmax(self._alike[index])) if self._alike.shape[1] else 0
            self._maps[:, place], self._units[:, place] = own, self._own_units[index]

    def _maps_of(self, stream: Stream, forward: Forward) -> np.ndarray:
        """Weights by token that counts (or by row), float32 ``[tokens, L, E]``."""
        trace = stream.trace
        ids, weights = trace.expert_ids[forward.rows], trace.weights[forward.rows].astype(np.float32)
        if trace.weights.dtype == np.uint8:
            weights /= 255
        rows, layers, tokens, _ = ids.shape
        maps = np.zeros((rows, tokens, layers, trace.num_experts + 1), np.float32)
        place = np.minimum(ids, trace.num_experts).astype(np.int64).swapaxes(1, 2)
        np.put_along_axis(maps, place, weights.swapaxes(1, 2), axis=-1)
        maps = maps[..., :-1]
        counted = ids[:, 0, :, 0] != PADDING
        if self._settings.maps == "block":
            return maps.sum(1) / np.maximum(counted.sum(1), 1)[:, None, None]
        return maps[counted]

    def _likely(self, maps: np.ndarray, similarity: np.ndarray) -> np.ndarray:
        """``maps`` ``[tokens, E]`` of unit mass without what is beyond the mass asked for and the first k."""
        maps = maps / np.maximum(maps.sum(-1, keepdims=True), 1e-9)
        order = np.argsort(-maps, axis=-1, kind="stable")
        ranked = np.take_along_axis(maps, order, axis=-1)
        before = np.cumsum(ranked, axis=-1) - ranked
        chosen = self._stream.trace.expert_ids.shape[-1]
        wanted = (before <= (1 - similarity)[:, None]) | (np.arange(maps.shape[-1]) < chosen)
        likely = np.zeros_like(maps)
        np.put_along_axis(likely, order, np.where(wanted, ranked, 0), axis=-1)
        return likely


def _lengths(maps: np.ndarray) -> np.ndarray:
    """Of each layer's weights, float32 ``[maps, L, 1]``, 1 where there are none."""
    lengths = np.sqrt((maps * maps).sum(-1, keepdims=True))
    return np.where(lengths > 0, lengths, 1)
