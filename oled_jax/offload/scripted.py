"""A runner that serves somebody else's routing: what a trace recorded, or what a benchmark made up.

At full geometry with random weights a model's own routing says nothing about locality. Here the ids that the router
chose, and its weights, are replaced, forward by forward, while everything else in the step stays as it is; answers are
then meaningless, loads and times are not. Prefill keeps the router's choice.
"""

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

import jax.numpy as jnp
import numpy as np

from oled_jax.config import ModelConfig
from oled_jax.errors import OledError, problem_list
from oled_jax.model.experts import ExpertRunner, ExpertWeights, LayerTelemetry, RunnerState
from oled_jax.model.numerics import Array
from oled_jax.retention.record import PREFILL, Routing, StepRecord

if TYPE_CHECKING:
    from oled_jax.lab.trace import Trace


@dataclasses.dataclass(frozen=True, eq=False)
class ScriptedRouting:
    """Wraps ``runner``. ``script [F, L, T, K]`` int32 or uint16 holds ids over L MoE layers for F rows of T tokens, T
    being the length of a block; ``weights``, of the same shape, what the router would have given (float16, or uint8 in
    units of 1/255; None keeps the router's own).

    In a batch of B sequences, forward f (prefill counted) serves the rows ``f * B`` to ``f * B + B - 1``, starting anew
    after the last.
    """

    runner: ExpertRunner
    script: np.ndarray
    weights: np.ndarray | None = None
    prefills: bool = False
    routing: ClassVar[str] = "scripted"

    @classmethod
    def of_trace(cls, runner: ExpertRunner, trace: "Trace", config: ModelConfig) -> "ScriptedRouting":
        """The decoding rows of ``trace``, in order; OledError for a trace of another geometry or of prefill alone."""
        sizes = {
            "MoE layers": (trace.num_layers, len(config.moe_layers)),
            "experts per layer": (trace.num_experts, config.num_experts),
            "experts per token": (trace.expert_ids.shape[3], config.num_experts_per_tok),
        }
        problems = [f"{ours} {name}, and the model has {own}" for name, (ours, own) in sizes.items() if ours != own]
        rows = trace.phase > PREFILL
        ids = trace.expert_ids[rows]
        if not len(ids):
            problems.append("no decoding forwards, only prefill")
        elif ids.max() >= trace.num_experts:
            problems.append("tokens without experts in a decoding forward")
        if problems:
            raise OledError(problem_list(f"{trace.source} cannot give the routing, it has", problems))
        return cls(runner, ids, trace.weights[rows])

    @property
    def block_length(self) -> int:
        """T."""
        return self.script.shape[2]

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
        given = None if self.weights is None else jnp.asarray(self.weights)
        return {"experts": store, "script": jnp.asarray(self.script), "weights": given}, state

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
            sequences = routing.ids.shape[0] // self.block_length
            rows = (state.forward * sequences + jnp.arange(sequences)) % self.script.shape[0]
            position = sorted(store["experts"]).index(layer)
            ids = store["script"][rows, position].reshape(routing.ids.shape).astype(jnp.int32)
            routing = routing._replace(ids=jnp.where(routing.ids >= 0, ids, -1))
            if self.weights is not None:
                given = store["weights"][rows, position].reshape(routing.weights.shape).astype(jnp.float32)
                routing = routing._replace(weights=given / 255 if self.weights.dtype == np.uint8 else given)
        return self.runner.run(store["experts"], state, layer, x, routing, scale)

    def observe(self, state: RunnerState, record: StepRecord) -> RunnerState:
        """As the wrapped runner."""
        return self.runner.observe(state, record)

    def rounds(self, record: StepRecord) -> np.ndarray:
        """As the wrapped runner."""
        return self.runner.rounds(record)
