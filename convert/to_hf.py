"""Any checkpoint to the published Hugging Face layout: one tensor per expert matrix, in shards of a limited size.

Promises: from a converted folder the published tensors come back bit for bit, whatever layout they were converted
from; shards and index are named as Hugging Face names them; finished shards survive a killed run and are not written
again; a shard appears under its name only when it is complete.

Deliberately not here: the original distribution of tensors over shards, which no reader may depend on.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from oled_jax.checkpoint import Checkpoint, Progress, layout, stream
from oled_jax.checkpoint.huggingface import INDEX_FILE, SINGLE_FILE, transpose_into
from oled_jax.checkpoint.layout import Unit
from oled_jax.checkpoint.safetensors_file import SafetensorsFile, SafetensorsWriter
from oled_jax.convert import published
from oled_jax.convert.staging import Staging
from oled_jax.errors import CheckpointError
from oled_jax.files import write_whole

# Name to dtype and shape of every tensor in a shard.
Shard = dict[str, tuple[np.dtype, tuple[int, ...]]]


def to_hf(source: Checkpoint, destination: Path, max_shard_bytes: int, progress: Progress | None = None) -> None:
    """Writes ``source`` in the published layout; a tensor larger than ``max_shard_bytes`` gets a shard of its own.

    Raises CheckpointError when the destination exists, belongs to other work or does not fit on the disk.
    """
    with Staging(source, destination, "to-hf", {"max_shard_bytes": max_shard_bytes}) as staging:
        shards = plan_shards(source, max_shard_bytes)
        unfinished = {name: shard for name, shard in shards.items() if not _is_finished(staging.work / name, shard)}
        staging.check_space(sum(_shard_bytes(shard) for shard in unfinished.values()), len(unfinished) + 1)
        _write_shards(source, staging.work, unfinished, progress)
        staging.copy_companions()
        if len(shards) > 1:
            _write_index(staging.work, shards)
        staging.finish()


def plan_shards(source: Checkpoint, max_shard_bytes: int) -> dict[str, Shard]:
    """File names and contents of the shards, filled in the order in which the source streams its tensors."""
    shapes = layout.published_shapes(source.config)
    shards: list[Shard] = [{}]
    size = 0
    for name, dtype in _stream_order(source).items():
        nbytes = int(np.prod(shapes[name], dtype=np.int64)) * dtype.itemsize
        if shards[-1] and size + nbytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = (dtype, shapes[name])
        size += nbytes
    if len(shards) == 1:
        return {SINGLE_FILE: shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards, 1)}


def _stream_order(source: Checkpoint) -> dict[str, np.dtype]:
    order: dict[str, np.dtype] = {}
    for unit in source.units():
        for piece in unit.pieces:
            order |= dict.fromkeys(published.names(source.config, piece), piece.target.dtype)
    return order


def _write_shards(source: Checkpoint, folder: Path, shards: Mapping[str, Shard], progress: Progress | None) -> None:
    place = {tensor: name for name, shard in shards.items() for tensor in shard}
    todo = [unit for unit in source.units() if any(name in place for name in _unit_names(source, unit))]
    writers: dict[str, SafetensorsWriter] = {}
    try:
        for unit, arrays in stream(source, progress, units=todo):
            for piece, array in zip(unit.pieces, arrays, strict=True):
                for part in published.parts(source.config, piece, array):
                    if part.name in place:
                        _write_part(folder, place[part.name], shards, writers, part)
    finally:
        for writer in writers.values():
            writer.abandon()


def _write_part(
    folder: Path,
    shard: str,
    shards: Mapping[str, Shard],
    writers: dict[str, SafetensorsWriter],
    part: published.Part,
) -> None:
    if shard not in writers:
        writers[shard] = SafetensorsWriter(folder / shard, shards[shard], {"format": "pt"})
    rows = part.rows
    if not rows.flags.c_contiguous:
        rows = np.empty(part.rows.shape, part.rows.dtype)
        transpose_into(rows, part.rows.T)
    writers[shard].write(part.name, rows, part.start)
    if writers[shard].complete:
        writers.pop(shard).finish()


def _unit_names(source: Checkpoint, unit: Unit) -> list[str]:
    return [name for piece in unit.pieces for name in published.names(source.config, piece)]


def _is_finished(path: Path, shard: Shard) -> bool:
    """True if an earlier run completed this shard; a file that is anything else is written anew."""
    try:
        file = SafetensorsFile(path)
    except CheckpointError:
        return False
    file.close()
    return {name: info.shape for name, info in file.tensors.items()} == {
        name: shape for name, (_, shape) in shard.items()
    }


def _shard_bytes(shard: Shard) -> int:
    return sum(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize for dtype, shape in shard.values())


def _write_index(folder: Path, shards: Mapping[str, Shard]) -> None:
    index = {
        "metadata": {"total_size": sum(_shard_bytes(shard) for shard in shards.values())},
        "weight_map": {tensor: name for name, shard in shards.items() for tensor in shard},
    }
    write_whole(folder / INDEX_FILE, json.dumps(index, indent=2, sort_keys=True) + "\n")
