"""Compares two checkpoint folders of any formats: the config by meaning, the tensors bit for bit, unit by unit.

Promises: every tensor that differs is reported once, under its published name; memory for a few units only. Dtypes
that differ are differences; tensors are then not compared by value.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from oled_jax.checkpoint import Checkpoint, Progress, stream
from oled_jax.convert import published


def compare(a: Checkpoint, b: Checkpoint, progress: Progress | None = None) -> list[str]:
    """One line per difference; an empty list for equal checkpoints."""
    differences = _config_differences(a, b)
    if a.weight_dtype != b.weight_dtype:
        differences.append(f"weights: {a.weight_dtype} against {b.weight_dtype}")
    if a.bias_dtype != b.bias_dtype:
        differences.append(f"expert biases: {a.bias_dtype} against {b.bias_dtype}")
    if [_geometry(unit) for unit in a.units()] != [_geometry(unit) for unit in b.units()]:
        return differences
    elements: dict[str, list[int]] = {}
    for name, different, total in _tensor_differences(a, b, progress):
        count = elements.setdefault(name, [0, 0])
        count[0] += different
        count[1] += total
    differences += [f"{name}: {n:,} of {total:,} elements differ" for name, (n, total) in elements.items() if n]
    return differences


def _config_differences(a: Checkpoint, b: Checkpoint) -> list[str]:
    pairs = [(f.name, getattr(a.config, f.name), getattr(b.config, f.name)) for f in dataclasses.fields(a.config)]
    return [f"config {name}: {left!r} against {right!r}" for name, left, right in pairs if left != right]


def _geometry(unit) -> list[tuple]:
    return [(piece.target.key, piece.start, piece.shape, piece.target.dtype) for piece in unit.pieces]


def _tensor_differences(a: Checkpoint, b: Checkpoint, progress: Progress | None) -> Iterator[tuple[str, int, int]]:
    """Published name, differing and all elements of every part of every tensor."""
    for (unit, left), (_, right) in zip(stream(a, progress), stream(b), strict=True):
        for piece, x, y in zip(unit.pieces, left, right, strict=True):
            # As integers: NaN equals itself, and the two zeros differ.
            different = x.view(f"u{x.dtype.itemsize}") != y.view(f"u{y.dtype.itemsize}")
            for part in published.parts(a.config, piece, different):
                yield part.name, int(np.count_nonzero(part.rows)), part.rows.size
