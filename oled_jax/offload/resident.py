"""Full residency: all experts of all layers on the device. The yardstick for every other placement."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from oled_jax.model.experts import (
    ExpertWeights,
    LayerTelemetry,
    combine_chosen,
    expert_outputs,
    gather_chosen,
)
from oled_jax.model.numerics import Array
from oled_jax.retention.record import Routing, StepRecord


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ResidentState:
    """``forward`` int32 ``[]``: how many forwards there were."""

    forward: Array


@dataclasses.dataclass(frozen=True)
class ResidentExperts:
    """Runner that holds every expert on the device; nothing is ever loaded, and no policy has a say."""

    slots: ClassVar[None] = None
    policy_label: ClassVar[None] = None
    form: ClassVar[None] = None
    routing: ClassVar[str] = "router"

    def init(self, weights: dict[int, ExpertWeights]) -> tuple[dict[int, ExpertWeights], ResidentState]:
        """The weights themselves are the store."""
        return weights, ResidentState(jnp.int32(0))

    def for_prefill(self) -> "ResidentExperts":
        """Itself: there is nothing to place."""
        return self

    def for_batch(self, state: ResidentState, sequences: int, xp: Any) -> ResidentState:
        """Nothing is remembered of sequences."""
        return state

    def run(
        self,
        store: dict[int, ExpertWeights],
        state: ResidentState,
        layer: int,
        x: Array,
        routing: Routing,
        scale: float,
    ) -> tuple[Array, ResidentState, LayerTelemetry]:
        """See ``ExpertRunner.run``; an expert's row is its id."""
        num_experts = store[layer].down.shape[0]
        chosen = gather_chosen(expert_outputs(x, store[layer]), routing.ids)
        everyone = jnp.ones(num_experts, bool)
        telemetry = LayerTelemetry(routing.ids, routing.weights, everyone, everyone)
        return combine_chosen(chosen, routing.ids, routing.weights * scale), state, telemetry

    def observe(self, state: ResidentState, record: StepRecord) -> ResidentState:
        """Counts on."""
        return ResidentState(state.forward + 1)

    def rounds(self, record: StepRecord) -> np.ndarray:
        """One product."""
        return np.ones(len(record.counts), np.int32)
