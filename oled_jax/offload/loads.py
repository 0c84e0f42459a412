"""Moving experts from pinned host memory into device rows, and reading single rows; building blocks of the runner.

Promises: a load moves one expert's bytes and nothing else; rows are written in place. Pure and jittable.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from oled_jax.model.experts import ExpertWeights, expert_outputs
from oled_jax.model.numerics import Array
from oled_jax.offload.placement import Placement


def load(slots: ExpertWeights, bank: ExpertWeights, plan: Placement, first: Any, upto: Any) -> ExpertWeights:
    """Loads entries ``first .. upto`` of the plan's order into their rows."""
    return lax.fori_loop(first, upto, lambda i, s: load_one(s, bank, plan.order[i], plan.rows[i]), slots)


def load_one(slots: ExpertWeights, bank: ExpertWeights, expert: Array, row: Array) -> ExpertWeights:
    """One expert from host memory into a row, in place. The slice moves as it is: anything done to it before would be
    computed on the host."""

    def move(rows: Array, experts: Array) -> Array:
        origin = (0,) * (experts.ndim - 1)
        one = lax.dynamic_slice(experts, (expert, *origin), (1, *experts.shape[1:]))
        one = jax.device_put(one, jax.memory.Space.Device)
        return lax.dynamic_update_slice(rows, one, (row, *origin))

    with jax.named_scope("loads"):
        return ExpertWeights(move(slots.gate_up, bank.gate_up), move(slots.down, bank.down))


@partial(jax.jit, donate_argnums=0)
def load_resident(slots: ExpertWeights, bank: ExpertWeights, experts: np.ndarray) -> ExpertWeights:
    """Loads ``experts [n]`` int32 into the first n rows; for the time before the first forward."""
    return lax.fori_loop(0, len(experts), lambda i, s: load_one(s, bank, experts[i], i), slots)


def alone(x: Array, slots: ExpertWeights, row: Array) -> Array:
    """Output ``[T, H]`` of the expert in one row."""
    one = ExpertWeights(*(lax.dynamic_slice_in_dim(a, row, 1) for a in (slots.gate_up, slots.down)))
    return expert_outputs(x, one)[0]


def with_expert(chosen: Array, ids: Array, expert: Array, output: Array) -> Array:
    """``chosen [T, K, H]`` with ``output [T, H]`` wherever a token chose ``expert``."""
    return jnp.where((ids == expert)[..., None], output[:, None, :], chosen)


def look_up(row_of: Array, ids: Array) -> Array:
    """What ``row_of [E]`` says of each chosen expert, ``[T, K]``; -1 where the token does not count."""
    return jnp.where(ids >= 0, row_of[jnp.maximum(ids, 0)], -1)
