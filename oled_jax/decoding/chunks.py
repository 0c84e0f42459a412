"""How a run of positions is cut into forwards, so that few shapes are compiled and the workspace stays small.

With all experts computed for all tokens of a forward, the workspace grows with tokens times experts; hence chunks of at
most ``PREFILL_TOKENS`` tokens, over all sequences of a batch together.
"""

import dataclasses
import math
from collections.abc import Iterator

from oled_jax.config import ModelConfig

PREFILL_TOKENS = 256


@dataclasses.dataclass(frozen=True)
class ChunkPlan:
    """Chunks start on multiples of ``largest`` and hold ``grid`` times a power of two tokens, ``largest`` at most."""

    grid: int
    largest: int

    @classmethod
    def of(cls, config: ModelConfig, block_length: int, batch: int) -> "ChunkPlan":
        """The plan for ``batch`` sequences: whole blocks, and whole routing windows where the model routes by them."""
        grid = math.lcm(block_length, config.block_size) if config.block_routing else block_length
        largest = grid
        while 2 * largest * batch <= PREFILL_TOKENS:
            largest *= 2
        return cls(grid, largest)

    def chunks(self, length: int) -> Iterator[tuple[int, int]]:
        """``(start, tokens)`` of the forwards that cover ``length`` positions; the last may reach beyond."""
        for start in range(0, length, self.largest):
            tokens = self.grid
            while tokens < min(self.largest, length - start):
                tokens *= 2
            yield start, tokens

    def cache_length(self, context_length: int) -> int:
        """Rows of a cache in which no chunk of a ``context_length`` reaches past the end."""
        return -(-context_length // self.largest) * self.largest
