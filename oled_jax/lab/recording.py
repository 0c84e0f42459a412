"""From an engine's records to a trace: ``TraceWriter`` is told of every forward and makes the trace at the end.

Give its ``add`` to a generation as ``on_record``; several generations may follow one another. What a record says of
residency is left out: a trace holds what was asked for, and a replay decides anew what is resident. Rows are kept in
memory, narrow as they are stored, until ``write``.
"""

from pathlib import Path
from typing import Any

import numpy as np

from oled_jax.errors import OledError
from oled_jax.lab.trace import PADDING, Trace, write_trace
from oled_jax.retention.record import PREFILL, StepRecord


class TraceWriter:
    """Collects ``StepRecord``s (numpy) of a model with ``num_experts`` routed experts per layer.

    ``metadata``: what else is known of the run, ready for JSON (model, config, decoding arguments, versions).
    """

    def __init__(self, num_experts: int, metadata: dict[str, Any] | None = None):
        self._num_experts = num_experts
        self._metadata = dict(metadata or {})
        self._rows: list[dict[str, np.ndarray]] = []

    def add(self, record: StepRecord) -> None:
        """Takes one forward in: a row for every sequence that has tokens in it. OledError if its routing is missing."""
        if record.routing is None:
            raise OledError(f"the record of forward {int(record.forward)} has no routing: record with an engine")
        routing = record.routing
        counted = np.any(routing.ids >= 0, axis=(0, 2))
        for index in np.flatnonzero(record.sequence >= 0):
            mine = np.flatnonzero((routing.row == index) & counted)
            if not len(mine):
                continue
            # New arrays, and not views that would keep everything else of the record alive.
            self._rows.append(
                {
                    "forward": np.int32(record.forward),
                    "sequence": np.int32(record.sequence[index]),
                    "block": np.int32(record.block[index]),
                    "step": np.int32(record.step[index]),
                    "phase": np.uint8(record.phase[index]),
                    "expert_ids": routing.ids[:, mine].astype(np.uint16),
                    "weights": routing.weights[:, mine].astype(np.float16),
                    "confidence": routing.confidence[mine].astype(np.float16),
                    "tokens": routing.tokens[mine].astype(np.int32),
                    "status": routing.status[mine].astype(np.uint8),
                }
            )

    def trace(self) -> Trace:
        """What was recorded so far; OledError if that is nothing."""
        if not self._rows:
            raise OledError("nothing was recorded: a trace needs at least one forward")
        decoded = [row["tokens"].size for row in self._rows if row["phase"] != PREFILL]
        length = max(decoded or [row["tokens"].size for row in self._rows])
        pieces = [piece for row in self._rows for piece in _blocks(row, length)]
        arrays = {name: np.stack([piece[name] for piece in pieces]) for name in pieces[0]}
        return Trace(**arrays, num_experts=self._num_experts, metadata=self._metadata)

    def write(self, path: str | Path) -> None:
        """Writes the trace, see ``write_trace``."""
        write_trace(path, self.trace())


def _blocks(row: dict[str, np.ndarray], length: int) -> list[dict[str, np.ndarray]]:
    """``row`` cut into rows of ``length`` tokens, the last one padded; each is the block after the one before."""
    pieces = []
    for number, start in enumerate(range(0, row["tokens"].size, length)):
        piece = row | {"block": np.int32(row["block"] + number)}
        filling = (
            ("expert_ids", PADDING, 1),
            ("weights", 0, 1),
            ("confidence", -1, 0),
            ("tokens", 0, 0),
            ("status", 0, 0),
        )
        for name, value, axis in filling:
            part = np.take(row[name], range(start, min(start + length, row["tokens"].size)), axis)
            widths = [(0, 0)] * part.ndim
            widths[axis] = (0, length - part.shape[axis])
            piece[name] = np.pad(part, widths, constant_values=value)
        pieces.append(piece)
    return pieces
