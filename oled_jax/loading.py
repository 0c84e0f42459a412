"""From an opened checkpoint to final arrays, on the device or in the expert bank, unit by unit.

Promises: host memory never holds more than the final arrays that live there plus a few units of at most
``layout.UNIT_BYTES``; each array is allocated once and filled in place. An array of the bank is filled on the device
first and moved when it is complete, so the device needs room for the largest of them, and where the device is the host,
host memory does.
"""

import os
from collections.abc import Callable
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from oled_jax.checkpoint import Checkpoint, stream
from oled_jax.checkpoint.layout import Target, down_key, gate_up_key
from oled_jax.checkpoint.layout import targets as layout_targets
from oled_jax.errors import OledError
from oled_jax.model.experts import ExpertWeights
from oled_jax.model.transformer import LLaDA2
from oled_jax.offload.bank import to_bank

ALIGNMENT = 64


class ArrayFill(Protocol):
    """One final array while it is filled, a few rows at a time."""

    def place(self, rows: np.ndarray, start: int) -> None:
        """Writes ``rows`` from row ``start`` on, in the array's dtype."""
        ...

    def finish(self) -> jax.Array:
        """The complete array."""
        ...


class HostFill:
    """Fills host memory that the CPU backend then takes over as it is.

    XLA's own update of a bfloat16 array copies at a few hundred MB/s on a CPU, numpy at memory speed.
    """

    def __init__(self, target: Target):
        # JAX adopts a numpy buffer without a copy only when it is aligned to 64 bytes.
        raw = np.empty(target.nbytes + ALIGNMENT, np.uint8)
        offset = -raw.ctypes.data % ALIGNMENT
        self._buffer = raw[offset : offset + target.nbytes].view(target.dtype).reshape(target.shape)

    def place(self, rows: np.ndarray, start: int) -> None:
        self._buffer[start : start + len(rows)] = rows

    def finish(self) -> jax.Array:
        return jax.device_put(self._buffer)


class DeviceFill:
    """Fills an array in device memory by donated updates; the host holds one unit at a time."""

    def __init__(self, target: Target):
        self._array = jnp.zeros(target.shape, target.dtype)

    def place(self, rows: np.ndarray, start: int) -> None:
        # Waiting keeps the rows of earlier units from piling up in host memory behind an asynchronous queue.
        self._array = _update(self._array, rows, start).block_until_ready()

    def finish(self) -> jax.Array:
        return self._array


def load_weights(
    checkpoint: Checkpoint,
    dtype: np.dtype,
    progress: Callable[[int, int], None] | None = None,
    *,
    expert_bias_dtype: str = "checkpoint",
    bank: bool = False,
) -> tuple[LLaDA2, dict[int, ExpertWeights]]:
    """The model and the experts of each MoE layer, in ``dtype``; the experts on the device, or in pinned host memory
    (``bank``).

    ``expert_bias`` is held in float32, rounded to bfloat16 first if ``expert_bias_dtype`` says so.
    ``progress(done_bytes, total_bytes)`` is called after each unit, in bytes of the checkpoint. OledError when pinned
    host memory runs out; nothing is kept then.
    """
    config = checkpoint.config
    final = layout_targets(config, dtype, np.dtype(np.float32))
    fill = HostFill if backend() == "cpu" else DeviceFill
    filling: dict[str, ArrayFill] = {}
    rows_left = {key: target.shape[0] for key, target in final.items()}
    expert_keys = {key(layer) for layer in config.moe_layers for key in (gate_up_key, down_key)}
    bank_bytes = sum(final[key].nbytes for key in expert_keys)
    arrays: dict[str, jax.Array] = {}
    for unit, parts in stream(checkpoint, progress):
        for piece, part in zip(unit.pieces, parts, strict=True):
            target = final[piece.target.key]
            if target.key.endswith(".expert_bias") and expert_bias_dtype == "bfloat16":
                part = part.astype(jnp.bfloat16)
            if target.key not in filling:
                filling[target.key] = fill(target)
            filling[target.key].place(part, piece.start)
            rows_left[target.key] -= len(part)
            if not rows_left[target.key]:
                array = filling.pop(target.key).finish()
                if bank and target.key in expert_keys:
                    stored = sum(arrays[key].nbytes for key in expert_keys & arrays.keys())
                    array = to_bank(array, target.key, stored, bank_bytes)
                arrays[target.key] = array
    experts = {
        layer: ExpertWeights(arrays.pop(gate_up_key(layer)), arrays.pop(down_key(layer))) for layer in config.moe_layers
    }
    return _assemble(checkpoint, dtype, arrays), experts


def backend() -> str:
    """The platform that JAX runs on; OledError when it can start none (``JAX_PLATFORMS`` names what is absent)."""
    try:
        return jax.default_backend()
    except (RuntimeError, AssertionError) as error:  # some releases of jax only assert here
        wanted = os.environ.get("JAX_PLATFORMS", "")
        raise OledError(
            f"JAX cannot start a backend (JAX_PLATFORMS={wanted!r}): {error or 'no such device or plugin'}; unset "
            f"JAX_PLATFORMS, or install the accelerator's extra, such as oled-jax[cuda13]"
        ) from None


def _assemble(checkpoint: Checkpoint, dtype: np.dtype, arrays: dict[str, jax.Array]) -> LLaDA2:
    """The module with ``arrays`` (by path) in place of its parameters; nothing is initialised."""
    graphdef, state = nnx.split(LLaDA2.abstract(checkpoint.config, dtype))
    filled = [(path, leaf.replace(arrays.pop(".".join(map(str, path))))) for path, leaf in nnx.to_flat_state(state)]
    return nnx.merge(graphdef, nnx.from_flat_state(filled))


@partial(jax.jit, donate_argnums=0)
def _update(array: jax.Array, rows: np.ndarray, start: int) -> jax.Array:
    """Writes ``rows`` into ``array`` from row ``start`` on, in place, converting on the device."""
    origin = (start, *[0] * (array.ndim - 1))
    return lax.dynamic_update_slice(array, jnp.asarray(rows).astype(array.dtype), origin)
