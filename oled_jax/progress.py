"""Progress of long work on standard error: one line that is rewritten on a terminal, a line now and then elsewhere."""

import sys
import time
from collections.abc import Callable
from typing import TextIO

_TERMINAL_SECONDS = 0.2
_LOG_SECONDS = 5.0


class ProgressLine:
    """Called with (done bytes, total bytes); shows percentage and bytes/s of this run, resumed work not counted.

    In a log, short work leaves no line at all; on a terminal the line is gone after ``close``.
    """

    def __init__(self, label: str, out: TextIO | None = None, *, clock: Callable[[], float] = time.monotonic):
        self._label = label
        self._out = sys.stderr if out is None else out
        self._clock = clock
        self._terminal = self._out.isatty()
        self._start = self._shown = clock()
        self._first: int | None = None
        self._done = 0

    def __call__(self, done: int, total: int) -> None:
        if self._first is None:  # what an earlier run finished
            self._first = done
        self._done = done
        now = self._clock()
        interval = _TERMINAL_SECONDS if self._terminal else _LOG_SECONDS
        if now - self._shown >= interval:
            self._shown = now
            share = f"{format_bytes(done)} of {format_bytes(total)} ({done / max(1, total):.0%})"
            text = f"{self._label}: {share}, {self.rate()}"
            self._out.write(f"\r{text}\x1b[K" if self._terminal else f"{text}\n")
            self._out.flush()

    def rate(self) -> str:
        """Bytes per second of this run so far, in words."""
        seconds = max(self._clock() - self._start, 1e-9)
        return f"{format_bytes((self._done - (self._first or 0)) / seconds)}/s"

    def close(self) -> None:
        """Removes the line from a terminal."""
        if self._terminal and self._shown > self._start:
            self._out.write("\r\x1b[K")
            self._out.flush()


def format_bytes(count: float) -> str:
    """Decimal units, three digits: "6.44 GB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
