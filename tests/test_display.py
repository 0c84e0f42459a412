"""What a terminal shows after each redraw, on a small terminal emulator; progress and summary lines."""

import io
import re

import pytest

from oled_jax import display
from oled_jax.display import CompileLine, LiveText, summary

MASK = 0
M = "░"


class Screen(io.StringIO):
    """As much of a terminal as ``LiveText`` relies on: rows of text, a cursor that cannot leave the window upwards."""

    def __init__(self, columns=20, lines=5):
        super().__init__()
        self.columns, self.lines = columns, lines
        self.rows, self.row, self.column = [""], 0, 0

    def isatty(self):
        return True

    def write(self, text):
        for control, plain in re.findall(r"(\x1b\[\d*[A-Z]|\r|\n)|([^\x1b\r\n]+)", text):
            if control == "\n":
                self.row, self.column = self.row + 1, 0
                if self.row == len(self.rows):
                    self.rows.append("")
            elif control == "\r":
                self.column = 0
            elif control == "\x1b[J":
                self.rows = self.rows[: self.row + 1]
                self.rows[self.row] = self.rows[self.row][: self.column]
            elif control == "\x1b[K":
                self.rows[self.row] = self.rows[self.row][: self.column]
            elif control.endswith("A"):
                self.row = max(self.row - int(control[2:-1]), len(self.rows) - self.lines, 0)
            else:
                assert not control, f"unknown sequence {control!r}"
                line = self.rows[self.row]
                self.rows[self.row] = line[: self.column] + plain + line[self.column + len(plain) :]
                self.column += len(plain)
                assert len(self.rows[self.row]) < self.columns, "wrote into the last column"
        return len(text)


@pytest.fixture
def screen(monkeypatch):
    screen = Screen()
    size = lambda: display.shutil.os.terminal_size((screen.columns, screen.lines))  # noqa: E731
    monkeypatch.setattr(display.shutil, "get_terminal_size", size)
    return screen


def chars(ids):
    """One character a token; bytes that do not make a character yet decode as in byte-level tokenizers."""
    return bytes(ids).decode(errors="replace")


def live(screen, **kwargs):
    return LiveText(screen, chars, mask_id=MASK, **kwargs)


def test_masks_turn_into_text_in_place(screen):
    text = live(screen)
    text.step(0, [MASK] * 4)
    assert screen.rows == [M * 4]
    text.step(0, [*b"a", MASK, *b"c", MASK])
    assert screen.rows == [f"a{M}c{M}"]
    text.step(0, list(b"abcd"))
    text.step(1, [MASK, *b"fg", MASK])
    assert screen.rows == [f"abcd{M}fg{M}"]
    text.finish("abcdef")
    assert screen.rows == ["abcdef", ""]


def test_lines_that_are_final_are_written_once(screen):
    text = live(screen)
    text.step(0, list(b"one\n"))
    text.step(1, list(b"two\n"))
    text.step(2, [*b"thr", MASK])
    before = list(screen.rows)
    assert before == ["one", "two", f"thr{M}"]
    screen.rows[0] = "touched by someone else"
    text.step(2, list(b"thre"))
    text.finish("one\ntwo\nthre")
    assert screen.rows == ["touched by someone else", "two", "thre", ""]


def test_long_lines_wrap_and_shrink_again(screen):
    text = live(screen)
    text.step(0, list(b"x" * 30))
    assert screen.rows == ["x" * 19, "x" * 11]
    text.step(0, list(b"short"))
    assert screen.rows == ["short"]


def test_wide_characters_take_two_cells(screen):
    text = LiveText(screen, lambda ids: "漢" * len(ids), mask_id=MASK)
    text.step(0, [1] * 10)
    assert screen.rows == ["漢" * 9, "漢"]


def test_what_moves_never_exceeds_the_window(screen):
    text = live(screen)
    text.step(0, list(b"\n".join(b"%d" % i for i in range(10))))
    assert screen.rows == ["6", "7", "8", "9"]
    text.step(0, list(b"\n".join(b"%d" % i for i in range(9))))
    assert screen.rows == ["5", "6", "7", "8"]
    answer = "\n".join(str(i) for i in range(9))
    text.finish(answer)
    assert screen.rows == [*answer.split("\n"), ""]


def test_final_text_survives_a_change_of_width_between_blocks(screen):
    text = live(screen)
    text.step(0, list(b"x" * 30 + b"\n"))
    text.step(1, list(b"y" * 12))
    screen.columns = 11
    text.step(2, list(b"z" * 4))
    text.finish("x" * 30 + "\n" + "y" * 12 + "z" * 4)
    assert screen.rows == ["x" * 19, "x" * 11, "y" * 10, "yyzzzz", ""]


def test_character_cut_by_a_block_border_is_joined(screen):
    first, second = list("é".encode())
    text = live(screen)
    text.step(0, [*b"caf", first])
    text.step(1, [second, MASK])
    assert screen.rows == [f"café{M}"]
    text.finish("café")
    assert screen.rows == ["café", ""]


def test_ids_are_set_apart(screen):
    text = LiveText(screen, lambda ids: " ".join(map(str, ids)), mask_id=MASK, separator=" ")
    text.step(0, [MASK, 11, 12, MASK])
    assert screen.rows == [f"{M} 11 12 {M}"]
    text.step(1, [5, MASK])
    assert screen.rows == [f"{MASK} 11 12 {MASK} 5 {M}"]  # masks that a final block kept are tokens like others


def test_control_characters_do_not_reach_the_terminal(screen):
    text = live(screen)
    text.step(0, list(b"a\x1b[2J\x07\rb\tc"))
    text.finish("a\x1b[2J\x07\rb\tc\x9b")
    assert screen.rows == ["a[2Jb    c", ""]


def test_a_plainer_mask_where_the_encoding_lacks_it(screen, monkeypatch):
    monkeypatch.setattr(Screen, "encoding", "ascii", raising=False)
    live(screen).step(0, [*b"a", MASK])
    assert screen.rows == ["a#"]


# What is being compiled.


def test_compiling_is_told_in_one_row_that_goes_again(screen):
    screen.columns = 50
    compiling = CompileLine(screen)
    compiling("prefill")
    compiling("denoise")
    assert screen.rows == ["compiling program 2 (denoise) ..."]
    compiling.clear()
    compiling.clear()
    assert (screen.rows, screen.row, screen.column) == ([""], 0, 0)


def test_compiling_amid_an_answer_is_told_below_it(screen):
    screen.columns = 50
    compiling = CompileLine(screen)
    compiling.live = text = live(screen)
    compiling("denoise")
    assert screen.rows == ["compiling program 1 (denoise) ..."]
    compiling.clear()
    text.step(0, list(b"x" * 60))
    compiling("commit")
    compiling("denoise")
    assert screen.rows == ["x" * 49, "x" * 11, "compiling program 3 (denoise) ..."]
    compiling.clear()
    text.step(0, list(b"y" * 60))
    assert screen.rows == ["y" * 49, "y" * 11]
    text.finish("z")
    compiling("prefill")  # for the next answer
    assert screen.rows == ["z", "compiling program 4 (prefill) ..."]
    compiling.clear()
    assert (screen.rows, screen.row) == (["z", ""], 1)


def test_compiling_is_not_told_in_a_log():
    log = io.StringIO()
    compiling = CompileLine(log)
    compiling("denoise")
    compiling.clear()
    assert log.getvalue() == ""


def test_summary():
    metrics = {
        "generated_tokens": 128,
        "num_forwards": 40,
        "tokens_per_forward": 3.2,
        "ms_per_forward": 12.34567,
        "tokens_per_second": 1234.5,
        "masks_left": 0,
        "experts": {"policy": None, "routing": "router"},
    }
    rates = "128 tokens, 40 forwards, 3.2 tokens/forward, 12.35 ms/forward, 1234 tokens/s"
    assert summary(metrics, finished=True) == f"{rates}, finished"
    assert summary({**metrics, "masks_left": 2}, finished=False) == (
        f"{rates}, 2 masks left undecided, cut at the length limit"
    )
    assert summary({**metrics, "generated_tokens": 1, "num_forwards": 1, "masks_left": 1}, finished=True) == (
        "1 token, 1 forward, 3.2 tokens/forward, 12.35 ms/forward, 1234 tokens/s, 1 mask left undecided, finished"
    )
    decode = {"misses": [30, 50], "forwards": 40, "hit_rate": 0.953}
    experts = {"policy": "lru", "routing": "router", "experts_on_device": 100, "num_experts": 256, "decode": decode}
    experts |= {"slots_per_working_set": 1.35, "bytes_moved": 2 * 10**9}
    assert summary({**metrics, "experts": experts}, finished=True) == (
        f"{rates}, 100 of 256 experts on the device (1.35 of the working set), hit rate 95.3%, "
        "1 misses per layer and forward, 2 GB loaded, finished"
    )
    assert summary({**metrics, "experts": {"policy": None, "routing": "scripted"}}, finished=True) == (
        f"{rates}, routing scripted: taken from a trace, and the answer means nothing, finished"
    )
