"""LLaDA2.0: each forward commits the positions whose confidence exceeds a threshold.

At least ``need[s]`` positions are filled at step s, so a block takes at most ``steps`` forwards. Kept from the
reference: strict comparison, the schedule counted from the full block length, masks that remain when the steps run
out, a model that may predict MASK itself, stopping at the end of a block that holds an EOS. Left out: sampling at
temperature 0, and an EOS that the prompt holds.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from oled_jax.decoding.rule import (
    BlockState,
    check_common,
    check_int,
    common_params,
    eos_ids,
    is_eos,
)
from oled_jax.decoding.sampling import greedy, sample, top_positions
from oled_jax.errors import OledError
from oled_jax.model.numerics import Array


@dataclasses.dataclass(frozen=True)
class Threshold:
    """Settings of 2.0 decoding, with the published defaults. ``temperature`` 0 is greedy; ``top_k`` and ``top_p`` take
    part only above 0. Ids that are None come from the checkpoint. OledError for a value out of its range."""

    block_length: int = 32
    steps: int = 32
    threshold: float = 0.95
    minimal_topk: int = 1
    eos_early_stop: bool = False
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    mask_id: int | None = None
    eos_id: int | tuple[int, ...] | None = None

    def __post_init__(self):
        check_common(self)
        check_int(self, "steps", 1)
        check_int(self, "minimal_topk", 1)

    def program(self) -> "ThresholdProgram":
        """The static half."""
        return ThresholdProgram(self.block_length, self.temperature > 0)

    def params(self, gen_length: int, vocab_size: int) -> dict[str, Any]:
        """The traced half; ``gen_length`` shortens the schedule as in the reference."""
        steps = min(self.steps, gen_length // self.minimal_topk)
        if steps < 1:
            raise OledError(
                f"minimal_topk is {self.minimal_topk}: it must not exceed gen_length, which is {gen_length}"
            )
        early = np.bool_(self.eos_early_stop)
        return {**common_params(self, vocab_size), "steps": np.int32(steps), "eos_early_stop": early}

    def stops(self, generated: np.ndarray) -> bool:
        """2.0 stops after any block that leaves an EOS in the answer."""
        return bool(np.isin(generated, eos_ids(self)).any())


@dataclasses.dataclass(frozen=True)
class ThresholdProgram:
    """See ``oled_jax.decoding.rule.Program``."""

    block_length: int
    sampled: bool

    def enter(self, params: dict[str, Array], tokens: Array, fixed: Array, clean: Array) -> BlockState:
        done = ~jnp.any(tokens == params["mask_id"])
        return BlockState.entered(tokens, fixed, done, clean, ())

    def advance(self, params: dict[str, Array], state: BlockState, logits: Array, key: Array) -> BlockState:
        masked = state.tokens == params["mask_id"]
        x0, p = sample(logits, params["sampler"], key) if self.sampled else greedy(logits)
        steps = params["steps"]
        need = self.block_length // steps + (state.step < self.block_length % steps)
        sure = masked & (p > params["threshold"])
        take = jnp.where(jnp.sum(sure) >= need, sure, top_positions(p, masked, need))
        tokens = jnp.where(take, x0, state.tokens)
        step = state.step + 1
        done = (step >= steps) | ~jnp.any(tokens == params["mask_id"]) | self._ended(params, state, tokens, take)
        return dataclasses.replace(state, tokens=tokens, step=step, done=done, candidates=x0, confidence=p)

    def _ended(self, params: dict[str, Array], state: BlockState, tokens: Array, take: Array) -> Array:
        """An EOS was just filled in and everything generated before the first one is settled."""
        eos = is_eos(tokens, params)
        open_before = jnp.cumsum((tokens == params["mask_id"]) & ~state.fixed) > 0
        first = jnp.argmax(eos & ~state.fixed)
        return params["eos_early_stop"] & jnp.any(eos & take) & state.clean & ~open_before[first]
