"""Host-side bookkeeping of one sequence: its tokens, the active block, and what its next forward is for.

A block is entered with at least one mask (the grid puts none but the first block on the prompt's tail, and that block
is not full), so every block takes a denoising forward. When its rule is done, the block is either committed as it is
(the last forward's input was its final tokens), or rewritten by one more forward first; neither after the last block.
"""

import enum
import math
from collections.abc import Sequence

import numpy as np

from oled_jax.decoding.rule import Rule, eos_ids


class Phase(enum.Enum):
    """What the next forward of a sequence is for."""

    DENOISE = "denoise"
    REWRITE = "rewrite"
    FINISHED = "finished"


class ActiveSequence:
    """One sequence while it is decoded. ``tokens`` holds prompt, answer so far and masks, padded to whole blocks."""

    def __init__(self, prompt: Sequence[int], rule: Rule, gen_length: int):
        self.rule = rule
        self.prompt_length = len(prompt)
        self.end = self.prompt_length + gen_length
        self.num_blocks = math.ceil(self.end / rule.block_length)
        self.tokens = np.full(self.num_blocks * rule.block_length, rule.mask_id, np.int32)
        self.tokens[: self.prompt_length] = prompt
        self.first_block = self.block = self.prompt_length // rule.block_length
        self.phase = Phase.DENOISE
        self.entering = True
        self.block_forwards = self.num_forwards = self.num_commits = 0

    @property
    def start(self) -> int:
        """First position of the active block; everything before it is committed."""
        return self.block * self.rule.block_length

    @property
    def block_tokens(self) -> np.ndarray:
        """View of the active block's tokens ``[bl]``."""
        return self.tokens[self.start : self.start + self.rule.block_length]

    @property
    def prompt_in_block(self) -> int:
        """How many leading tokens of the active block belong to the prompt."""
        return max(0, self.prompt_length - self.start)

    @property
    def clean(self) -> bool:
        """No mask is left in generated blocks before the active one."""
        return not np.any(self.tokens[self.prompt_length : self.start] == self.rule.mask_id)

    def consume(self, tokens: np.ndarray, done: bool) -> bool:
        """Takes one forward's outcome in; True if it completed the active block (whose tokens are then final)."""
        if self.phase is Phase.REWRITE:
            self.num_commits += 1
            self._enter_next()
            return False
        self.num_forwards += 1
        self.block_forwards += 1
        self.block_tokens[:] = tokens
        return done

    def leave_block(self, settled: bool) -> None:
        """Decides what follows a completed block: the end, the next block, or a forward that rewrites this one's KV."""
        so_far = self.tokens[self.prompt_length : self.start + self.rule.block_length]
        if self.block + 1 == self.num_blocks or self.rule.stops(so_far):
            self.phase = Phase.FINISHED
        elif settled:
            self._enter_next()
        else:
            self.phase = Phase.REWRITE

    def _enter_next(self) -> None:
        self.block += 1
        self.block_forwards = 0
        self.phase = Phase.DENOISE
        self.entering = True

    def answer(self) -> np.ndarray:
        """Generated ids, cut at gen_length and after the first EOS (inclusive)."""
        answer = self.tokens[self.prompt_length : self.end]
        ends = np.flatnonzero(np.isin(answer, eos_ids(self.rule)))
        return answer[: ends[0] + 1] if len(ends) else answer
