"""Which token ids a checkpoint gives a meaning to: mask, end of sequence, and LLaDA2.2's DELETE and SPLIT.

Promises: every id held by ``SpecialIds`` lies within the vocabulary; an id that nobody told stays None, and ``require``
turns that None into an error that names the flag. Nothing is guessed for a vocabulary that is not the published one.

Where an id comes from, first hit wins (an argument of the caller comes before all of these):

1. ``generation_config.json``, then ``config.json``: the former is what the published models say about stopping.
   An end of sequence may be several ids; LLaDA2.2 lists the end of a role beside the end of the text.
2. for the end of sequence, ``pad_token_id`` of ``config.json``: the published models use one id for both, and name it
   as the padding only.
3. the tokenizer's token: ``<|mask|>``, ``<|endoftext|>``, else what the tokenizer calls its mask or eos token.
4. 156895 and 156892 where the vocabulary has the published 157,184 entries.
"""

import dataclasses
import numbers
from pathlib import Path
from typing import Any

from oled_jax.config import ModelConfig, read_json_object
from oled_jax.errors import OledError, problem_list

PUBLISHED_VOCAB_SIZE = 157184
PUBLISHED_MASK_ID = 156895
PUBLISHED_EOS_ID = 156892

_NAMES = ("mask_id", "eos_id", "delete_token_id", "split_token_id")


@dataclasses.dataclass(frozen=True)
class SpecialIds:
    """Special ids of one vocabulary; None where unknown. ``eos_id`` is the set of ids that end a sequence.

    Raises OledError when an id is no integer or lies outside ``0 .. vocab_size - 1``, so that
    ``dataclasses.replace(ids, mask_id=...)`` checks what a caller overrides.
    """

    mask_id: int | None
    eos_id: tuple[int, ...] | None
    delete_token_id: int | None
    split_token_id: int | None
    vocab_size: int

    def __post_init__(self):
        problems = []
        for name in _NAMES:
            value = getattr(self, name)
            ids = value if isinstance(value, tuple) else () if value is None else (value,)
            for token in ids:
                if isinstance(token, bool) or not isinstance(token, numbers.Integral):
                    problems.append(f"{name} is {token!r}, expected an integer")
                elif not 0 <= token < self.vocab_size:
                    problems.append(
                        f"{name} {token} is outside the vocabulary of {self.vocab_size} tokens "
                        f"(0 to {self.vocab_size - 1})"
                    )
        if problems:
            raise OledError(problem_list("special ids", problems))


def find_special_ids(path: str | Path | None, config: ModelConfig, tokenizer: Any | None) -> SpecialIds:
    """Special ids of the checkpoint folder ``path`` (None: of a model without one), as the module docstring says.

    ``tokenizer`` is what ``oled_jax.tokenizer.load_tokenizer`` returned, or None for a checkpoint without one.
    Raises ConfigError for a ``generation_config.json`` that is no JSON object, OledError for ids that do not fit the
    vocabulary of ``config``.
    """
    generation_file = None if path is None else Path(path) / "generation_config.json"
    generation = read_json_object(generation_file) if generation_file and generation_file.exists() else {}
    published = config.vocab_size == PUBLISHED_VOCAB_SIZE
    mask = _first(
        generation.get("mask_token_id"),
        config.mask_token_id,
        _token_id(tokenizer, "<|mask|>", "mask_token_id"),
        PUBLISHED_MASK_ID if published else None,
    )
    eos = _first(
        generation.get("eos_token_id"),
        config.eos_token_id,
        config.pad_token_id,
        _token_id(tokenizer, "<|endoftext|>", "eos_token_id"),
        PUBLISHED_EOS_ID if published else None,
    )
    return SpecialIds(
        mask_id=mask,
        eos_id=as_id_tuple(eos),
        delete_token_id=_first(generation.get("delete_token_id"), config.delete_token_id),
        split_token_id=_first(generation.get("split_token_id"), config.split_token_id),
        vocab_size=config.vocab_size,
    )


def as_id_tuple(ids: int | list[int] | tuple[int, ...] | None) -> tuple[int, ...] | None:
    """One id or several as a tuple; None stays None."""
    if ids is None:
        return None
    return tuple(ids) if isinstance(ids, list | tuple) else (ids,)


def require(ids: SpecialIds, name: str) -> int | tuple[int, ...]:
    """The id called ``name`` ("mask_id", "eos_id", "delete_token_id", "split_token_id").

    Raises OledError naming the flag and the argument when nothing in the checkpoint says what it is.
    """
    value = getattr(ids, name)
    if value is None:
        words = name.removesuffix("_token_id").removesuffix("_id")
        raise OledError(
            f"{words} id is unknown for a vocabulary of {ids.vocab_size} tokens: "
            f"pass --{name.replace('_', '-')} ({name}=...)"
        )
    return value


def _first(*values: Any) -> Any:
    """The first value that says something; null and an empty list do not."""
    return next((value for value in values if value is not None and value != [] and value != ()), None)


def _token_id(tokenizer: Any | None, token: str, attribute: str) -> int | None:
    if tokenizer is None:
        return None
    return tokenizer.get_vocab().get(token, getattr(tokenizer, attribute))
