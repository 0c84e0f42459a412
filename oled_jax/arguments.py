"""Checks of what callers pass in: an integer where an integer is meant, token ids where token ids are.

Nothing is converted silently: 1.5 is no token, and "12" is not twelve. numpy's integers are integers; booleans are not.
"""

import numbers
from typing import Any

from oled_jax.errors import OledError


def is_int(value: Any) -> bool:
    """Whether ``value`` is an integer, of Python or numpy, and no boolean."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether ``value`` is a real number and no boolean."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def integer(name: str, value: Any, least: int, most: int) -> int:
    """``value`` as an int; OledError naming it unless it is an integer from ``least`` to ``most``."""
    if not is_int(value) or not least <= value <= most:
        raise OledError(f"{name} is {value!r}: give an integer from {least} to {most}")
    return int(value)


def token_ids(name: str, value: Any, vocab_size: int) -> list[int]:
    """``value`` as a list of token ids; OledError unless it is a flat sequence of integers within the vocabulary."""
    try:
        tokens = None if isinstance(value, str | bytes | dict | set) else list(value)
    except TypeError:
        tokens = None
    if tokens is None:
        raise OledError(
            f"{name} is {_short(value)}: give a flat sequence of token ids "
            "(oled_jax.tokenizer.encode_chat makes them from text)"
        )
    for token in tokens:
        if not is_int(token):
            raise OledError(f"{name} holds {_short(token)}: token ids are integers")
        if not 0 <= token < vocab_size:
            raise OledError(f"token id {token} is out of range: the vocabulary has {vocab_size} entries")
    return [int(token) for token in tokens]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
