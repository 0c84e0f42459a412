"""From an opened checkpoint to final arrays on the device, unit by unit.

Promises: host memory never holds more than the final arrays (where the device is the host) plus a few units of at most
``layout.UNIT_BYTES``; each final array is allocated once and filled in place. Dtypes change on the device.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from oled_jax.checkpoint import Checkpoint, stream
from oled_jax.checkpoint.layout import down_key, gate_up_key
from oled_jax.checkpoint.layout import targets as layout_targets
from oled_jax.model.experts import ExpertWeights
from oled_jax.model.transformer import LLaDA2


def load_weights(
    checkpoint: Checkpoint,
    dtype: np.dtype,
    progress: Callable[[int, int], None] | None = None,
    *,
    expert_bias_dtype: str = "checkpoint",
) -> tuple[LLaDA2, dict[int, ExpertWeights]]:
    """The model and the experts of each MoE layer, in ``dtype``.

    ``expert_bias`` is held in float32, rounded to bfloat16 first if ``expert_bias_dtype`` says so.

    ``progress(done_bytes, total_bytes)`` is called after each unit, in bytes of the checkpoint.
    """
    config = checkpoint.config
    final = layout_targets(config, dtype, np.dtype(np.float32))
    arrays: dict[str, jax.Array] = {}
    for unit, parts in stream(checkpoint, progress):
        for piece, part in zip(unit.pieces, parts, strict=True):
            target = final[piece.target.key]
            if target.key.endswith(".expert_bias") and expert_bias_dtype == "bfloat16":
                part = part.astype(jnp.bfloat16)
            if piece.rows == target.shape[0]:
                arrays[target.key] = jnp.asarray(part).astype(target.dtype)
                continue
            if target.key not in arrays:
                arrays[target.key] = jnp.zeros(target.shape, target.dtype)
            arrays[target.key] = _place(arrays[target.key], part, piece.start)
    experts = {
        layer: ExpertWeights(arrays.pop(gate_up_key(layer)), arrays.pop(down_key(layer))) for layer in config.moe_layers
    }
    return _assemble(checkpoint, dtype, arrays), experts


def _assemble(checkpoint: Checkpoint, dtype: np.dtype, arrays: dict[str, jax.Array]) -> LLaDA2:
    """The module with ``arrays`` (by path) in place of its parameters; nothing is initialised."""
    graphdef, state = nnx.split(LLaDA2.abstract(checkpoint.config, dtype))
    filled = [(path, leaf.replace(arrays.pop(".".join(map(str, path))))) for path, leaf in nnx.to_flat_state(state)]
    return nnx.merge(graphdef, nnx.from_flat_state(filled))


@partial(jax.jit, donate_argnums=0)
def _place(array: jax.Array, rows: np.ndarray, start: int) -> jax.Array:
    """Writes ``rows`` into ``array`` from row ``start`` on, in place."""
    origin = (start, *[0] * (array.ndim - 1))
    return lax.dynamic_update_slice(array, jnp.asarray(rows).astype(array.dtype), origin)
