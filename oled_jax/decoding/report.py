"""What the host learns from one forward, and how it travels: one small int32 vector in host memory.

One array is one copy and one read, whatever is in it; a dozen small ones would cost the host more than the step's own
dispatch. Floats travel as float16, which is what traces store and what policies round to.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from oled_jax.config import ModelConfig
from oled_jax.decoding.rule import BlockState
from oled_jax.model.experts import LayerTelemetry, expert_counts
from oled_jax.model.numerics import Array
from oled_jax.retention.record import JUST_COMMITTED, MASKED, PROMPT, SETTLED, Routing, StepRecord


class Report(NamedTuple):
    """``record``: the forward as policies and traces see it, its routing over all rows of the batch (B * T tokens).

    ``done [B]`` bool: the block is complete; ``settled [B]`` bool: this forward had the block's final tokens as its
    input, so that they may be committed as they are.
    """

    record: StepRecord
    done: Array
    settled: Array


def status_after(old: BlockState, new: BlockState, mask_id: Array) -> Array:
    """Status ``[B, bl]`` of tokens after a forward that turned ``old`` into ``new``."""
    written = jnp.where(new.tokens != old.tokens, JUST_COMMITTED, SETTLED).astype(jnp.int32)
    return jnp.where(new.fixed, PROMPT, jnp.where(new.tokens == mask_id, MASKED, written))


def record_of(
    forward: Array, records: list[LayerTelemetry], valid: Array, *, of_tokens: dict[str, Array], **of_rows
) -> StepRecord:
    """One forward as retention policies see it; ``of_tokens``, ``[B, T]`` each, are flattened, layers stacked."""

    def over_layers(read: Callable[[LayerTelemetry], Array]) -> Array:
        return jnp.stack([read(record) for record in records])

    layers, count = len(records), valid.size
    row = jnp.where(valid, jnp.arange(valid.shape[0], dtype=jnp.int32)[:, None], -1)
    ids = over_layers(lambda r: r.ids).reshape(layers, count, -1)
    routing = Routing(
        ids=ids,
        weights=over_layers(lambda r: r.weights).reshape(layers, count, -1),
        row=row.reshape(-1),
        **{name: array.reshape(-1) for name, array in of_tokens.items()},
    )
    before, after = over_layers(lambda r: r.before), over_layers(lambda r: r.after)
    return StepRecord(
        forward=forward,
        **of_rows,
        counts=expert_counts(ids, before.shape[-1]),
        resident=before,
        admitted=after & ~before,
        evicted=before & ~after,
        routing=routing,
    )


def packed(report: Report) -> Array:
    """The report as an int32 vector in host memory; for the end of a jitted program."""
    vector = jnp.concatenate([_as_int32(leaf).reshape(-1) for leaf in jax.tree.leaves(report)])
    return jax.device_put(vector, jax.memory.Space.Host)


def unpacked(vector: np.ndarray, config: ModelConfig, batch: int, tokens: int) -> Report:
    """The report, as numpy arrays, of a forward over ``batch`` rows of ``tokens`` tokens."""
    like, place = _layout(config, batch, tokens), 0
    leaves = []
    for leaf in jax.tree.leaves(like):
        part = vector[place : place + leaf.size].reshape(leaf.shape)
        leaves.append(part.astype(np.int16).view(leaf.dtype) if leaf.dtype == np.float16 else part.astype(leaf.dtype))
        place += leaf.size
    assert place == len(vector), "the vector is of another program"
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _as_int32(leaf: Any) -> Array:
    leaf = jnp.asarray(leaf)
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        leaf = lax.bitcast_convert_type(leaf.astype(jnp.float16), jnp.int16)
    return leaf.astype(jnp.int32)


def _layout(config: ModelConfig, batch: int, tokens: int) -> Report:
    """Shapes and dtypes of every field."""
    layers, experts, rows = len(config.moe_layers), config.num_experts, batch * tokens

    def array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, np.dtype(dtype))

    chosen = (layers, rows, config.num_experts_per_tok)
    routing = Routing(
        ids=array(np.int32, *chosen),
        weights=array(np.float16, *chosen),
        row=array(np.int32, rows),
        confidence=array(np.float16, rows),
        status=array(np.int32, rows),
        tokens=array(np.int32, rows),
        candidates=array(np.int32, rows),
    )
    per_row, per_expert = array(np.int32, batch), array(bool, layers, experts)
    record = StepRecord(
        forward=array(np.int32),
        sequence=per_row,
        block=per_row,
        step=per_row,
        phase=per_row,
        counts=array(np.int32, layers, experts),
        resident=per_expert,
        admitted=per_expert,
        evicted=per_expert,
        routing=routing,
    )
    return Report(record, array(bool, batch), array(bool, batch))
