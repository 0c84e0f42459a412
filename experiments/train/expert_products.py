"""The routed experts in training: all of them over all tokens, or each over the tokens that chose it.

``dense`` is two plain matmuls over all experts; at these widths it trains well, and most of what it computes is
multiplied by zero. ``gathered`` brings the tokens of each expert together, up to a capacity; a token beyond it loses
that expert in this step. Where nothing overflows, both give the same (up to the order of sums).

Elementwise parts are recomputed in the backward pass: what they would keep, in float32, is larger than what the matmuls
read and write. Nothing here scatters, in neither direction.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from oled_jax.model.numerics import Array, swiglu


class Places(NamedTuple):
    """Where (token, expert) pairs go: ``pair [E, C]`` int32, the pair of each slot; ``filled [E, C]``; ``slot [N, K]``
    int32, the slot of each pair, or -1."""

    pair: Array
    filled: Array
    slot: Array


def precision_of(dtype: jnp.dtype) -> lax.Precision | None:
    """Full precision for float32 operands (a GPU would take TF32), the default for bfloat16 ones."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


def dense(x: Array, gates: Array, gate_up: Array, down: Array) -> Array:
    """``sum_e gates[n, e] * expert_e(x[n])``, ``[N, H]``; ``x [N, H]``, ``gates [N, E]`` float32,
    ``gate_up [E, 2I, H]``, ``down [E, I, H]``.

    Gates enter before the second product, which sums over the experts too.
    """
    experts, double_width, hidden = gate_up.shape
    precision = precision_of(x.dtype)
    projected = jnp.einsum("nh,rh->nr", x, gate_up.reshape(experts * double_width, hidden), precision=precision)
    activated = _weighted(projected.reshape(-1, experts, double_width), gates[..., None])
    return jnp.einsum("nr,rh->nh", activated.reshape(len(x), -1), down.reshape(-1, hidden), precision=precision)


def gathered(x: Array, ids: Array, gates: Array, gate_up: Array, down: Array, slots: int) -> tuple[Array, Array]:
    """The same over at most ``slots`` tokens per expert: ``(y [N, H], dropped)``; ``ids [N, K]`` int32 are the experts
    whose ``gates`` are not 0.

    ``dropped`` float32 ``[]``: the share of (token, expert) pairs that found no room; the later tokens lose.
    """
    precision = precision_of(x.dtype)
    places = _places(ids, len(gate_up), slots)
    weights = _spread(_chosen_gates(gates, ids), places)
    projected = jnp.einsum("ech,erh->ecr", _gather(x, places), gate_up, precision=precision)
    outputs = jnp.einsum("eci,eih->ech", _weighted(projected, weights[..., None]), down, precision=precision)
    return _combine(outputs, places), 1.0 - jnp.sum(places.filled) / ids.size


@jax.checkpoint
def _weighted(projected: Array, gates: Array) -> Array:
    gate, up = jnp.split(projected, 2, axis=-1)
    return (swiglu(gate, up).astype(jnp.float32) * gates).astype(projected.dtype)


@jax.checkpoint
def _chosen_gates(gates: Array, ids: Array) -> Array:
    """``gates [N, E]`` at ``ids [N, K]``, compared and not gathered."""
    return jnp.sum(jnp.where(ids[..., None] == jnp.arange(gates.shape[1]), gates[:, None, :], 0.0), axis=-1)


def _places(ids: Array, experts: int, slots: int) -> Places:
    """Sorts the pairs by expert, each expert's in the order of the tokens."""
    flat = ids.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    count = jnp.sum(flat[:, None] == jnp.arange(experts), axis=0, dtype=jnp.int32)
    start = jnp.cumsum(count) - count
    slot = jnp.arange(slots)
    filled = slot < count[:, None]
    pair = jnp.where(filled, order[jnp.minimum(start[:, None] + slot, len(order) - 1)], 0)
    within = jnp.argsort(order) - start[flat]
    place = jnp.where(within < slots, flat * slots + within, -1)
    return Places(pair, filled, place.reshape(ids.shape))


# A gather's own gradient is a scatter-add; here each side of the dispatch is the other's gather.


@jax.custom_vjp
def _gather(x: Array, places: Places) -> Array:
    """Rows of ``x [N, H]`` in their slots, ``[E, C, H]``; 0 in empty ones."""
    token = places.pair // places.slot.shape[1]
    return jnp.where(places.filled[..., None], x[token], 0)


@jax.custom_vjp
def _combine(outputs: Array, places: Places) -> Array:
    """The sum of each token's slots in ``outputs [E, C, H]``, ``[N, H]``."""
    return jnp.sum(_of_pairs(outputs.reshape(-1, outputs.shape[-1]), places).astype(jnp.float32), axis=1).astype(
        outputs.dtype
    )


@jax.custom_vjp
def _spread(values: Array, places: Places) -> Array:
    """A number of each pair, ``values [N, K]``, in the pair's slot, ``[E, C]``."""
    return jnp.where(places.filled, values.reshape(-1)[places.pair], 0)


def _of_pairs(slots: Array, places: Places) -> Array:
    """``slots [E * C, ...]`` by pair, ``[N, K, ...]``; 0 for a pair without a slot."""
    found = slots[jnp.maximum(places.slot, 0)]
    return jnp.where((places.slot >= 0).reshape(*places.slot.shape, *(1,) * (found.ndim - 2)), found, 0)


_gather.defvjp(lambda x, places: (_gather(x, places), places), lambda places, ct: (_combine(ct, places), None))
_combine.defvjp(lambda y, places: (_combine(y, places), places), lambda places, ct: (_gather(ct, places), None))
_spread.defvjp(
    lambda v, places: (_spread(v, places), places), lambda places, ct: (_of_pairs(ct.reshape(-1), places), None)
)
