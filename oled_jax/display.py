"""What a person sees on a terminal: a block of masks turning into text, what is being compiled, and a summary line.

``LiveText`` redraws the end of an answer in place with three ANSI sequences (cursor up, carriage return, erase below).
Its promises: rows that are final are written once and never touched again, so that the scrollback holds the answer;
what is redrawn never exceeds the window, since a cursor cannot go up beyond it; control characters in a model's output
never reach the terminal.

Deliberately not here: colours, cursor hiding, threads, and any knowledge of tokenizers: the caller passes ``decode``.
A stream that is no terminal gets no ``LiveText``.
"""

import shutil
import sys
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from oled_jax.progress import counted, format_bytes

MASK_CHARACTER = "░"
PLAIN_MASK_CHARACTER = "#"  # on a terminal whose encoding lacks the other
_REPLACEMENT = "\ufffd"
_TAB = "    "


class LiveText:
    """Draws one answer while it is decoded.

    ``decode(ids) -> str`` gives the text of a run of tokens, and ``separator`` stands between runs ("" for text, a
    blank for bare ids). ``mask_id`` marks undecided positions. ``stream`` is a terminal, and its size is asked at every
    redraw.
    """

    def __init__(self, stream: TextIO, decode: Callable[[list[int]], str], *, mask_id: int, separator: str = ""):
        self._stream = stream
        self._decode = decode
        self._mask_id = mask_id
        self._separator = separator
        self._mask = MASK_CHARACTER if _shows(stream, MASK_CHARACTER) else PLAIN_MASK_CHARACTER
        self._committed: list[int] = []
        self._block: int | None = None
        self._block_tokens: list[int] = []
        self._frozen = 0  # characters of the answer's printable text that are written for good
        self._live_rows = 0

    @property
    def is_open(self) -> bool:
        """Whether the cursor stands in a row of the answer."""
        return self._live_rows > 0

    def step(self, block: int, tokens: Sequence[int]) -> None:
        """Shows ``tokens`` as the present state of block ``block``, without the positions that belong to the prompt.

        A new ``block`` makes the last state of the one before it final.
        """
        size = shutil.get_terminal_size()
        if self._block is not None and block != self._block:
            self._committed += self._block_tokens
            self._freeze(size.columns)
        self._block, self._block_tokens = block, [int(token) for token in tokens]
        rows = [row for row, _ in self._rows(self._render(), size.columns)]
        self._redraw(rows[-max(1, size.lines - 1) :])

    def finish(self, text: str) -> None:
        """Replaces what is still in motion by the end of ``text``, the whole final answer, and ends the line."""
        self._redraw([row for row, _ in self._rows(text, shutil.get_terminal_size().columns)])
        self._stream.write("\n")
        self._stream.flush()
        self._live_rows = 0

    def _freeze(self, columns: int) -> None:
        # The last row may still grow, and an incomplete character at its end may still change: both stay live.
        final = self._rows(self._decode(self._committed).rstrip(_REPLACEMENT), columns)[:-1]
        if final:
            self._redraw([row for row, _ in final])
            self._stream.write("\n")
            self._frozen = final[-1][1]
            self._live_rows = 0

    def _render(self) -> str:
        """The committed text and the present block. The decided start of the block is decoded along with the former."""
        runs: list[list[int]] = [list(self._committed)]
        parts: list[str] = []
        for token in self._block_tokens:
            if token != self._mask_id:
                runs[-1].append(token)
                continue
            parts += [self._decode(runs[-1]), self._mask]
            runs.append([])
        parts.append(self._decode(runs[-1]))
        return self._separator.join(part for part in parts if part)

    def _redraw(self, rows: list[str]) -> None:
        up = f"\x1b[{self._live_rows - 1}A" if self._live_rows > 1 else ""
        erase = f"{up}\r\x1b[J" if self._live_rows else ""
        self._stream.write(erase + "\n".join(rows))
        self._stream.flush()
        self._live_rows = len(rows)

    def _rows(self, text: str, columns: int) -> list[tuple[str, int]]:
        """Rows of ``text`` that are not frozen, each with the position in the printable text where the next one starts.

        At most ``columns - 1`` cells wide: in the last column, terminals differ in when they go to a new line.
        """
        limit = max(2, columns - 1)
        rows = []
        row, width, position = "", 0, self._frozen
        for character in printable(text)[self._frozen :]:
            cells = cell_width(character)
            if character == "\n":
                rows.append((row, position + 1))
                row, width = "", 0
            elif width + cells > limit:
                rows.append((row, position))
                row, width = character, cells
            else:
                row += character
                width += cells
            position += 1
        return [*rows, (row, position)]


class CompileLine:
    """Called with a program's name when it is about to be compiled, which may take minutes: says so on a terminal.

    The line stands until ``clear``, below the rows of ``live`` if that is open. ``out`` is standard error by default;
    where that is no terminal, nothing is shown.
    """

    def __init__(self, out: TextIO | None = None):
        self.live: LiveText | None = None
        self._out = sys.stderr if out is None else out
        self._terminal = self._out.isatty()
        self._count = 0
        self._start: str | None = None  # what went before the line, if there is one

    def __call__(self, name: str) -> None:
        self._count += 1
        if not self._terminal:
            return
        if self._start is None:
            self._start = "\n" if self.live is not None and self.live.is_open else ""
            self._out.write(self._start)
        self._out.write(f"\rcompiling program {self._count} ({name}) ...\x1b[K")
        self._out.flush()

    def clear(self) -> None:
        """Removes the line and puts the cursor back into the row where it stood."""
        if self._start is not None:
            self._out.write("\r\x1b[K" + ("\x1b[1A" if self._start else ""))
            self._out.flush()
            self._start = None


def summary(metrics: dict[str, Any], *, finished: bool) -> str:
    """One line about a generation, from ``GenerationMetrics.to_json()``."""
    parts = [
        counted(metrics["generated_tokens"], "token"),
        counted(metrics["num_forwards"], "forward"),
        f"{_figure(metrics['tokens_per_forward'])} tokens/forward",
        f"{_figure(metrics['ms_per_forward'])} ms/forward",
        f"{_figure(metrics['tokens_per_second'])} tokens/s",
    ]
    experts = metrics["experts"]
    if experts["policy"] is not None:
        decode = experts["decode"]
        misses = sum(decode["misses"]) / max(1, decode["forwards"] * len(decode["misses"]))
        parts.append(
            f"{experts['experts_on_device']} of {experts['num_experts']} experts on the device "
            f"({_figure(experts['slots_per_working_set'])} of the working set), hit rate {decode['hit_rate']:.1%}, "
            f"{_figure(misses)} misses per layer and forward, {format_bytes(experts['bytes_moved'])} loaded"
        )
    if experts["routing"] == "scripted":
        parts.append("routing scripted: taken from a trace, and the answer means nothing")
    if metrics["masks_left"]:
        parts.append(f"{counted(metrics['masks_left'], 'mask')} left undecided")
    parts.append("finished" if finished else "cut at the length limit")
    return ", ".join(parts)


def printable(text: str) -> str:
    """``text`` without characters that move a cursor or change a terminal's state; newlines stay, tabs are blanks."""
    text = text.replace("\t", _TAB)
    return "".join(c for c in text if c == "\n" or unicodedata.category(c) not in ("Cc", "Cs"))


def cell_width(character: str) -> int:
    """Columns that ``character`` takes on a terminal: 2 for wide ones, 0 for combining marks and joiners."""
    if unicodedata.combining(character) or unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _shows(stream: TextIO, character: str) -> bool:
    try:
        character.encode(stream.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _figure(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
