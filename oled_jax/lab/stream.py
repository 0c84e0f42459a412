"""A trace as policies see it: forward after forward, batches told apart, counts per expert, tokens as known before.

Sequences that share a forward belong to one batch; a forward whose sequences are all new begins the next one (the
engine numbers sequences once and for all, and a batch loses sequences but gains none while it decodes). Within a batch,
rows go by sequence number. Forwards are numbered anew from 0, in the order of the selection, so that a replay without
prefill has no gaps in its time.
"""

import dataclasses

import numpy as np

from oled_jax.errors import OledError
from oled_jax.lab.trace import PADDING, Trace
from oled_jax.retention.record import JUST_COMMITTED, MASKED, PREFILL, PROMPT, Routing

MOST_TOKENS = 65535  # that want one expert in one forward


@dataclasses.dataclass(frozen=True)
class Forward:
    """One forward. ``index``: its number in the stream; ``rows``: its rows of the trace, and ``batch_rows`` int32, of
    the same length, the row of the batch that each belongs to; ``batch_size``: rows of the batch, S; ``begins``: it
    is the first of its batch; ``prefill``: no sequence decodes in it."""

    index: int
    rows: slice
    batch_rows: np.ndarray
    batch_size: int
    begins: bool
    prefill: bool


class Stream:
    """The forwards of a trace that are to be replayed: those that decode, or all of them.

    ``forwards``; ``counts`` uint16 ``[N, L, E]``: tokens per expert, the sequences of a forward together (as large as
    the trace's expert ids); ``steps`` int32 ``[N]``: the step within its block, in a batch that of the sequence
    nearest to the start of its block; ``prefill`` bool ``[N]``; ``batches`` int64 ``[N]``: the number of its batch,
    from 0, which is that of a prompt where prompts are decoded one by one; ``tokens`` int64 ``[N]``: how many count;
    ``first_block`` bool ``[N]``: some sequence is in the first block that it decodes, as always in a forward of
    prefill. OledError if nothing is selected.
    """

    def __init__(self, trace: Trace, *, include_prefill: bool = False):
        self.trace = trace
        self.forwards = _forwards(trace, include_prefill)
        if not self.forwards:
            raise OledError(
                f"{trace.source} holds no decoding forwards, only prefill: include that (--include-prefill)"
            )
        self.counts = np.stack([_counts(trace, forward.rows) for forward in self.forwards])
        self.steps = np.asarray([trace.step[forward.rows].min() for forward in self.forwards])
        self.prefill = np.asarray([forward.prefill for forward in self.forwards])
        self.batches = np.cumsum([forward.begins for forward in self.forwards]) - 1
        self.first_block = self._in_first_block()
        counted = np.count_nonzero(trace.expert_ids[:, 0, :, 0] != PADDING, axis=-1)
        self.tokens = np.asarray([counted[forward.rows].sum() for forward in self.forwards])

    def _in_first_block(self) -> np.ndarray:
        first: dict[int, int] = {}  # block by sequence
        found = self.prefill.copy()
        for forward in self.forwards:
            if not forward.prefill:
                numbers, blocks = (array[forward.rows].tolist() for array in (self.trace.sequence, self.trace.block))
                still = [
                    first.setdefault(number, block) == block for number, block in zip(numbers, blocks, strict=True)
                ]
                found[forward.index] = any(still)
        return found

    def commits(self, chosen: np.ndarray) -> int:
        """Positions that the forwards ``chosen`` (bool ``[N]``) committed."""
        trace, found = self.trace, 0
        for forward in self._chosen(chosen):
            counted = trace.expert_ids[forward.rows, 0, :, 0] != PADDING
            found += int(np.count_nonzero(counted & (trace.status[forward.rows] == JUST_COMMITTED)))
        return found

    def generated_tokens(self, chosen: np.ndarray) -> int:
        """Tokens of the answers, up to and including the end of text, that the decoding forwards ``chosen`` (bool
        ``[N]``) gave; these must be all of some sequences. Commits, if the trace does not say how many."""
        chosen = chosen & ~self.prefill
        described = self.trace.metadata.get("sequences", [])
        known = {one["sequence"]: one["generated_tokens"] for one in described if "generated_tokens" in one}
        present = {number for forward in self._chosen(chosen) for number in self.trace.sequence[forward.rows].tolist()}
        return sum(known[number] for number in present) if present <= known.keys() else self.commits(chosen)

    def _chosen(self, chosen: np.ndarray) -> list[Forward]:
        return [self.forwards[index] for index in np.flatnonzero(chosen)]

    @property
    def num_layers(self) -> int:
        """L."""
        return self.trace.num_layers

    @property
    def num_experts(self) -> int:
        """E."""
        return self.trace.num_experts

    def __len__(self) -> int:
        return len(self.forwards)


class Tokens:
    """The routing of forward after forward, which must be asked for in order: what is known before a forward's
    sampling is what its sequences' last forward of the same block left behind."""

    def __init__(self, trace: Trace):
        self._trace = trace
        self._begin(0)

    def _begin(self, batch_size: int) -> None:
        shape = (batch_size, self._trace.tokens_per_row)
        self._block = np.full(batch_size, -1, np.int32)
        self._confidence = np.full(shape, -1, np.float16)
        self._status = np.full(shape, MASKED, np.uint8)

    def next(self, forward: Forward) -> tuple[Routing, Routing]:
        """The routing as known before the forward's sampling, and after it; over ``len(rows) * T`` tokens."""
        if forward.begins:
            self._begin(forward.batch_size)
        trace, rows, owner = self._trace, forward.rows, forward.batch_rows
        confidence, status, block = trace.confidence[rows], trace.status[rows], trace.block[rows]
        fresh = np.where(status == PROMPT, PROMPT, MASKED)
        if forward.prefill:
            before = np.full(confidence.shape, -1, np.float16), fresh
        else:
            same = (self._block[owner] == block)[:, None]
            before = np.where(same, self._confidence[owner], np.float16(-1)), np.where(same, self._status[owner], fresh)
            self._block[owner], self._confidence[owner], self._status[owner] = block, confidence, status
        ids = _flat(trace.expert_ids[rows]).astype(np.int32)
        after = Routing(
            ids=np.where(ids == PADDING, -1, ids),
            weights=_flat(trace.weights[rows]),
            row=np.repeat(owner, trace.tokens_per_row),
            confidence=confidence.reshape(-1),
            status=status.reshape(-1),
            tokens=trace.tokens[rows].reshape(-1),
        )
        return after._replace(confidence=before[0].reshape(-1), status=before[1].reshape(-1)), after


def _flat(array: np.ndarray) -> np.ndarray:
    """``[rows, L, T, K]`` as ``[L, rows * T, K]``."""
    return array.swapaxes(0, 1).reshape(array.shape[1], -1, array.shape[3])


def _forwards(trace: Trace, include_prefill: bool) -> list[Forward]:
    starts = np.flatnonzero(np.diff(trace.forward, prepend=trace.forward[0] - 1))
    chosen = []
    for start, end in zip(starts, [*starts[1:], len(trace.forward)], strict=True):
        if include_prefill or trace.phase[start] != PREFILL:
            chosen.append(slice(int(start), int(end)))
    batches: list[set[int]] = []  # their sequences
    batch_of = []
    for rows in chosen:
        present = set(trace.sequence[rows].tolist())
        if not batches or batches[-1].isdisjoint(present):
            batches.append(set())
        batches[-1] |= present
        batch_of.append(len(batches) - 1)
    numbers = [np.asarray(sorted(batch)) for batch in batches]
    forwards = []
    for index, (rows, number) in enumerate(zip(chosen, batch_of, strict=True)):
        owners = np.searchsorted(numbers[number], trace.sequence[rows]).astype(np.int32)
        begins = index == 0 or batch_of[index - 1] != number
        prefill = bool(trace.phase[rows.start] == PREFILL)
        forwards.append(Forward(index, rows, owners, len(numbers[number]), begins, prefill))
    return forwards


def _counts(trace: Trace, rows: slice) -> np.ndarray:
    """Tokens per expert, uint16 ``[L, E]``."""
    layers, width = trace.num_layers, trace.num_experts + 1
    ids = np.minimum(trace.expert_ids[rows], trace.num_experts)  # padding goes to a column of its own
    place = ids + (np.arange(layers) * width)[:, None, None]
    counts = np.bincount(place.reshape(-1), minlength=layers * width).reshape(layers, width)
    counts = counts[:, :-1]
    if counts.max() > MOST_TOKENS:
        raise OledError(
            f"{trace.source}: forward {trace.forward[rows.start]} has {counts.max()} tokens for one expert; "
            f"at most {MOST_TOKENS} can be replayed"
        )
    return counts.astype(np.uint16)
