"""The seam between the model and the placement of its experts.

The model computes *which* experts a token needs and with what weight; an ``ExpertRunner`` computes what they give.
Everything about where expert weights live is behind it. A runner is a frozen, hashable object without arrays; its
arrays are two pytrees that travel through the jitted step as arguments: ``store`` is only read (weights on the device,
or the bank in host memory), ``state`` is donated and comes back (slots, maps, priorities).
"""

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from oled_jax.model.numerics import Array, product, rounded, swiglu


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExpertWeights:
    """Some or all experts of one layer: ``gate_up [S, 2I, H]`` (gate rows, then up rows) and ``down [S, I, H]``.

    Two arrays, not one: the first product is then a single plain matmul over all S experts (spec/jax_practice 3.2).
    """

    gate_up: Array
    down: Array


class ExpertRunner(Protocol):
    """Runs routed experts; implementations live in ``oled_jax.offload``. Pure and jittable, no host in it."""

    def init(self, weights: dict[int, ExpertWeights]) -> tuple[Any, Any]:
        """Takes the experts of each MoE layer, by layer index, over into ``(store, state)``."""
        ...

    def for_prefill(self) -> "ExpertRunner":
        """The runner to use with many tokens at once, over the same store and state."""
        ...

    def run(self, store: Any, state: Any, layer: int, x: Array, ids: Array, weights: Array) -> tuple[Array, Any, Any]:
        """Computes the routed part of one MoE layer: ``(y [T, H], state, telemetry)``.

        ``x [T, H]``, ``ids [T, K]`` int32 with -1 in rows that do not count (zero output, no demand), ``weights
        [T, K]`` float32. ``y`` is rounded once, after a float32 sum in the order of ``ids``.
        """
        ...


def expert_outputs(x: Array, experts: ExpertWeights) -> Array:
    """Every expert's output for every token, ``[S, T, H]`` in ``x``'s dtype; ``x [T, H]``.

    All S experts are read whether or not a token wants them: at block sizes the time goes to reading weights, and one
    matmul over all of them reads fastest (spec/jax_practice 3.2).
    """
    slots, double_width, hidden = experts.gate_up.shape
    projected = product("th,rh->tr", x, experts.gate_up.reshape(slots * double_width, hidden))
    gate, up = jnp.split(rounded(projected, x.dtype).reshape(-1, slots, double_width), 2, axis=-1)
    return rounded(product("tsi,sih->sth", swiglu(gate, up), experts.down), x.dtype)


def gather_chosen(outputs: Array, rows: Array) -> Array:
    """What each token's chosen experts gave, ``[T, K, H]``, out of ``outputs [S, T, H]``.

    ``rows [T, K]`` names each chosen expert's row in ``outputs``; what stands at -1 means nothing.
    """
    return outputs[jnp.maximum(rows, 0), jnp.arange(rows.shape[0])[:, None]]


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
