"""``commit-ahead``: the experts of tokens that are about to enter the block as words.

A position that is committed changes its input from mask to word at the next forward, and its experts with it; which
they are depends on the word above all. A table, learnt while the stream goes on (and before, from what there is to
study), holds for each token id how often every expert was chosen by positions that held that word as input; an id not
met yet stands for the average word.

After the sampling of forward i this predicts

- for forward i + 1: the experts of what was committed just now, with certainty;
- for forward i + 2, to be brought in while forward i + 1 runs: those of masked positions, times the chance that they
  will have been committed by the end of forward i + 1. That chance is counted as the stream goes on, by the probability
  of the position's candidate in ten bins and by whether it is its block's most probable one.

An expert's score is the sum over positions of chance times share, and it is predicted from ``theta`` on. Which token a
masked position is about to become is what the last forward proposed there (``tokens=candidates``); traces without
candidates, and ``tokens=committed``, leave masked positions out. ``tokens=hindsight`` reads from the rest of the trace
what each of them becomes, which no engine could: an upper end.
"""

import dataclasses
from typing import ClassVar

import numpy as np

from oled_jax.lab.keeping import Layers
from oled_jax.lab.prefetch import Prefetch, Prefetcher
from oled_jax.lab.stream import Forward, Stream
from oled_jax.lab.trace import PADDING, Trace
from oled_jax.parameters import parameter
from oled_jax.retention.record import JUST_COMMITTED, MASKED, PROMPT, SETTLED

_SCORE_ONE = 1 << 24
_BINS = 10
_MOST_COUNT = 65535


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommitAhead(Prefetch):
    """See the module. What is predicted does not give way to something else that is."""

    name: ClassVar[str] = "commit-ahead"

    evict_predicted: str = parameter("never", choices=("lower", "any", "never"))
    theta: float = parameter(0.5, low=0.001, high=1000)
    tokens: str = parameter("candidates", choices=("candidates", "committed", "hindsight"))

    def start(self, stream: Stream, study: Stream | None = None) -> Prefetcher:
        """See ``Prefetch``."""
        return _CommitAhead(stream, self, study)


class TokenExperts:
    """How often positions that held a word chose each expert, by token id; learnt forward by forward."""

    def __init__(self, trace: Trace, *others: Trace):
        """For the tokens of ``trace`` and of ``others``."""
        held = [array.reshape(-1) for each in (trace, *others) for array in (each.tokens, each.candidates)]
        self._ids = np.unique(np.concatenate(held))
        shape = trace.num_layers, trace.num_experts
        self._counts = np.zeros((len(self._ids), *shape), np.uint16)
        self._seen = np.zeros(len(self._ids), np.int64)
        self._all = np.zeros(shape, np.int64)
        self._layers = np.arange(trace.num_layers)[:, None]  # against [T, L, K]

    def learn(self, tokens: np.ndarray, ids: np.ndarray) -> None:
        """Words ``tokens`` int32 ``[T]`` and the experts that they chose, ``ids`` ``[T, L, K]``."""
        rows = np.searchsorted(self._ids, tokens)
        room = self._seen[rows] < _MOST_COUNT - len(rows)
        rows, ids = rows[room], ids[room].astype(np.int64)
        np.add.at(self._counts, (rows[:, None, None], self._layers, ids), 1)
        np.add.at(self._all, (self._layers, ids), 1)
        np.add.at(self._seen, rows, 1)

    def expected(self, tokens: np.ndarray, chances: np.ndarray) -> np.ndarray:
        """The sum over ``tokens`` int32 ``[T]`` of ``chances`` ``[T]`` times the share of each expert, ``[L, E]``."""
        rows = np.searchsorted(self._ids, tokens)
        known = self._seen[rows] > 0
        weights = (chances[known] / self._seen[rows[known]]).astype(np.float32)
        total = np.tensordot(weights, self._counts[rows[known]].astype(np.float32), axes=1).astype(np.float64)
        return total + chances[~known].sum() * self._all / max(1, self._seen.sum())


class _CommitAhead(Prefetcher):
    def __init__(self, stream: Stream, settings: CommitAhead, study: Stream | None):
        self._stream, self._settings = stream, settings
        self._table = TokenExperts(stream.trace, *([study.trace] if study else []))
        becomes = {"hindsight": outcomes, "candidates": lambda trace: trace.candidates}.get(settings.tokens)
        self._becomes = becomes(stream.trace) if becomes else None
        self._commits = np.ones((2, _BINS))  # masked positions that were committed by the next forward, plus one
        self._cases = np.full((2, _BINS), 2.0)
        self._before: dict[int, tuple[int, np.ndarray]] = {}  # by row of the batch: its block, and each position's bin
        self._later: np.ndarray | None = None  # scores for the forward after the next
        for forward in study.forwards if study else ():
            if forward.begins:
                self._before = {}
            self._learn(study, forward)

    def begin(self, forward: Forward) -> None:
        self._before, self._later = {}, None

    def after_layer(self, forward: Forward, layers: Layers) -> np.ndarray | None:
        """What the forward before found likely."""
        return None if self._later is None else self._later[layers]

    def after_forward(self, forward: Forward) -> np.ndarray:
        """Learns from the forward; predicts for the next, and keeps what it predicts for the one after that."""
        self._learn(self._stream, forward)
        trace, rows = self._stream.trace, forward.rows
        if forward.prefill:
            return np.zeros(self._stream.counts.shape[1:], np.int64)
        committed, masked = (_positions(trace, rows, status) for status in (JUST_COMMITTED, MASKED))
        if self._becomes is not None:
            masked &= self._becomes[rows] >= 0
            bins = _bins(trace.confidence[rows], masked)[masked]
            self._later = self._scores(self._becomes[rows][masked], (self._commits / self._cases).reshape(-1)[bins])
        return self._scores(trace.tokens[rows][committed], np.ones(int(committed.sum())))

    def _learn(self, stream: Stream, forward: Forward) -> None:
        """What words chose, and what has become of the positions that were masked after the forward before."""
        trace, rows = stream.trace, forward.rows
        words = _positions(trace, rows, SETTLED) | _positions(trace, rows, PROMPT)
        self._table.learn(trace.tokens[rows][words], trace.expert_ids[rows].swapaxes(1, 2)[words])
        if forward.prefill:
            return
        masked = _positions(trace, rows, MASKED)
        bins = _bins(trace.confidence[rows], masked)
        for index, (row, block) in enumerate(zip(forward.batch_rows.tolist(), trace.block[rows].tolist(), strict=True)):
            before = self._before.get(row)
            if before is not None and before[0] == block:
                was = before[1] >= 0
                np.add.at(self._cases.reshape(-1), before[1][was], 1)
                np.add.at(self._commits.reshape(-1), before[1][was & ~masked[index]], 1)
            self._before[row] = block, np.where(masked[index], bins[index], -1)

    def _scores(self, tokens: np.ndarray, chances: np.ndarray) -> np.ndarray:
        expected = self._table.expected(tokens, chances)
        return np.where(expected >= self._settings.theta, expected * _SCORE_ONE, 0).astype(np.int64)


def _positions(trace: Trace, rows: slice, status: int) -> np.ndarray:
    """Which positions count and have a status after a forward, bool ``[rows, T]``."""
    return (trace.expert_ids[rows, 0, :, 0] != PADDING) & (trace.status[rows] == status)


def outcomes(trace: Trace) -> np.ndarray:
    """The token that each position of each row holds when its block has been decoded, int32 ``[F, T]``."""
    becomes = trace.tokens.copy()
    last: dict[tuple[int, int], int] = {}
    for row in range(len(trace.sequence) - 1, -1, -1):
        block = int(trace.sequence[row]), int(trace.block[row])
        becomes[row] = trace.tokens[last.setdefault(block, row)]
    return becomes


def _bins(confidence: np.ndarray, masked: np.ndarray) -> np.ndarray:
    """Ten bins of confidence, and ten more for the most confident masked position of a row; int64 ``[rows, T]``."""
    known = np.where(masked, np.clip(confidence.astype(np.float32), 0, 1), -1.0)
    bins = np.clip((known * _BINS).astype(np.int64), 0, _BINS - 1)
    first = np.arange(known.shape[-1]) == np.argmax(known, axis=-1)[:, None]
    return bins + _BINS * (first & masked)
