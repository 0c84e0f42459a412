"""What a decoding rule is: a frozen dataclass of settings for people, and a pure program for the jitted step.

A *rule* (``Threshold``, ``Editing``, ``Levenshtein``) holds what a user sets, validated when it is made. It splits into
a *program* (hashable, static: only what changes the compiled code) and *parameters* (traced scalars: thresholds, ids,
counts), so that sweeping a threshold compiles nothing. A program advances the block of ONE sequence; the step maps it
over the batch. Its ``BlockState`` says when the block is done, counting exactly as the reference's loop would: a state
that is done before the next forward has not asked for it.

Not here: commits, prompts, several blocks. That is the decoding loop's business.
"""

import dataclasses
import math
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from oled_jax.arguments import integer, is_int, is_number
from oled_jax.decoding.sampling import Sampler
from oled_jax.errors import OledError
from oled_jax.model.numerics import Array
from oled_jax.special_ids import SpecialIds, require


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockState:
    """One block being decoded. ``tokens [bl]`` int32; ``fixed [bl]`` positions of the prompt; ``step`` forwards so far;
    ``done``; ``clean`` no mask is left in earlier generated blocks; ``candidates [bl]`` int32: the token that the
    last forward proposed at each position, written or not, and ``confidence [bl]`` float32: its probability; both -1
    before the first; ``extra`` the rule's own arrays."""

    tokens: Array
    fixed: Array
    step: Array
    done: Array
    clean: Array
    candidates: Array
    confidence: Array
    extra: Any

    @classmethod
    def entered(cls, tokens: Array, fixed: Array, done: Array, clean: Array, extra: Any) -> "BlockState":
        """A block before its first forward."""
        nothing = jnp.full(tokens.shape, -1, jnp.int32)
        return cls(tokens, fixed, jnp.int32(0), done, clean, nothing, nothing.astype(jnp.float32), extra)


class Program(Protocol):
    """The static, jittable half of a rule."""

    block_length: int

    def enter(self, params: dict[str, Array], tokens: Array, fixed: Array, clean: Array) -> BlockState:
        """State of a block that is entered with ``tokens [bl]``, of which ``fixed [bl]`` belong to the prompt."""
        ...

    def advance(self, params: dict[str, Array], state: BlockState, logits: Array, key: Array) -> BlockState:
        """Consumes one forward's ``logits [bl, V]`` float32 and rewrites the block."""
        ...


class Rule(Protocol):
    """The half that users see. Fields whose value is None are found in the checkpoint (``resolved``)."""

    block_length: int
    mask_id: int | None
    eos_id: int | tuple[int, ...] | None
    eos_early_stop: bool

    def program(self) -> Program: ...

    def params(self, gen_length: int, vocab_size: int) -> dict[str, Any]: ...

    def stops(self, generated: np.ndarray) -> bool:
        """Whether generation ends after a block, given all of ``x[P : end of block]``."""
        ...


def resolved(rule: Rule, ids: SpecialIds) -> Rule:
    """``rule`` with ids left None taken from ``ids``; OledError for one that is unknown or out of the vocabulary."""
    if isinstance(rule, type) or not dataclasses.is_dataclass(rule) or not hasattr(type(rule), "program"):
        raise OledError(f"rule is {rule!r}: give a Threshold(...), Editing(...) or Levenshtein(...)")
    fields = {field.name for field in dataclasses.fields(rule)}
    names = [field.name for field in dataclasses.fields(SpecialIds) if field.name in fields]
    given = {name: getattr(rule, name) for name in names if getattr(rule, name) is not None}
    ids = dataclasses.replace(ids, **given)
    return dataclasses.replace(rule, **{name: require(ids, name) for name in names})


def eos_ids(rule: Rule) -> tuple[int, ...]:
    """The stop set of a resolved rule."""
    return rule.eos_id if isinstance(rule.eos_id, tuple) else (rule.eos_id,)


def is_eos(tokens: Array, params: dict[str, Array]) -> Array:
    """Which of ``tokens [T]`` end a sequence."""
    return jnp.any(tokens[:, None] == params["eos_id"], axis=-1)


def stops_when_clean(rule: Rule, generated: np.ndarray) -> bool:
    """2.1's and 2.2's stop: only on request, when no mask is left and an EOS is there."""
    if not rule.eos_early_stop or np.any(generated == rule.mask_id):
        return False
    return bool(np.isin(generated, eos_ids(rule)).any())


def common_params(rule: Rule, vocab_size: int) -> dict[str, Any]:
    """Traced parameters that all rules share."""
    return {
        "mask_id": np.int32(rule.mask_id),
        "eos_id": np.asarray(eos_ids(rule), np.int32),
        "threshold": np.float32(rule.threshold),
        "sampler": Sampler(
            np.float32(rule.temperature or 1.0),
            np.int32(min(rule.top_k or vocab_size, vocab_size)),
            np.float32(1.0 if rule.top_p is None else rule.top_p),
        ),
    }


def check_common(rule: Rule) -> None:
    """Validates what all rules share; OledError names the field, the value and the range."""
    check_int(rule, "block_length", 1)
    if not isinstance(rule.eos_early_stop, bool | np.bool_):
        raise OledError(f"eos_early_stop is {rule.eos_early_stop!r}: give True or False")
    check_unit(rule, "threshold")
    if not is_number(rule.temperature) or not 0 <= rule.temperature < math.inf:
        raise OledError(f"temperature is {rule.temperature!r}: give 0 (greedy) or a finite positive number")
    if rule.top_k is not None:
        check_int(rule, "top_k", 1)
    if rule.top_p is not None and (not is_number(rule.top_p) or not 0 < rule.top_p <= 1):
        raise OledError(f"top_p is {rule.top_p!r}: give a number above 0 and at most 1, or leave it out")
    for name in ("mask_id", "delete_token_id", "split_token_id"):
        if getattr(rule, name, None) is not None:
            check_int(rule, name, 0)
    ids = rule.eos_id if isinstance(rule.eos_id, tuple) else (rule.eos_id,)
    if rule.eos_id is not None and (not ids or not all(is_int(i) and i >= 0 for i in ids)):
        raise OledError(f"eos_id is {rule.eos_id!r}: give a token id or a tuple of them")


def check_int(rule: Rule, name: str, least: int, most: int = 2**31 - 1) -> None:
    """OledError unless field ``name`` is an integer from ``least`` to ``most`` (parameters travel as int32)."""
    integer(name, getattr(rule, name), least, most)


def check_unit(rule: Rule, name: str) -> None:
    """OledError unless field ``name`` is a number in [0, 1]."""
    value = getattr(rule, name)
    if not is_number(value) or not 0 <= value <= 1:
        raise OledError(f"{name} is {value!r}: give a number from 0 to 1")
