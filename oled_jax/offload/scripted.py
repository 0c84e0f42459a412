"""A runner that serves somebody else's routing: what a trace recorded, or what a benchmark made up.

At full geometry with random weights a model's own routing says nothing about locality. Here the ids that the router
chose are replaced, forward by forward, while everything else in the step stays as it is; answers are then meaningless,
loads and times are not. Prefill keeps the router's choice.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from oled_jax.model.experts import ExpertRunner, ExpertWeights, LayerTelemetry, RunnerState
from oled_jax.model.numerics import Array
from oled_jax.retention.record import Routing, StepRecord


@dataclasses.dataclass(frozen=True, eq=False)
class ScriptedRouting:
    """Wraps ``runner``. ``script [F, L, T, K]`` int32 holds the ids of F forwards over L MoE layers, in turn, starting
    anew after the last; T is the number of token rows of a denoising forward (all sequences together)."""

    runner: ExpertRunner
    script: np.ndarray
    prefills: bool = False

    @property
    def slots(self) -> int | None:
        """Of the wrapped runner."""
        return self.runner.slots

    @property
    def policy_label(self) -> str | None:
        """Of the wrapped runner."""
        return self.runner.policy_label

    @property
    def form(self) -> str | None:
        """Of the wrapped runner."""
        return self.runner.form

    def init(self, weights: dict[int, ExpertWeights]) -> tuple[Any, RunnerState]:
        """The wrapped runner's store, with the script beside it."""
        store, state = self.runner.init(weights)
        return {"experts": store, "script": jnp.asarray(self.script)}, state

    def for_prefill(self) -> "ScriptedRouting":
        """Prefill is not scripted."""
        return dataclasses.replace(self, runner=self.runner.for_prefill(), prefills=True)

    def for_batch(self, state: RunnerState, sequences: int, xp: Any) -> RunnerState:
        """As the wrapped runner."""
        return self.runner.for_batch(state, sequences, xp)

    def with_retention(self, state: RunnerState, retention: Any) -> RunnerState:
        """As the wrapped runner."""
        return self.runner.with_retention(state, retention)

    def run(
        self, store: Any, state: RunnerState, layer: int, x: Array, routing: Routing, scale: float
    ) -> tuple[Array, RunnerState, LayerTelemetry]:
        """See ``ExpertRunner.run``; rows that do not count stay so."""
        if not self.prefills:
            forward = state.forward % self.script.shape[0]
            ids = store["script"][forward, sorted(store["experts"]).index(layer)]
            routing = routing._replace(ids=jnp.where(routing.ids >= 0, ids, -1))
        return self.runner.run(store["experts"], state, layer, x, routing, scale)

    def observe(self, state: RunnerState, record: StepRecord) -> RunnerState:
        """As the wrapped runner."""
        return self.runner.observe(state, record)

    def rounds(self, record: StepRecord) -> np.ndarray:
        """As the wrapped runner."""
        return self.runner.rounds(record)
