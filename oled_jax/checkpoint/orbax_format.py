"""The converted folder: one small Orbax checkpoint per unit, under a manifest.

    oled_checkpoint.json     format version, dtypes, every unit with its arrays and files, versions, source
    config.json              as published, byte for byte
    tokenizer.json, ...      copied along
    units/<unit name>/       an Orbax ``StandardCheckpointer`` checkpoint: {target key: rows of that target}

Promises: a unit is there whole or not at all (Orbax renames it into place); the manifest is written last, and opening
compares it with the config and with the sizes of the files, all problems in one message; what a unit really holds is
compared again when it is read, since Orbax itself would cast and crop in silence. Arrays are restored as numpy and
touch no device.

Deliberately not here: sharded or remote storage, and detection of flipped bits.
"""

import contextlib
import errno
import hashlib
import importlib.metadata
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from oled_jax.checkpoint.layout import DTYPES, Unit
from oled_jax.checkpoint.reading import Checkpoint
from oled_jax.config import ModelConfig, read_json_object
from oled_jax.errors import CheckpointError, ConfigError, problem_list
from oled_jax.version import __version__

MANIFEST = "oled_checkpoint.json"
UNITS_FOLDER = "units"
VERSION = 1

_PACKAGES = ("orbax-checkpoint", "jax", "numpy")


class OrbaxCheckpoint(Checkpoint):
    """A converted folder. Raises CheckpointError listing everything that is wrong with it."""

    format = "orbax"

    def __init__(self, path: Path, config: ModelConfig):
        self._manifest = _read_manifest(path)
        super().__init__(path, config, DTYPES[self._manifest["weight_dtype"]], DTYPES[self._manifest["bias_dtype"]])
        problems = _manifest_problems(path, self._manifest["units"], self.units())
        if problems:
            raise CheckpointError(problem_list(str(path), problems))
        self._store = UnitStore(path)

    def read(self, unit: Unit) -> list[np.ndarray]:
        return self._store.load(unit)

    def fingerprint(self) -> str:
        manifest = self.path / MANIFEST
        digest = hashlib.sha256((self.path / "config.json").read_bytes())
        digest.update(manifest.read_bytes())
        digest.update(str(manifest.stat().st_mtime_ns).encode())
        return digest.hexdigest()

    def describe(self) -> dict[str, Any]:
        units = self._manifest["units"].values()
        stored = sum(len(unit["arrays"]) for unit in units)
        return {"layout": "experts stacked", "files": sum(unit["files"] for unit in units), "stored_tensors": stored}

    def close(self) -> None:
        self._store.close()


class UnitStore:
    """The ``units`` folder of a converted folder: saves and loads one unit at a time. Loading is safe in threads."""

    def __init__(self, path: Path):
        # Orbax is imported where it is used: it takes seconds, and published folders are read without it.
        import orbax.checkpoint as ocp

        self._folder = (path / UNITS_FOLDER).absolute()
        self._checkpointer = ocp.StandardCheckpointer()
        # An interrupt reaches the main thread only, and Orbax must not see one: cut off inside a save, its threads go
        # on and end in tracebacks when the interpreter does.
        self._saver = ThreadPoolExecutor(max_workers=1, thread_name_prefix="oled-save")

    def finished(self, units: Sequence[Unit]) -> set[str]:
        """Names of those units that are already saved and can be read back; what cannot is removed, to be redone.

        A machine that lost power may have kept a unit's folder and not all of its data.
        """
        names = set()
        for unit in units:
            if not (self._folder / unit.name).is_dir():
                continue
            try:
                self.load(unit)
                names.add(unit.name)
            except CheckpointError:
                shutil.rmtree(self._folder / unit.name)
        return names

    def save(self, unit: Unit, arrays: Sequence[np.ndarray]) -> None:
        """Saves one unit; it exists whole when this returns. A full disk raises OSError with ENOSPC.

        Interrupted, the save is completed all the same, at the latest in ``close``.
        """
        self._saver.submit(self._save, unit, arrays).result()

    def load(self, unit: Unit) -> list[np.ndarray]:
        """The unit's arrays as saved; CheckpointError when they cannot be read or are not what the unit says."""
        place = self._folder / unit.name
        try:
            with _quiet_orbax():
                tree = self._checkpointer.restore(place)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise CheckpointError(f"{place} cannot be restored: {' '.join(str(error).split())[:300]}") from None
        problems = []
        for piece in unit.pieces:
            array = tree.get(piece.target.key)
            if array is None:
                problems.append(f"{piece.target.key} is missing")
            elif array.shape != piece.shape or array.dtype != piece.target.dtype:
                expected = f"{piece.target.dtype}{list(piece.shape)}"
                problems.append(f"{piece.target.key} is {array.dtype}{list(array.shape)}, expected {expected}")
        if problems:
            raise CheckpointError(problem_list(str(place), problems))
        return [tree[piece.target.key] for piece in unit.pieces]

    def remove_leftovers(self) -> None:
        """Removes what killed saves have left: folders that Orbax had not yet renamed."""
        for folder in self._folder.glob("*.orbax-checkpoint-tmp*"):
            shutil.rmtree(folder)

    def close(self) -> None:
        """Completes a running save and ends all threads; closing twice is allowed."""
        self._saver.shutdown()
        self._checkpointer.close()

    def _save(self, unit: Unit, arrays: Sequence[np.ndarray]) -> None:
        self._folder.mkdir(exist_ok=True)
        tree = {piece.target.key: array for piece, array in zip(unit.pieces, arrays, strict=True)}
        try:
            with _quiet_orbax():
                self._checkpointer.save(self._folder / unit.name, tree)
                self._checkpointer.wait_until_finished()
        except (ValueError, RuntimeError) as error:  # what tensorstore makes of every failure of the file system
            if "No space left on device" in str(error) or "Disk quota exceeded" in str(error):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._folder)) from None
            raise


def write_manifest(path: Path, source: Checkpoint) -> None:
    """Writes the manifest of a folder whose units are all saved, which makes it a checkpoint."""
    units = {}
    for unit in source.units():
        files, size = _extent(path / UNITS_FOLDER / unit.name)
        units[unit.name] = {"arrays": _arrays(unit), "files": files, "bytes": size}
    manifest = {
        "version": VERSION,
        "weight_dtype": source.weight_dtype.name,
        "bias_dtype": source.bias_dtype.name,
        "source": {"format": source.format, "fingerprint": source.fingerprint(), "bytes": source.total_bytes},
        "packages": {"oled-jax": __version__, **{name: importlib.metadata.version(name) for name in _PACKAGES}},
        "units": units,
    }
    temporary = path / f"{MANIFEST}.tmp"
    temporary.write_text(json.dumps(manifest))
    temporary.replace(path / MANIFEST)


def _arrays(unit: Unit) -> list[dict[str, Any]]:
    """A unit's pieces as the manifest has them."""
    return [
        {
            "key": piece.target.key,
            "start": piece.start,
            "shape": list(piece.shape),
            "dtype": piece.target.dtype.name,
        }
        for piece in unit.pieces
    ]


def _extent(folder: Path) -> tuple[int, int]:
    """Number and total bytes of the files below a folder."""
    sizes = [file.stat().st_size for file in folder.rglob("*") if file.is_file()]
    return len(sizes), sum(sizes)


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    try:
        manifest = read_json_object(file)
    except ConfigError as error:
        raise CheckpointError(str(error)) from None
    if manifest.get("version") != VERSION:
        raise CheckpointError(
            f"{file} has format version {manifest.get('version')!r}, and this package reads {VERSION}: convert again"
        )
    problems = [
        f"{key} is {manifest.get(key)!r}, expected {' or '.join(DTYPES)}"
        for key in ("weight_dtype", "bias_dtype")
        if manifest.get(key) not in list(DTYPES)  # a list: the value may be unhashable
    ]
    if not isinstance(manifest.get("units"), dict):
        problems.append("units is missing or no JSON object")
    if problems:
        raise CheckpointError(problem_list(str(file), problems))
    return manifest


def _manifest_problems(path: Path, listed: Mapping[str, Any], units: Sequence[Unit]) -> list[str]:
    """Where manifest, config and files contradict each other."""
    problems = []
    expected = {unit.name: _arrays(unit) for unit in units}
    problems += [f"unit {name} is unknown: this model has none of that name" for name in listed if name not in expected]
    for name, arrays in expected.items():
        folder = path / UNITS_FOLDER / name
        entry = listed.get(name)
        if not isinstance(entry, dict):
            problems.append(f"unit {name} is missing from the manifest")
        elif entry.get("arrays") != arrays:
            problems.append(
                f"unit {name} holds {_outline(entry.get('arrays'))}, the config asks for {_outline(arrays)}"
            )
        elif not folder.is_dir():
            problems.append(f"unit {name} is missing: {folder} does not exist")
        elif (extent := _extent(folder)) != (entry.get("files"), entry.get("bytes")):
            told = f"{entry.get('files')} files of {entry.get('bytes')} bytes"
            problems.append(f"unit {name} is damaged: {extent[0]} files of {extent[1]} bytes, the manifest says {told}")
    return problems


def _outline(arrays: Any) -> str:
    """A manifest's arrays in words; it may hold anything."""
    try:
        return ", ".join(f"{a['key']} {a['dtype']}{a['shape']} from row {a['start']}" for a in arrays)
    except (TypeError, KeyError):
        return f"{arrays!r:.100}"


@contextlib.contextmanager
def _quiet_orbax() -> Iterator[None]:
    """Keeps Orbax's own log records off the terminal: it logs a failure three times, with tracebacks, and raises it."""

    def foreign(record: logging.LogRecord) -> bool:
        return f"{os.sep}orbax{os.sep}" not in record.pathname

    logger = logging.getLogger("absl")
    logger.addFilter(foreign)
    try:
        yield
    finally:
        logger.removeFilter(foreign)
