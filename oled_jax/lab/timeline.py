"""A machine's clock: what runs where in each step, how long it takes, and when speculative transfers land.

Source: specification, section 5. Dispatch decides (``oled_jax.dispatch``), ``timing`` says how long a layer takes, and
the ``Link`` what speculation does meanwhile: it goes on while the device computes, behind whatever is wanted. That a
predicted expert can be used as soon as it has landed, within the forward too, is generous to every prefetcher alike.
All of it is a model; nothing here was measured.
"""

import dataclasses

import numpy as np

from oled_jax.config import ModelConfig
from oled_jax.dispatch import ALL_DEVICE, TICK, DispatchRule, LayerDemand
from oled_jax.errors import OledError
from oled_jax.lab.keeping import Layers
from oled_jax.lab.link import Claim, Link
from oled_jax.lab.machine import Geometry, Machine
from oled_jax.lab.timing import layer_times, packed_layer_times
from oled_jax.lab.trace import Trace


@dataclasses.dataclass(frozen=True)
class Setup:
    """What a replay is to be timed on: a machine, the model whose experts move, and the dispatch rule."""

    machine: Machine
    config: ModelConfig
    dispatch: DispatchRule = ALL_DEVICE

    def check(self, trace: Trace) -> None:
        """OledError if the trace is of another geometry than the model."""
        model = len(self.config.moe_layers), self.config.num_experts
        if model != (trace.num_layers, trace.num_experts):
            raise OledError(
                f"{trace.source} has {trace.num_layers} layers of {trace.num_experts} experts, but the model "
                f"has {model[0]} of {model[1]}: give the model that the trace was recorded with"
            )

    @property
    def geometry(self) -> Geometry:
        """The model's."""
        return Geometry.of(self.config)

    def full_residency_seconds(self, counts: np.ndarray) -> np.ndarray:
        """What forwards would take with every expert on the device: float64 ``[N]`` of tokens per expert
        ``[N, L, E]``."""
        geometry = self.geometry
        costs = self.machine.layer_costs(geometry, self.config.num_experts)
        nothing = np.zeros((*counts.shape[:2], 1), np.int64)
        hits, tokens = np.count_nonzero(counts, axis=-1), counts.sum(-1, dtype=np.int64)
        times = packed_layer_times(costs, hits=hits, hit_tokens=tokens, fetched=nothing)
        return times.layer.sum(-1) + self.machine.step_seconds(geometry)

    @property
    def activation_bytes(self) -> int:
        """What one token takes to the host and back, for one layer."""
        return 2 * self.config.hidden_size * (2 if self.config.dtype == "bfloat16" else 4)


class Timeline:
    """One replay's clock. For every decoding forward: ``reach`` and ``run`` for its layers, then ``end_forward``.

    With ``stepwise``, ``layers`` is one layer after another and the link carries speculation; else it is all of them at
    once, and nothing but demand is on the link.
    """

    def __init__(self, setup: Setup, capacity: int, *, stepwise: bool):
        geometry = setup.geometry
        self._dispatch = setup.dispatch
        self._costs = setup.machine.layer_costs(geometry, capacity)
        self._rest = setup.machine.step_seconds(geometry)
        self._attention = self._costs.attention * TICK
        self._stepwise = stepwise
        self.link = Link(setup.machine.load_seconds(geometry))
        self._now = self._began = 0.0
        self._exposed = np.zeros(2)

    def reach(self, forward: int, layers: Layers, claim: Claim) -> None:
        """A layer's attention is done, and its experts are about to be looked for."""
        if self._stepwise:
            self._now += self._attention
            self.link.advance(self._now, claim)
            self.link.expire(forward, layers)

    def run(self, demand: LayerDemand, late: np.ndarray, claim: Claim) -> tuple[np.ndarray, np.ndarray]:
        """Serves layers: which misses are fetched, and which experts run on the host; bool, in the shape of ``demand``.

        ``late``: wanted and on the link already.
        """
        dispatch = self._dispatch.split(demand, self._costs, np)
        backlog = max(0.0, self.link.busy_until - self._now) if self._stepwise else 0.0
        times = layer_times(self._costs, demand, dispatch, backlog=backlog, late=late)
        self._exposed += times.exposed_transfer.sum(), times.exposed_host.sum()
        if self._stepwise:
            self.link.demand(self._now, float(times.link))
            self._now += float(times.layer) - self._attention
            self.link.advance(self._now, claim)
        else:
            self._now += float(times.layer.sum())
        return dispatch.to_device, dispatch.to_host

    def end_forward(self, claim: Claim) -> tuple[float, float, float]:
        """What the forward took, and of that what transfers and the host held up: seconds."""
        self._now += self._rest
        if self._stepwise:
            self.link.advance(self._now, claim)
        times = self._now - self._began, *self._exposed.tolist()
        self._began, self._exposed = self._now, np.zeros(2)
        return times
