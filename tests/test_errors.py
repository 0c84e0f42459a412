"""Lists of problems: however many and however long, the message stays one readable line."""

from oled_jax.errors import problem_list


def test_one_problem_and_a_few():
    assert problem_list("x", ["a is bad"]) == "x: 1 problem: a is bad"
    assert problem_list("x", ["a", "b"]) == "x: 2 problems: a; b"


def test_thousands_are_counted_and_twenty_are_shown():
    message = problem_list("x", [f"p{i}" for i in range(12_345)])
    assert message.startswith("x: 12345 problems: p0; p1; ")
    assert message.endswith("; p19; and 12325 more")


def test_a_problem_that_quotes_a_whole_file_is_cut():
    message = problem_list("x", ["n" * 1_000_000, "b"])
    assert message == f"x: 2 problems: {'n' * 2000}... (998000 more characters); b"


def test_what_would_break_the_line_or_the_terminal_is_escaped():
    message = problem_list("x", ["a\nb\0c\x1b[2J\ud800 is größer"])
    assert message == "x: 1 problem: a\\nb\\x00c\\x1b[2J\\ud800 is größer"
