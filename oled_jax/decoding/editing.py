"""LLaDA2.1: filling masks and editing tokens that are already there.

Each forward fills masked positions as 2.0 does and replaces settled positions whose best token differs and is sure
enough; a block ends when a forward without masks changes nothing, or after ``max_post_steps`` such forwards. MASK is
excluded as a candidate, so a block always ends. Prompt positions, and those filled in the same step, are not edited.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from oled_jax.decoding.rule import BlockState, check_common, check_int, check_unit, common_params, stops_when_clean
from oled_jax.decoding.sampling import exclude, greedy, sample, top_positions
from oled_jax.model.numerics import Array


@dataclasses.dataclass(frozen=True)
class Editing:
    """Settings of 2.1 decoding, with the published defaults. ``editing_threshold`` 0 edits whenever the best token
    differs; None switches editing off. Ids that are None come from the checkpoint. OledError for a value out of range.
    """

    block_length: int = 32
    threshold: float = 0.95
    editing_threshold: float | None = 0.9
    max_post_steps: int = 16
    num_to_transfer: int = 1
    eos_early_stop: bool = False
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    mask_id: int | None = None
    eos_id: int | tuple[int, ...] | None = None

    def __post_init__(self):
        check_common(self)
        check_int(self, "max_post_steps", 0)
        check_int(self, "num_to_transfer", 1)
        if self.editing_threshold is not None:
            check_unit(self, "editing_threshold")

    def program(self) -> "EditingProgram":
        """The static half."""
        return EditingProgram(self.block_length, self.temperature > 0)

    def params(self, gen_length: int, vocab_size: int) -> dict[str, Any]:
        """The traced half."""
        editing = np.inf if self.editing_threshold is None else self.editing_threshold
        return {
            **common_params(self, vocab_size),
            "editing_threshold": np.float32(editing),
            "max_post_steps": np.int32(self.max_post_steps),
            "num_to_transfer": np.int32(self.num_to_transfer),
        }

    def stops(self, generated: np.ndarray) -> bool:
        """2.1 stops at an EOS only on request, once no mask is left."""
        return stops_when_clean(self, generated)


@dataclasses.dataclass(frozen=True)
class EditingProgram:
    """See ``oled_jax.decoding.rule.Program``; ``extra`` is the number of forwards without masks, the next included."""

    block_length: int
    sampled: bool

    def enter(self, params: dict[str, Array], tokens: Array, fixed: Array, clean: Array) -> BlockState:
        post = (~jnp.any(tokens == params["mask_id"])).astype(jnp.int32)
        return BlockState.entered(tokens, fixed, post > params["max_post_steps"], clean, post)

    def advance(self, params: dict[str, Array], state: BlockState, logits: Array, key: Array) -> BlockState:
        old = state.tokens
        masked = old == params["mask_id"]
        logits = exclude(logits, params["mask_id"])
        x0, p = sample(logits, params["sampler"], key) if self.sampled else greedy(logits)
        need = params["num_to_transfer"]
        sure = masked & (p > params["threshold"])
        fill = jnp.where(jnp.sum(sure) >= need, sure, top_positions(p, masked, need))
        edit = ~masked & ~state.fixed & (p > params["editing_threshold"]) & (x0 != old)
        tokens = jnp.where(fill | edit, x0, old)
        settled = ~jnp.any(masked) & ~jnp.any(edit)
        post = state.extra + ~jnp.any(tokens == params["mask_id"])
        done = settled | (post > params["max_post_steps"])
        after = {"tokens": tokens, "step": state.step + 1, "done": done, "extra": post}
        return dataclasses.replace(state, **after, candidates=x0, confidence=p)
