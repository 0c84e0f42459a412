"""The expert bank: every routed expert of every layer in pinned host memory, two arrays per layer.

Promises: an array goes into the bank when it is complete, through ``jax.device_put`` with a host memory kind, and what
held it before is gone before the next one does; the same public calls serve CPU, CUDA and TPU. The bank is only read
afterwards. Few large arrays, allocated once: the pinned pool fragments, and pinning is a call into the kernel.

Deliberately not here: reading checkpoints (``oled_jax.loading``), and whether the bank fits (``oled_jax.planner``).
"""

import jax

from oled_jax.errors import OledError
from oled_jax.planner import pinned_pool_advice
from oled_jax.progress import format_bytes


def to_bank(array: jax.Array, name: str, stored: int, total: int) -> jax.Array:
    """``array`` in pinned host memory of its device, and complete there.

    ``stored`` and ``total``: bytes that the bank holds already, and will hold in the end. OledError, naming ``name``
    and how much was missing, when the pinned pool is exhausted.
    """
    device = next(iter(array.devices()))
    sharding = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    try:
        return jax.block_until_ready(jax.device_put(array, sharding))
    except jax.errors.JaxRuntimeError as error:
        text = str(error)
        if "RESOURCE_EXHAUSTED" not in text and "ut of host memory" not in text:
            raise
        missing = format_bytes(total - stored)
        raise OledError(
            f"pinned host memory ran out at {name}, which takes {format_bytes(array.nbytes)}: {format_bytes(stored)} "
            f"of {format_bytes(total)} were stored, {missing} more are needed. {pinned_pool_advice(total)}"
        ) from None
