"""Two engines of one model side by side: the same prompt, step by step. What ``oled-jax check`` reports.

Logits are compared as long as both engines' blocks hold the same tokens: once one token differs, the engines are asked
different questions. Tolerances are those to which the model itself is held against its reference: float32 logits within
5e-4; bfloat16, which rounds one way in one matrix shape and another way in the next, within 0.13 on average, with the
best token equal at 96 % of the positions.

Deliberately not here: loading (the caller has both engines), and timing.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from oled_jax.decoding.loop import Generation, StepEvent
from oled_jax.decoding.rule import Rule

if TYPE_CHECKING:
    from oled_jax.engine import Engine

FLOAT32_MAX = 5e-4
BFLOAT16_MEAN, BFLOAT16_ARGMAX = 0.13, 0.96


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One prompt's outcome.

    ``tokens``: length of the reference's answer; ``first_difference``: index of the first token that differs (None if
    the answers are equal); ``steps``: denoising forwards of the reference, ``steps_compared`` of which began with equal
    tokens; ``max_logit`` and ``mean_logit``: absolute differences of logits over these; ``argmax_equal``: share of
    positions whose best token is the same; ``differing_step``: the first of these steps whose logits are not equal to
    the bit.
    """

    tokens: int
    first_difference: int | None
    steps: int
    steps_compared: int
    max_logit: float
    mean_logit: float
    argmax_equal: float
    differing_step: int | None

    def problems(self, dtype: Any) -> list[str]:
        """What lies beyond the tolerance of ``dtype``, in words."""
        found = []
        if dtype == np.float32:
            if self.first_difference is not None:
                found.append(f"token {self.first_difference} differs")
            if not self.max_logit <= FLOAT32_MAX:
                found.append(f"logits differ by up to {self.max_logit:.2g}, more than {FLOAT32_MAX:g}")
        else:
            if not self.mean_logit <= BFLOAT16_MEAN:
                found.append(f"logits differ by {self.mean_logit:.2g} on average, more than {BFLOAT16_MEAN:g}")
            if not self.argmax_equal >= BFLOAT16_ARGMAX:
                found.append(f"the best token is equal at {self.argmax_equal:.1%}, less than {BFLOAT16_ARGMAX:.0%}")
        return found


def compare(
    engine: "Engine", reference: "Engine", prompt: Sequence[int], rule: Rule, *, gen_length: int, **options: Any
) -> tuple[Comparison, Generation]:
    """Runs ``prompt`` through both engines; the outcome, and what ``engine`` generated.

    ``options`` as for ``Engine.generate``. The reference's logits are kept meanwhile, one ``[bl, V]`` per forward.
    """
    kept: list[StepEvent] = []
    options = {"gen_length": gen_length, "with_logits": True, **options}
    expected = reference.generate(prompt, rule, on_step=kept.append, **options)
    tally = _Tally(kept)
    ours = engine.generate(prompt, rule, on_step=tally.add, **options)
    differing = [i for i, (a, b) in enumerate(zip(ours.tokens, expected.tokens, strict=False)) if a != b]
    if not differing and len(ours.tokens) != len(expected.tokens):
        differing = [min(len(ours.tokens), len(expected.tokens))]
    comparison = Comparison(
        tokens=len(expected.tokens),
        first_difference=differing[0] if differing else None,
        steps=len(kept),
        steps_compared=tally.steps,
        max_logit=tally.largest,
        mean_logit=tally.total / max(1, tally.numbers),
        argmax_equal=tally.same_best / max(1, tally.positions),
        differing_step=tally.differing_step,
    )
    return comparison, ours


class _Tally:
    """Compares one engine's steps, as they come, with those that the other made before."""

    def __init__(self, expected: list[StepEvent]):
        self._expected = expected
        self._together = True
        self.steps = self.numbers = self.positions = self.same_best = 0
        self.largest = self.total = 0.0
        self.differing_step: int | None = None

    def add(self, event: StepEvent) -> None:
        """Takes the next step in; it counts if all tokens were equal so far."""
        if not self._together or self.steps == len(self._expected):
            return
        other = self._expected[self.steps]
        self._together = (event.block, event.step) == (other.block, other.step)
        if not self._together:
            return
        difference = np.abs(event.logits - other.logits)
        if self.differing_step is None and difference.any():
            self.differing_step = self.steps
        self.steps += 1
        self.numbers += difference.size
        self.total += float(difference.sum(dtype=np.float64))
        self.largest = max(self.largest, float(difference.max()))
        self.positions += len(difference)
        self.same_best += int(np.sum(event.logits.argmax(-1) == other.logits.argmax(-1)))
        self._together = np.array_equal(event.tokens, other.tokens)
