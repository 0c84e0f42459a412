"""MoE-Infinity (arXiv 2401.14361) at the granularity of a block: ``moe-infinity``.

Slots are one pool over all layers (``pool``). Whoever was hit least often since it came in goes first, then the least
recently wanted. The prefetcher keeps a library of *activation matrices*, tokens by layer and expert summed over
the forwards of one sequence's block. After each layer it finds the matrix most like the running forward as far as that
has come, by the mean cosine of their rows, and predicts what that matrix holds for the layers to come: a row's shares,
times 1 - distance / (L + 1). A block's own matrix joins the library at its end, in place of the one that was found
least often, once there are 1000.

Ours where the publication is silent: in a batch every sequence is looked up by itself and predictions are added; what
is predicted for layers to come gives way to nothing but a higher prediction, and to demand after everybody else (it
has not been hit yet and would always go first).
"""

import dataclasses
from typing import ClassVar

import numpy as np

from oled_jax.lab.keeping import Keeper
from oled_jax.lab.pool import VisitPool
from oled_jax.lab.prefetch import Prefetcher, System
from oled_jax.lab.stream import Forward, Stream
from oled_jax.parameters import parameter

_LIBRARY = 1000
_SCORE_ONE = 1 << 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoeInfinity(System):
    """The published system; ``library``: how many matrices it keeps."""

    name: ClassVar[str] = "moe-infinity"
    layer_by_layer: ClassVar[bool] = True

    target: str = parameter("shared", choices=("shared",))
    library: int = parameter(_LIBRARY, low=1, high=1 << 13)

    def start(self, stream: Stream, capacity: int, study: Stream | None = None) -> tuple[Keeper, Prefetcher]:
        """See ``System``."""
        pool = VisitPool(stream, capacity)
        return pool, _ActivationMatrices(stream, pool, self.library, study)

    def limit(self, capacity: int) -> int:
        """Without ``max_prefetch`` none but the pool's size."""
        return self.max_prefetch or 1 << 16


class _ActivationMatrices(Prefetcher):
    def __init__(self, stream: Stream, pool: VisitPool, library: int, study: Stream | None):
        self._stream, self._pool = stream, pool
        shape = stream.num_layers, stream.num_experts
        self._rows = np.zeros((library, *shape), np.float32)  # of unit length, layer by layer
        self._shares = np.zeros((library, *shape), np.float32)  # which add up to one, layer by layer
        self._found = np.zeros(library, np.int64)
        self._kept = 0
        self._running: dict[int, tuple[int, np.ndarray]] = {}  # by row of the batch: its block and matrix so far
        self._at = -1
        self._own = np.zeros((0, *shape), np.float32)  # tokens of each row in the running forward
        self._alike = np.zeros((0, 0), np.float32)  # rows by library: cosines so far, added up
        for forward in study.forwards if study else ():
            if forward.begins:
                self.begin(forward)
            self._add(study, forward, counts_by_row(study, forward).astype(np.float32))
        self.begin(stream.forwards[0])

    def begin(self, forward: Forward) -> None:
        for _, matrix in self._running.values():
            self._keep(matrix)
        self._running = {}

    def ahead(self, forward: Forward, layer: int) -> tuple[np.ndarray, np.ndarray] | None:
        """By the nearest matrix."""
        if self._at != forward.index:
            self._at = forward.index
            self._own = counts_by_row(self._stream, forward).astype(np.float32)
            self._alike = np.zeros((len(self._own), self._kept), np.float32)
        if not self._kept:
            return None
        own = self._own[:, layer]
        lengths = np.maximum(np.sqrt((own * own).sum(-1, keepdims=True)), 1)
        self._alike += (own / lengths) @ self._rows[: self._kept, layer].T
        nearest = np.argmax(self._alike, axis=-1)
        np.add.at(self._found, nearest, 1)
        layers = self._stream.num_layers
        near = 1 - np.arange(1, layers - layer) / (layers + 1)
        expected = np.zeros(self._own.shape[1:])
        expected[layer + 1 :] = self._shares[nearest][:, layer + 1 :].sum(0) * near[:, None] / len(nearest)
        scores = np.ceil(expected * _SCORE_ONE).astype(np.int64)
        self._pool.predicted = scores > 0
        return scores, self._pool.standing()

    def after_forward(self, forward: Forward) -> None:
        """Adds the forward to its blocks' matrices."""
        self._add(self._stream, forward, self._own)

    def _add(self, stream: Stream, forward: Forward, own: np.ndarray) -> None:
        """A block that has ended gives its matrix to the library."""
        if forward.prefill:
            return
        blocks = stream.trace.block[forward.rows].tolist()
        for row, block, counts in zip(forward.batch_rows.tolist(), blocks, own, strict=True):
            before = self._running.get(row)
            if before is not None and before[0] != block:
                self._keep(before[1])
                before = None
            self._running[row] = block, counts if before is None else before[1] + counts

    def _keep(self, matrix: np.ndarray) -> None:
        length = np.maximum(np.sqrt((matrix * matrix).sum(-1, keepdims=True)), 1)
        share = matrix / np.maximum(matrix.sum(-1, keepdims=True), 1)
        place = self._kept if self._kept < len(self._found) else int(np.argmin(self._found))
        self._rows[place], self._shares[place], self._found[place] = matrix / length, share, 0
        self._kept = max(self._kept, place + 1)


def counts_by_row(stream: Stream, forward: Forward) -> np.ndarray:
    """Tokens per expert of each row of a forward, int64 ``[rows, L, E]``."""
    ids = stream.trace.expert_ids[forward.rows]
    rows, layers, width = len(ids), stream.num_layers, stream.num_experts + 1
    place = np.minimum(ids, stream.num_experts) + (np.arange(rows * layers) * width).reshape(rows, layers, 1, 1)
    counts = np.bincount(place.reshape(-1), minlength=rows * layers * width)
    return counts.reshape(rows, layers, width)[..., :-1]
