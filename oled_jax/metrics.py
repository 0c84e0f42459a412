"""Every number the system reports about itself, in one place; serialises to JSON.

Times are wall-clock seconds of this process. Compilation is kept apart, so that a rate is never that of a compiler.
"""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class GenerationMetrics:
    """What one generated sequence cost. In a batch, times are those of the whole batch.

    ``num_forwards`` counts the denoising forwards that the decoding rule consumed (as the reference counts them),
    ``num_commits`` the forwards that only rewrote the KV of a finished block, ``masks_left`` the masks that decoding
    left in the answer (possible in 2.0 when ``steps`` runs out).
    """

    prompt_tokens: int
    generated_tokens: int
    num_forwards: int
    num_commits: int
    num_blocks: int
    masks_left: int
    batch_size: int
    prefill_seconds: float
    decode_seconds: float
    compile_seconds: float

    @property
    def tokens_per_forward(self) -> float:
        """Generated tokens per denoising forward."""
        return self.generated_tokens / max(1, self.num_forwards)

    @property
    def ms_per_forward(self) -> float:
        """Milliseconds per forward of the decode phase, commits included."""
        return 1e3 * self.decode_seconds / max(1, self.num_forwards + self.num_commits)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second of decoding (prefill and compilation excluded)."""
        return self.generated_tokens / self.decode_seconds if self.decode_seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        """All fields and the derived rates, ready for ``json.dumps``."""
        rates = ("tokens_per_forward", "ms_per_forward", "tokens_per_second")
        return {**dataclasses.asdict(self), **{name: getattr(self, name) for name in rates}}
