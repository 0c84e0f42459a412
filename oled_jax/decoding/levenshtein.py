"""LLaDA2.2: filling, substituting, deleting and inserting.

Predicting DELETE removes a token, predicting SPLIT opens a masked slot before it; what follows shifts, the block's
length stays. A state that was seen before is left by re-picking the least confident change (the reference picks one at
random, so seeds could not match anyway). Edits never touch prompt positions. MASK is excluded as a candidate.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from oled_jax.decoding.rule import BlockState, check_common, check_int, check_unit, common_params, stops_when_clean
from oled_jax.decoding.sampling import exclude, greedy, probability, sample, top_positions
from oled_jax.model.numerics import Array

MAX_REPICKS = 5
MAX_STEPS = 100_000  # every state of a block is remembered, so that loops are noticed


@dataclasses.dataclass(frozen=True)
class Levenshtein:
    """Settings of 2.2 decoding, with the published defaults. ``editing_threshold`` None switches edits off. Ids that
    are None come from the checkpoint. OledError for a value out of its range."""

    block_length: int = 32
    steps: int = 32
    threshold: float = 0.5
    editing_threshold: float | None = 0.0
    max_post_steps: int = 16
    max_steps_per_block: int = 1000
    eos_early_stop: bool = False
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    mask_id: int | None = None
    eos_id: int | tuple[int, ...] | None = None
    delete_token_id: int | None = None
    split_token_id: int | None = None

    def __post_init__(self):
        check_common(self)
        check_int(self, "steps", 1)
        check_int(self, "max_post_steps", 0)
        check_int(self, "max_steps_per_block", 1, MAX_STEPS)
        if self.editing_threshold is not None:
            check_unit(self, "editing_threshold")

    def program(self) -> "LevenshteinProgram":
        """The static half."""
        return LevenshteinProgram(self.block_length, self.temperature > 0, self.max_steps_per_block)

    def params(self, gen_length: int, vocab_size: int) -> dict[str, Any]:
        """The traced half."""
        editing = np.inf if self.editing_threshold is None else self.editing_threshold
        return {
            **common_params(self, vocab_size),
            "steps": np.int32(self.steps),
            "editing_threshold": np.float32(editing),
            "max_post_steps": np.int32(self.max_post_steps),
            "delete_id": np.int32(self.delete_token_id),
            "split_id": np.int32(self.split_token_id),
        }

    def stops(self, generated: np.ndarray) -> bool:
        """2.2 stops at an EOS only on request, once no mask is left."""
        return stops_when_clean(self, generated)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class History:
    """2.2's own state.

    ``orig [bl]``: slots that were masked at entry (it travels with the token); ``entry_masks``: their number then;
    ``post``: forwards since the last of them was filled, the next included; ``seen [max_steps, bl]``: states after
    filling and before structural edits, -1 where none yet.
    """

    orig: Array
    entry_masks: Array
    post: Array
    seen: Array


class _Choice(NamedTuple):
    """Anti-loop search: the state under trial, and what has been ruled out so far."""

    tokens: Array
    tries: Array
    positions: Array
    excluded: Array


@dataclasses.dataclass(frozen=True)
class LevenshteinProgram:
    """See ``oled_jax.decoding.rule.Program``; ``extra`` is a ``History``. ``fixed`` is by value at entry, as in the
    reference: whatever is not MASK then is never edited."""

    block_length: int
    sampled: bool
    max_steps: int

    def enter(self, params: dict[str, Array], tokens: Array, fixed: Array, clean: Array) -> BlockState:
        orig = tokens == params["mask_id"]
        count = jnp.sum(orig, dtype=jnp.int32)
        seen = jnp.full((self.max_steps, self.block_length), -1, jnp.int32)
        history = History(orig, count, jnp.int32(0), seen)
        return BlockState.entered(tokens, ~orig, count == 0, clean, history)

    def advance(self, params: dict[str, Array], state: BlockState, logits: Array, key: Array) -> BlockState:
        h, old = state.extra, state.tokens
        logits = exclude(logits, params["mask_id"])
        masked = (old == params["mask_id"]) & ~state.fixed
        x0, p = self._candidates(params, logits, masked, key)

        fill = self._fill(params, state, masked, p)
        edit = ~masked & ~state.fixed & (p > params["editing_threshold"]) & (x0 != old)
        open_orig = h.orig & masked
        limit = params["max_post_steps"]
        final = (limit > 0) & (h.post >= limit)
        final |= (limit == 0) & jnp.any(open_orig) & ~jnp.any(open_orig & ~fill)
        fill = jnp.where(final, masked, fill)
        plain, _ = greedy(exclude(exclude(logits, params["delete_id"]), params["split_id"]))
        structural = (x0 == params["delete_id"]) | (x0 == params["split_id"])
        x0 = jnp.where(final & structural, plain, x0)

        write = fill | edit
        new = jnp.where(write, x0, old)
        new = jnp.where(final | ~jnp.any(write), new, _leave_loop(h.seen, old, new, p, logits))
        seen = h.seen.at[state.step].set(new)
        tokens, orig = _restructure(params, state.fixed, old, new, h.orig)
        stable = jnp.all(tokens == old) & ~jnp.any(tokens == params["mask_id"])
        state = dataclasses.replace(state, tokens=tokens, step=state.step + 1, candidates=x0, confidence=p)
        return self._before_next(params, state, dataclasses.replace(h, orig=orig, seen=seen), stable)

    def _candidates(self, params, logits: Array, masked: Array, key: Array) -> tuple[Array, Array]:
        """Greedy candidates; above temperature 0 masked positions draw theirs, with unfiltered probabilities."""
        x0, p = greedy(logits)
        if not self.sampled:
            return x0, p
        drawn, _ = sample(logits, params["sampler"], key)
        return jnp.where(masked, drawn, x0), jnp.where(masked, probability(logits, drawn), p)

    def _fill(self, params, state: BlockState, masked: Array, p: Array) -> Array:
        """Which masks to fill: the schedule's share of the original ones and all that edits have opened."""
        h, steps = state.extra, params["steps"]
        opened = jnp.sum(masked & ~h.orig)
        need = h.entry_masks // steps + (state.step < h.entry_masks % steps) + opened
        sure = masked & (p > params["threshold"])
        scheduled = jnp.where(jnp.sum(sure) >= need, sure, top_positions(p, masked, need))
        return jnp.where(state.step < steps, scheduled, masked)

    def _before_next(self, params, state: BlockState, h: History, stable: Array) -> BlockState:
        """The checks that the reference makes before its next forward."""
        masked = (state.tokens == params["mask_id"]) & ~state.fixed
        post = jnp.where(jnp.any(h.orig & masked), 0, h.post + 1)
        spent = ~jnp.any(masked) & (post > params["max_post_steps"])
        done = stable | spent | (state.step >= self.max_steps)
        return dataclasses.replace(state, done=done, extra=dataclasses.replace(h, post=post))


def _leave_loop(seen: Array, old: Array, new: Array, p: Array, logits: Array) -> Array:
    """``new``, or the first state not in ``seen`` that re-picking the least confident changes leads to."""

    def known(tokens: Array) -> Array:
        return jnp.any(jnp.all(seen == tokens, axis=-1))

    def go_on(choice: _Choice) -> Array:
        return (choice.tries < MAX_REPICKS) & known(choice.tokens) & jnp.any(choice.tokens != old)

    def repick(choice: _Choice) -> _Choice:
        position = jnp.argmin(jnp.where(choice.tokens != old, p, jnp.inf))
        positions = choice.positions.at[choice.tries].set(position)
        excluded = choice.excluded.at[choice.tries].set(choice.tokens[position])
        row = logits[position]
        ruled_out = jnp.where(positions == position, excluded, -1)
        row = jnp.where(jnp.any(jnp.arange(row.shape[0])[:, None] == ruled_out, axis=-1), -jnp.inf, row)
        tokens = choice.tokens.at[position].set(jnp.argmax(row).astype(jnp.int32))
        return _Choice(tokens, choice.tries + 1, positions, excluded)

    nothing = jnp.full((MAX_REPICKS,), -1, jnp.int32)
    return jax.lax.while_loop(go_on, repick, _Choice(new, jnp.int32(0), nothing, nothing)).tokens


def _restructure(params, fixed: Array, old: Array, new: Array, orig: Array) -> tuple[Array, Array]:
    """Carries out DELETE and SPLIT: tokens ``[bl]`` and the original-mask flags that moved with them."""
    length = old.shape[0]
    delete = (new == params["delete_id"]) & ~fixed
    split = (new == params["split_id"]) & ~fixed
    emitted = jnp.where(delete, 0, jnp.where(split, 2, 1))
    place = jnp.cumsum(emitted) - 1  # of each position's last (for most, only) token
    place = jnp.where(delete, length, place)
    value = jnp.where(fixed | split, old, new)
    tokens = jnp.full((length,), params["mask_id"]).at[place].set(value, mode="drop")
    flags = jnp.zeros((length,), bool).at[place].set(orig, mode="drop")
    return tokens, flags
