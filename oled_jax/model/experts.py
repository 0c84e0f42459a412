"""The seam between the model and the placement of its experts.

The model computes *which* experts a token needs and with what weight; an ``ExpertRunner`` computes what they give.
Everything about where expert weights live is behind it. A runner is a frozen, hashable object without arrays; its
arrays are two pytrees that travel through the jitted step as arguments: ``store`` is only read (weights on the device,
or the bank in host memory), ``state`` is donated and comes back (slots, maps, what the retention policy remembers).
"""

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from oled_jax.model.numerics import Array, product, rounded, swiglu
from oled_jax.retention.record import Routing, StepRecord


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExpertWeights:
    """Some or all experts of one layer: ``gate_up [S, 2I, H]`` (gate rows, then up rows) and ``down [S, I, H]``.

    Two arrays, not one: the first product is then a single plain matmul over all S experts.
    """

    gate_up: Array
    down: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerTelemetry:
    """What one MoE layer did in one forward.

    ``ids [T, K]`` int32 and ``weights [T, K]`` float32: the routing as it was served; ``before``, ``after [E]`` bool:
    residents before and after the forward.
    """

    ids: Array
    weights: Array
    before: Array
    after: Array


class RunnerState(Protocol):
    """What every runner's state has: ``forward`` int32 ``[]``, how many forwards it has seen."""

    forward: Array


class ExpertRunner(Protocol):
    """Runs routed experts; implementations live in ``oled_jax.offload``. Pure and jittable, no host in it."""

    def init(self, weights: dict[int, ExpertWeights]) -> tuple[Any, RunnerState]:
        """Takes the experts of each MoE layer, by layer index, over into ``(store, state)``."""
        ...

    def for_prefill(self) -> "ExpertRunner":
        """The runner to use with many tokens at once, over the same store and state."""
        ...

    def for_batch(self, state: RunnerState, sequences: int, xp: Any) -> RunnerState:
        """The state for a new batch of ``sequences`` rows; outside any jitted program."""
        ...

    def run(
        self, store: Any, state: RunnerState, layer: int, x: Array, routing: Routing, scale: float
    ) -> tuple[Array, RunnerState, LayerTelemetry]:
        """Computes the routed part of one MoE layer: ``(y [T, H], state, telemetry)``.

        ``x [T, H]``; ``routing`` of these T tokens, with float32 weights that sum to 1 and ids of -1 in rows that do
        not count (zero output, no demand); ``scale`` multiplies the weights. ``y`` is rounded once, after a float32 sum
        in the order of the ids.
        """
        ...

    def observe(self, state: RunnerState, record: StepRecord) -> RunnerState:
        """Ends a forward, whose outcome is in ``record``; the last thing that a step does with the state."""
        ...

    def rounds(self, record: StepRecord) -> np.ndarray:
        """Products over the slots that the forward of ``record`` (in numpy) took, int32 ``[L]``: 1, unless a layer
        wanted more experts than it has rows."""
        ...


def expert_outputs(x: Array, experts: ExpertWeights) -> Array:
    """Every expert's output for every token, ``[S, T, H]`` in ``x``'s dtype; ``x [T, H]``.

    All S experts are read whether or not a token wants them: at block sizes the time goes to reading weights, and one
    matmul over all of them reads fastest.
    """
    slots, double_width, hidden = experts.gate_up.shape
    with jax.named_scope("products"):
        projected = product("th,rh->tr", x, experts.gate_up.reshape(slots * double_width, hidden))
        gate, up = jnp.split(rounded(projected, x.dtype).reshape(-1, slots, double_width), 2, axis=-1)
        return rounded(product("tsi,sih->sth", swiglu(gate, up), experts.down), x.dtype)


def gather_chosen(outputs: Array, rows: Array) -> Array:
    """What each token's chosen experts gave, ``[T, K, H]``, out of ``outputs [S, T, H]``.

    ``rows [T, K]`` names each chosen expert's row in ``outputs``; what stands at -1 means nothing.
    """
    return outputs[jnp.maximum(rows, 0), jnp.arange(rows.shape[0])[:, None]]


def expert_counts(ids: Array, num_experts: int) -> Array:
    """How many tokens chose each expert, int32 ``[..., E]``; ``ids [..., T, K]``, -1 not counted.

    Compared, not scattered: on a GPU the comparisons fuse with what reads them, a scatter stands alone.
    """
    chosen = ids.reshape(*ids.shape[:-2], -1, 1)
    return jnp.sum(chosen == jnp.arange(num_experts), axis=-2, dtype=jnp.int32)


def combine_chosen(chosen: Array, ids: Array, weights: Array) -> Array:
    """Weighted sum ``[T, H]`` of ``chosen [T, K, H]``, float32 in top-k order, rounded once; ids of -1 count nothing.

    Outputs are kept apart until here so that neither the row nor the round in which an expert was computed can change
    the order of summation. ``ids [T, K]`` int32, ``weights [T, K]`` float32.
    """
    total = jnp.zeros((chosen.shape[0], chosen.shape[2]), jnp.float32)
    for k in range(ids.shape[1]):
        part = weights[:, k, None] * chosen[:, k].astype(jnp.float32)
        total = total + jnp.where(ids[:, k, None] >= 0, part, 0.0)
    return rounded(total, chosen.dtype)
