"""From an engine's records to a trace: ``TraceWriter`` is told of every forward and makes the trace at the end.

Promises: memory is bounded, however long the run: rows wait in a nameless temporary file, which is gone with the
process, whatever ends it; a batch that is not finished leaves no row. Give ``add`` to a generation as ``on_record``;
several generations may follow one another, all with one block length.

What a record says of residency is left out: a trace holds what was asked for, and a replay decides anew what is
resident.
"""

import contextlib
import os
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from oled_jax.errors import OledError
from oled_jax.lab.trace import Trace, write_arrays
from oled_jax.lab.trace_checks import LAYOUT, PADDING
from oled_jax.retention.record import PREFILL, StepRecord

WEIGHTS = ("float16", "uint8")
_BYTES_AT_A_TIME = 1 << 24


def row_bytes(layers: int, length: int, chosen: int, weights: str = WEIGHTS[0]) -> int:
    """Bytes that one row takes, before compression: L layers, T tokens (``length``), K ``chosen`` experts."""
    return _row(layers, length, chosen, np.dtype(weights)).itemsize


def _row(layers: int, length: int, chosen: int, weights: np.dtype) -> np.dtype:
    """One row as it waits. Wide arrays first: the narrow ones then lie side by side, and are read array by array."""
    sizes = {"L": layers, "T": length, "K": chosen}
    dtypes = {name: np.dtype(known[0]) for name, (known, _) in LAYOUT.items()} | {"weights": weights}
    return np.dtype(
        [(name, dtypes[name], tuple(sizes[axis] for axis in axes[1:])) for name, (_, axes) in LAYOUT.items()]
    )


class TraceWriter:
    """Collects ``StepRecord``s (numpy) of a model with ``num_experts`` routed experts per layer.

    ``metadata``: what else is known of the run, ready for JSON (model, config, decoding arguments, versions); may be
    added to until the trace is made.
    ``weights``: how router weights are stored, "float16" as policies see them, or "uint8" in units of 1/255, half as
    large. ``folder``: where rows wait (default: the system's folder for temporary files); a full disk raises OSError.
    ``rows``, ``forwards`` and ``nbytes`` (of the rows, as they will be stored without compression) count what was
    taken in, less what was dropped.
    """

    def __init__(
        self,
        num_experts: int,
        metadata: dict[str, Any] | None = None,
        *,
        weights: str = "float16",
        folder: str | Path | None = None,
    ):
        if weights not in WEIGHTS:
            raise OledError(f"weights is {weights!r}: give {' or '.join(WEIGHTS)}")
        self.rows = self.forwards = 0
        self._num_experts = num_experts
        self.metadata = dict(metadata or {})
        self._weights = np.dtype(weights)
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  (as long as the writer)
        weakref.finalize(self, self._file.close)
        self._row: np.dtype | None = None  # one row in the temporary file; known with the length of a block
        self._early: list[StepRecord] = []  # of prefill, before that
        self._batch: list[dict[str, Any]] = []
        self._described: dict[int, dict[str, Any]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the rows so far."""
        return self.rows * self._row.itemsize if self._row else 0

    @contextlib.contextmanager
    def batch(self, described: Sequence[dict[str, Any]] = ()) -> Iterator[None]:
        """Generates one batch inside; if that ends in an exception, its rows are dropped.

        ``described``: what the trace's ``sequences`` say of the batch's rows, in order; read when the batch is
        finished, so that results may be added inside.
        """
        before = self.rows, self.forwards, dict(self._described), list(self._early), self._row
        self._batch = list(described)
        try:
            yield
        except BaseException:
            self.rows, self.forwards, self._described, self._early, self._row = before
            os.ftruncate(self._file.fileno(), self.nbytes)
            raise
        finally:
            self._batch = []

    def add(self, record: StepRecord) -> None:
        """Takes one forward in: a row for every sequence that has tokens in it.

        OledError if its routing is missing, or its blocks have another length than those before.
        """
        if record.routing is None:
            raise OledError(f"the record of forward {int(record.forward)} has no routing: record with an engine")
        length = record.routing.ids.shape[1] // len(record.sequence)
        decodes = bool(np.any(record.phase > PREFILL))
        if decodes and self._row is None:
            self._begin(record, length)
        if decodes and length != self.tokens_per_row:
            raise OledError(
                f"blocks of {length} tokens follow blocks of {self.tokens_per_row}: a trace holds one length"
            )
        for number, described in zip(record.sequence.tolist(), self._batch, strict=False):  # a batch has empty rows
            if number >= 0:
                self._described[number] = described
        if self._row is None:
            self._early.append(record)
        else:
            self._write(record)
        self.forwards += 1

    def trace(self) -> Trace:
        """What was recorded so far; OledError if that is nothing."""
        self._finish()
        arrays = {name: np.concatenate(list(self._parts(name))) for name in LAYOUT}
        return Trace(**arrays, num_experts=self._num_experts, metadata=self._about())

    def write(self, path: str | Path) -> None:
        """Writes the trace, see ``write_trace``; a few megabytes at a time."""
        self._finish()
        described = {name: (self._row[name].base, (self.rows, *self._row[name].shape)) for name in LAYOUT}
        write_arrays(path, self._num_experts, self._about(), described, self._parts)

    @property
    def tokens_per_row(self) -> int:
        """T, the length of a block; known once something was decoded."""
        return self._row["tokens"].shape[0]

    def _begin(self, record: StepRecord, length: int) -> None:
        """Fixes what a row looks like, and writes the rows that had to wait for it."""
        layers, _, chosen = record.routing.ids.shape
        self._row = _row(layers, length, chosen, self._weights)
        early, self._early = self._early, []
        for waiting in early:
            self._write(waiting)

    def _write(self, record: StepRecord) -> None:
        routing, length = record.routing, self.tokens_per_row
        counted = routing.ids[0, :, 0] >= 0  # in one layer as in all
        rows = []
        for index in np.flatnonzero(record.sequence >= 0):
            mine = np.flatnonzero((routing.row == index) & counted)
            rows += [(index, piece, mine[at : at + length]) for piece, at in enumerate(range(0, len(mine), length))]
        stored = np.zeros(len(rows), self._row)
        for row, (index, piece, mine) in zip(stored, rows, strict=True):
            count, tokens = len(mine), _as_slice(mine)
            row["forward"], row["sequence"] = record.forward, record.sequence[index]
            row["block"], row["step"] = record.block[index] + piece, record.step[index]
            row["phase"] = record.phase[index]
            row["expert_ids"][:, :count] = routing.ids[:, tokens]
            row["expert_ids"][:, count:] = PADDING
            row["weights"][:, :count] = self._rounded(routing.weights[:, tokens])
            row["confidence"][count:], row["candidates"] = -1, -1
            for name in ("confidence", "tokens", "status", "candidates"):
                values = getattr(routing, name)
                if values is not None:
                    row[name][:count] = values[tokens]
        # By position: whatever an interrupted write has left behind the whole rows is written over.
        content, at = memoryview(stored.view(np.uint8)), self.nbytes
        while content:
            written = os.pwrite(self._file.fileno(), content, at)
            content, at = content[written:], at + written
        self.rows += len(rows)

    def _rounded(self, weights: np.ndarray) -> np.ndarray:
        """As they are stored."""
        return np.rint(weights.astype(np.float32) * 255) if self._weights == np.uint8 else weights

    def _finish(self) -> None:
        """Nothing may wait any more; OledError if there is nothing at all."""
        if self._early:
            lengths = [np.bincount(record.routing.row + 1)[1:].max() for record in self._early]
            self._begin(self._early[-1], int(max(lengths)))
        if not self.rows:
            raise OledError("nothing was recorded: a trace needs at least one forward")

    def _about(self) -> dict[str, Any]:
        described = [{"sequence": number, **self._described[number]} for number in sorted(self._described)]
        return self.metadata | ({"sequences": described} if described else {})

    def _parts(self, name: str) -> Iterator[np.ndarray]:
        """The rows of one array, some at a time."""
        count = max(1, _BYTES_AT_A_TIME // self._row.itemsize)
        for start in range(0, self.rows, count):
            part = np.empty(min(count, self.rows - start), self._row)
            content, at = memoryview(part.view(np.uint8)), start * self._row.itemsize
            while content:
                read = os.preadv(self._file.fileno(), [content], at)
                assert read, "rows are missing from the temporary file"
                content, at = content[read:], at + read
            yield part[name]


def _as_slice(places: np.ndarray) -> slice | np.ndarray:
    """Increasing places as a slice where they have no gap: copying by a list takes five times as long."""
    first, end = int(places[0]), int(places[-1]) + 1
    return slice(first, end) if end - first == len(places) else places
