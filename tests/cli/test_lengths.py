"""Context and answer lengths from what the prompts need."""

import pytest

from oled_jax.cli.lengths import plan_lengths
from oled_jax.errors import OledError


def lengths(*tokens, block_length=32, max_positions=4096, context_length=None, gen_length=None):
    return plan_lengths(
        [(f"prompt {i}", count) for i, count in enumerate(tokens)],
        block_length=block_length,
        max_positions=max_positions,
        context_length=context_length,
        gen_length=gen_length,
    )


def test_context_is_what_the_longest_prompt_needs():
    assert lengths(1, 33, gen_length=64) == (128, [64, 64])
    assert lengths(5) == (2080, [2048])
    assert lengths(5, context_length=100) == (100, [95])
    assert lengths(3000, 10) == (4096, [1096, 2048])
    assert lengths(5, gen_length=95, max_positions=100) == (100, [95])


def test_lengths_that_do_not_fit_are_told_together():
    with pytest.raises(OledError) as raised:
        lengths(10, 100, 80, gen_length=30, context_length=100)
    assert str(raised.value) == (
        "lengths: 2 problems: prompt 1 has 100 tokens and leaves no room in the context of 100; "
        "prompt 2 has 80 tokens, and with --gen-length 30 exceeds the context of 100; "
        "--context-length may go up to 4096"
    )
