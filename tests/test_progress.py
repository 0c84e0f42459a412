"""The progress line: sparse in a log, rewritten on a terminal, honest about resumed work."""

import io

import pytest

from oled_jax.errors import OledError
from oled_jax.progress import ProgressLine, counted, format_bytes, parse_bytes


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True


def run(out, seconds_per_call: float) -> str:
    """Ten calls, the first of which reports what an earlier run had finished."""
    now = [0.0]
    line = ProgressLine("x", out, clock=lambda: now[0])
    line(200_000_000, 1_000_000_000)
    for step in range(1, 9):
        now[0] = step * seconds_per_call
        line(200_000_000 + step * 100_000_000, 1_000_000_000)
    line.close()
    return out.getvalue()


def test_a_log_gets_a_line_now_and_then():
    assert run(io.StringIO(), 1.0).splitlines() == ["x: 700 MB of 1 GB (70%), 100 MB/s"]


def test_short_work_leaves_no_trace():
    assert run(io.StringIO(), 0.001) == ""
    assert run(Terminal(), 0.001) == ""


def test_a_terminal_line_is_rewritten_and_then_removed():
    text = run(Terminal(), 1.0)
    assert text.count("\n") == 0
    assert "x: 1 GB of 1 GB (100%), 100 MB/s" in text
    assert text.endswith("\r\x1b[K")


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (6_288_350_720, "6.29 GB"), (2e15, "2e+03 TB")]
)
def test_bytes_in_words(count, text):
    assert format_bytes(count) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0 files"), (1, "1 file"), (2, "2 files"), (12345, "12,345 files")])
def test_things_are_counted_in_words(count, text):
    assert counted(count, "file") == text


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("24GiB", 24 * 2**30),
        ("24GB", 24 * 10**9),
        ("500mb", 500 * 10**6),
        ("1.5 kB", 1500),
        ("0.5KiB", 512),
        (" 2 TiB ", 2**41),
        ("3TB", 3 * 10**12),
        ("64MiB", 2**26),
        ("3B", 3),
        ("4096", 4096),
        ("1.9", 1),
        ("9007199254740993", 2**53 + 1),
    ],
)
def test_bytes_from_words(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "0", "0GB", "0.9", "-1", "GB", "5 apples", "1e9", "inf", "nan", "1,5GB", "١GB"])
def test_what_is_no_number_of_bytes(text):
    with pytest.raises(OledError, match="is no number of bytes: write for example 24GiB, 24GB, 500MB or 4096") as told:
        parse_bytes(text)
    assert repr(text) in str(told.value)
