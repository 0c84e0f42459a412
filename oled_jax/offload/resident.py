"""Full residency: all experts of all layers on the device. The yardstick for every other placement."""

import dataclasses
from typing import Any

from oled_jax.model.experts import ExpertWeights, combine_chosen, expert_outputs, gather_chosen
from oled_jax.model.numerics import Array


@dataclasses.dataclass(frozen=True)
class ResidentExperts:
    """Runner that holds every expert on the device; nothing is ever loaded, so it has no state and no telemetry."""

    def init(self, weights: dict[int, ExpertWeights]) -> tuple[dict[int, ExpertWeights], tuple[()]]:
        """The weights themselves are the store."""
        return weights, ()

    def for_prefill(self) -> "ResidentExperts":
        """Itself: there is nothing to place."""
        return self

    def run(
        self, store: dict[int, ExpertWeights], state: Any, layer: int, x: Array, ids: Array, weights: Array
    ) -> tuple[Array, Any, None]:
        """See ``ExpertRunner.run``; an expert's row is its id."""
        chosen = gather_chosen(expert_outputs(x, store[layer]), ids)
        return combine_chosen(chosen, ids, weights), state, None
