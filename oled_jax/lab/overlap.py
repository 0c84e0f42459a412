"""How alike what different forwards of a sequence ask for: by distance in steps, at block boundaries, by status.

Pure functions over a ``Stream``; every sequence is looked at by itself, in a batch too. A layer of a forward wants a
set of experts, and of each a number of tokens. Of an earlier A and a later B: ``jaccard`` |A and B| / |A or B|;
``recall`` |A and B| / |B|, which is the hit rate of a cache that holds A; ``cosine`` of the token counts. Counts can be
alike where sets are not: a cosine near 1 does not mean that experts are used again.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from oled_jax.lab.stream import Stream
from oled_jax.lab.trace import PADDING
from oled_jax.retention.record import DENOISE, JUST_COMMITTED, MASKED, PREFILL, SETTLED

STATUSES = {"masked": MASKED, "just committed": JUST_COMMITTED, "settled": SETTLED}


class Overlap(NamedTuple):
    """Means over pairs of forwards, by layer, float64 ``[L]``; ``pairs``: how many there are, int64 ``[L]``: those in
    which both sets have members. NaN where there is no pair."""

    jaccard: np.ndarray
    recall: np.ndarray
    cosine: np.ndarray
    pairs: np.ndarray


def by_gap(stream: Stream, gap: int) -> Overlap:
    """Of forwards of one block, ``gap`` steps apart."""
    return _overlap(stream, lambda rows, blocks: [(rows[i], rows[i + gap]) for i in _inside(blocks, gap)])


def at_boundaries(stream: Stream) -> dict[str, Overlap]:
    """From a block to the next one of the same sequence: ``last to first`` step, the forward that only writes keys and
    values included; ``last masked to first``, without it; ``first to first``."""
    phase = stream.trace.phase

    def pairs(choose: Callable[[list[int]], int | None]) -> Callable[[list[int], list[int]], list[tuple[int, int]]]:
        def of_sequence(rows: list[int], blocks: list[int]) -> list[tuple[int, int]]:
            groups = _grouped(rows, blocks)
            found = [(choose(one), other[0]) for one, other in itertools.pairwise(groups)]
            return [(earlier, later) for earlier, later in found if earlier is not None]

        return of_sequence

    def last_masked(rows: list[int]) -> int | None:
        denoising = [row for row in rows if phase[row] == DENOISE]
        return denoising[-1] if denoising else None

    return {
        "last to first": _overlap(stream, pairs(lambda rows: rows[-1])),
        "last masked to first": _overlap(stream, pairs(last_masked)),
        "first to first": _overlap(stream, pairs(lambda rows: rows[0])),
    }


def by_status(stream: Stream, gap: int = 1) -> dict[str, Overlap]:
    """As ``by_gap``, of the sets that positions of one status ask for: by what they are after the earlier forward.

    Both sets are of the same positions; a position just committed was a mask in the earlier forward and is a word in
    the later one.
    """

    def pairs(rows: list[int], blocks: list[int]) -> list[tuple[int, int]]:
        return [(rows[i], rows[i + gap]) for i in _inside(blocks, gap)]

    status = stream.trace.status
    return {name: _overlap(stream, pairs, lambda row, c=code: status[row] == c) for name, code in STATUSES.items()}


def kept_choices(stream: Stream, gap: int = 1) -> dict[str, float]:
    """How probably a position asks again for an expert that it chose, ``gap`` steps later in its block: over all layers
    and choices, by its status after the earlier forward, and for ``all`` positions. NaN where there is none."""
    trace, kept, cases = stream.trace, np.zeros(len(STATUSES) + 1), np.zeros(len(STATUSES) + 1)
    for rows, blocks in _sequences(stream):
        for index in _inside(blocks, gap):
            earlier, later = trace.expert_ids[rows[index]], trace.expert_ids[rows[index + gap]]
            counted = (earlier[0, :, 0] != PADDING) & (later[0, :, 0] != PADDING)
            again = (earlier[..., :, None] == later[..., None, :]).any(-1).sum((0, 2))  # by token
            for place, code in enumerate((*STATUSES.values(), None)):
                mine = counted if code is None else counted & (trace.status[rows[index]] == code)
                kept[place] += again[mine].sum()
                cases[place] += np.count_nonzero(mine) * earlier.shape[0] * earlier.shape[2]
    with np.errstate(invalid="ignore"):
        return dict(zip((*STATUSES, "all"), (kept / cases).tolist(), strict=True))


def unchanged_tokens(stream: Stream, gap: int = 1) -> float:
    """The share of positions whose set of experts in a layer is the same ``gap`` steps later in the block."""
    trace, same, cases = stream.trace, 0, 0
    for rows, blocks in _sequences(stream):
        for index in _inside(blocks, gap):
            earlier, later = (np.sort(trace.expert_ids[rows[i]], axis=-1) for i in (index, index + gap))
            counted = (earlier[0, :, 0] != PADDING) & (later[0, :, 0] != PADDING)
            same += np.count_nonzero((earlier == later).all(-1)[:, counted])
            cases += np.count_nonzero(counted) * len(earlier)
    return same / cases if cases else float("nan")


def _sequences(stream: Stream) -> Iterator[tuple[list[int], list[int]]]:
    """Rows of the trace in which a sequence decodes, in order, and the block of each."""
    trace = stream.trace
    decode = trace.phase != PREFILL
    for number in np.unique(trace.sequence[decode]).tolist():
        rows = np.flatnonzero(decode & (trace.sequence == number))
        yield rows.tolist(), trace.block[rows].tolist()


def _inside(blocks: list[int], gap: int) -> list[int]:
    """Places from which ``gap`` further on the block is still the same."""
    return [i for i in range(len(blocks) - gap) if blocks[i] == blocks[i + gap]]


def _grouped(rows: list[int], blocks: list[int]) -> list[list[int]]:
    """Rows of block after block."""
    groups: list[list[int]] = []
    for index, row in enumerate(rows):
        if index == 0 or blocks[index] != blocks[index - 1]:
            groups.append([])
        groups[-1].append(row)
    return groups


def _overlap(
    stream: Stream,
    pairs: Callable[[list[int], list[int]], list[tuple[int, int]]],
    positions: Callable[[int], np.ndarray] | None = None,
) -> Overlap:
    """Of the pairs of rows that ``pairs`` finds in a sequence; of all positions, or those chosen by the earlier row."""
    sums, number = np.zeros((3, stream.num_layers)), np.zeros(stream.num_layers, np.int64)
    for rows, blocks in _sequences(stream):
        for earlier, later in pairs(rows, blocks):
            chosen = None if positions is None else positions(earlier)
            a, b = (_counts(stream, row, chosen) for row in (earlier, later))
            both = np.count_nonzero((a > 0) & (b > 0), axis=-1)
            either = np.count_nonzero((a > 0) | (b > 0), axis=-1)
            lengths = np.sqrt((a * a).sum(-1) * (b * b).sum(-1))
            valid = lengths > 0
            number += valid
            wanted = np.count_nonzero(b, axis=-1)
            found = both / np.maximum(either, 1), both / np.maximum(wanted, 1), (a * b).sum(-1) / np.maximum(lengths, 1)
            sums += np.where(valid, found, 0)
    with np.errstate(invalid="ignore"):
        return Overlap(*(sums / number), number)


def _counts(stream: Stream, row: int, chosen: np.ndarray | None) -> np.ndarray:
    """Tokens per expert of a row, float64 ``[L, E]``; of the positions ``chosen`` (bool ``[T]``) alone."""
    ids = stream.trace.expert_ids[row]
    ids = ids if chosen is None else ids[:, chosen]
    layers, width = stream.num_layers, stream.num_experts + 1
    place = np.minimum(ids, stream.num_experts) + (np.arange(layers) * width)[:, None, None]
    counts = np.bincount(place.reshape(-1), minlength=layers * width).reshape(layers, width)
    return counts[:, :-1].astype(np.float64)
