"""What every checkpoint offers, whatever its format, and how all of it is streamed.

Promises: a ``Checkpoint`` that exists is complete (names, shapes and dtypes were checked when it was opened), and
``stream`` never holds more than about three units: the one in the caller's hands, the next, and while they change
places the one after. Arrays belong to whoever receives them; nothing keeps or reuses them.

Deliberately not here: where arrays go (the engine, ``oled_jax.convert``).
"""

import abc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from oled_jax.checkpoint.layout import Unit, units
from oled_jax.config import ModelConfig

# progress(done_bytes, total_bytes), called at the start and after each unit.
Progress = Callable[[int, int], None]


class Checkpoint(abc.ABC):
    """An opened checkpoint; use it as a context manager, or ``close`` it.

    ``path`` is its folder, ``format`` "huggingface" or "orbax", ``weight_dtype`` the stored dtype of all weights and
    ``bias_dtype`` that of the routers' ``expert_bias`` (the weights' dtype where the model has no router).
    """

    format: str

    def __init__(self, path: Path, config: ModelConfig, weight_dtype: np.dtype, bias_dtype: np.dtype):
        self.path = path
        self.config = config
        self.weight_dtype = weight_dtype
        self.bias_dtype = bias_dtype
        self._units = tuple(units(config, weight_dtype, bias_dtype))
        self.total_bytes = sum(unit.nbytes for unit in self._units)

    def units(self) -> tuple[Unit, ...]:
        """All units, in the order in which streaming reads them."""
        return self._units

    @abc.abstractmethod
    def read(self, unit: Unit) -> list[np.ndarray]:
        """One new C-contiguous array per piece of ``unit``: the piece's shape, the stored dtype, the target's layout.

        Threads may read at the same time. Raises CheckpointError when the files no longer hold what they did.
        """

    @abc.abstractmethod
    def fingerprint(self) -> str:
        """Hex digest of the config and of every weight file's name, size and time of change: same digest, same data."""

    @abc.abstractmethod
    def describe(self) -> dict[str, Any]:
        """Facts on how the data are stored: "layout" in words, "files" and "stored_tensors" as counts."""

    @abc.abstractmethod
    def close(self) -> None:
        """Releases the open files; closing twice is allowed."""

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def stream(
    checkpoint: Checkpoint, progress: Progress | None = None, *, units: Sequence[Unit] | None = None
) -> Iterator[tuple[Unit, list[np.ndarray]]]:
    """Yields every unit with its arrays, reading one unit ahead in a thread.

    ``units`` names the units to read where not all are wanted; the bytes of the others then count as done, so that
    ``progress`` always ends at ``checkpoint.total_bytes``. Raises what ``Checkpoint.read`` raises.
    """
    wanted = checkpoint.units() if units is None else units
    total = checkpoint.total_bytes
    done = total - sum(unit.nbytes for unit in wanted)
    if progress is not None:
        progress(done, total)
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="oled-read") as pool:
        upcoming = iter(wanted)
        unit = next(upcoming, None)
        pending = pool.submit(checkpoint.read, unit) if unit else None
        while unit is not None and pending is not None:
            arrays = pending.result()
            following = next(upcoming, None)
            pending = pool.submit(checkpoint.read, following) if following else None
            yield unit, arrays
            del arrays
            done += unit.nbytes
            if progress is not None:
                progress(done, total)
            unit = following
