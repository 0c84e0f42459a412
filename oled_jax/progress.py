"""Progress of long work on standard error: one line that is rewritten on a terminal, a line now and then elsewhere.

Numbers in words stand here too: ``counted``, ``format_bytes``, and back again ``parse_bytes``.
"""

import re
import sys
import time
from collections.abc import Callable
from fractions import Fraction
from typing import TextIO

from oled_jax.errors import OledError

_TERMINAL_SECONDS = 0.2
_LOG_SECONDS = 5.0
_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("IB", 1024))
}


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


def counted(count: int, noun: str) -> str:
    """A number of things whose plural takes an s: "1 file", "12,345 files"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def format_bytes(count: float) -> str:
    """Decimal units, three digits: "6.44 GB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def parse_bytes(text: str) -> int:
    """The number of bytes, at least 1, that ``text`` means: "24GiB" (binary), "24GB" (decimal), "1.5 kB", "4096".

    Units are B, kB, MB, GB, TB, KiB, MiB, GiB and TiB in any case; a fraction of a byte is dropped. Raises OledError
    for anything else. As the ``type`` of a command-line option, see ``oled_jax.cli.running.argument_type``.
    """
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([KMGT]?B|[KMGT]IB|)", text.strip().upper(), re.ASCII)
    count = int(Fraction(match[1]) * _UNITS[match[2]]) if match else 0
    if count < 1:
        raise OledError(f"{text!r} is no number of bytes: write for example 24GiB, 24GB, 500MB or 4096")
    return count
