"""Pieces of units, seen as published tensors: the way back from the engine's arrays to the names of a checkpoint.

Promises: views only, nothing is copied. The inverse of what ``oled_jax.checkpoint.huggingface`` does when it reads.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from oled_jax.checkpoint import layout
from oled_jax.checkpoint.layout import Piece
from oled_jax.config import ModelConfig


class Part(NamedTuple):
    """Rows ``start : start + len(rows)`` of the published tensor ``name``; ``rows`` may be a transposed view."""

    name: str
    rows: np.ndarray
    start: int


def parts(config: ModelConfig, piece: Piece, array: np.ndarray) -> Iterator[Part]:
    """The published tensors, or rows of one, that ``piece`` holds; ``array`` are its values."""
    layer = _expert_layer(config, piece.target.key)
    if layer is None:
        yield Part(layout.published_name(piece.target.key), array, piece.start)
        return
    width = config.moe_intermediate_size
    for row, expert in enumerate(range(piece.start, piece.start + piece.rows)):
        if piece.target.key == layout.gate_up_key(layer):
            yield Part(layout.expert_name(layer, expert, "gate_proj"), array[row, :width], 0)
            yield Part(layout.expert_name(layer, expert, "up_proj"), array[row, width:], 0)
        else:
            yield Part(layout.expert_name(layer, expert, "down_proj"), array[row].T, 0)


def names(config: ModelConfig, piece: Piece) -> list[str]:
    """Names of the published tensors of which ``piece`` holds something."""
    placeholder = np.broadcast_to(np.zeros((), piece.target.dtype), piece.shape)
    return [part.name for part in parts(config, piece, placeholder)]


def _expert_layer(config: ModelConfig, key: str) -> int | None:
    """Layer of an expert array's key, None for every other key."""
    if ".mlp.experts." not in key:
        return None
    return next(i for i in config.moe_layers if key in (layout.gate_up_key(i), layout.down_key(i)))
