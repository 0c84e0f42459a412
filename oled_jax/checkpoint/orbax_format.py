"""The converted folder: one small Orbax checkpoint per unit, under a manifest.

    oled_checkpoint.json     format version, dtypes, units with arrays and checksums of their files, packages, source
    config.json              as published, byte for byte
    tokenizer.json, ...      copied along
    units/<unit name>/       an Orbax ``StandardCheckpointer`` checkpoint: {target key: rows of that target}

Promises: a unit is finished when its record is there, with size and checksum of each of its files; the manifest
collects the records and is written last. Opening compares it with the config and with the sizes of the files, all
problems in one message. Before a unit is read its files' checksums are compared: a flipped bit is told by the name of
its file, and Orbax, which answers damage with tracebacks of its own or not at all, never sees one. What a unit really
holds is compared as well, since Orbax would cast and crop in silence. Arrays are restored as numpy and touch no device.

Deliberately not here: sharded or remote storage, checksums of config and tokenizer (people edit those), and repair.
"""

import contextlib
import errno
import hashlib
import importlib.metadata
import itertools
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from oled_jax.checkpoint import checksums
from oled_jax.checkpoint.layout import DTYPES, Unit
from oled_jax.checkpoint.reading import Checkpoint
from oled_jax.config import ModelConfig, read_json_object
from oled_jax.errors import CheckpointError, ConfigError, problem_list
from oled_jax.files import lacking_room, read_bytes, sync_folder, write_whole
from oled_jax.version import __version__

MANIFEST = "oled_checkpoint.json"
UNITS_FOLDER = "units"
VERSION = 2

# The records of an unfinished conversion: per unit one file, whose content becomes the unit's entry in the manifest.
_RECORDS_FOLDER = "unit_records"

# Files and folders that Orbax makes of one unit (14 to 16 were seen), and the record; file systems count them.
FILES_PER_UNIT = 20

# Each compares the files of one unit with their checksums. Loading keeps one busy, resuming has nothing else to do.
_CHECKING_THREADS = 4

# How long writes may go on after Orbax gave up.
_SECONDS_TO_SETTLE = 1.0

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
        self._store = UnitStore(path, self._manifest["units"])
        self._following = {unit.name: following for unit, following in itertools.pairwise(self.units())}

    def read(self, unit: Unit) -> list[np.ndarray]:
        return self._store.load(unit, self._following.get(unit.name))

    def fingerprint(self) -> str:
        manifest = self.path / MANIFEST
        digest = hashlib.sha256(read_bytes(self.path / "config.json"))
        digest.update(read_bytes(manifest))
        digest.update(str(manifest.stat().st_mtime_ns).encode())
        return digest.hexdigest()

    def describe(self) -> dict[str, Any]:
        units = self._manifest["units"].values()
        counts = {part: sum(len(unit[part]) for unit in units) for part in ("files", "arrays")}
        return {"layout": "experts stacked", "files": counts["files"], "stored_tensors": counts["arrays"]}

    def close(self) -> None:
        self._store.close()


class UnitStore:
    """The ``units`` folder of a converted folder: saves and loads one unit at a time. Loading is safe in threads.

    ``recorded`` are the units' entries in a manifest; the records that lie in an unfinished folder go before them.
    """

    def __init__(self, path: Path, recorded: Mapping[str, Any] | None = None):
        # Orbax is imported where it is used: it takes seconds, and published folders are read without it.
        import orbax.checkpoint as ocp

        self._folder = (path / UNITS_FOLDER).absolute()
        self._records = (path / _RECORDS_FOLDER).absolute()
        self._recorded = recorded or {}
        self._checkpointer = ocp.StandardCheckpointer()
        # An interrupt reaches the main thread only, and Orbax must not see one: cut off inside a save, its threads go
        # on and end in tracebacks when the interpreter does.
        self._saver = ThreadPoolExecutor(max_workers=1, thread_name_prefix="oled-save")
        self._checks: dict[str, Future[list[str]]] = {}
        self._checkers = ThreadPoolExecutor(max_workers=_CHECKING_THREADS, thread_name_prefix="oled-check")

    def finished(self, units: Sequence[Unit]) -> set[str]:
        """Names of those units that are saved, every byte as recorded; what else is there is removed, to be redone.

        A machine that lost power may have kept a unit's folder and not all of its data.
        """
        there = [unit for unit in units if (self._folder / unit.name).exists()]
        damaged = [unit for unit, damage in zip(there, self._checkers.map(self._damage, there), strict=True) if damage]
        for unit in damaged:
            self._record(unit).unlink(missing_ok=True)
            shutil.rmtree(self._folder / unit.name)
        return {unit.name for unit in there} - {unit.name for unit in damaged}

    def save(self, unit: Unit, arrays: Sequence[np.ndarray]) -> None:
        """Saves one unit; it is on the disk, with its record, when this returns. A full disk raises OSError (ENOSPC).

        Interrupted, the save is completed all the same, at the latest in ``close``.
        """
        self._saver.submit(self._save, unit, arrays).result()

    def load(self, unit: Unit, following: Unit | None = None) -> list[np.ndarray]:
        """The unit's arrays as saved; CheckpointError when a file was damaged or they are not what the unit says.

        The files of the unit that is probably loaded next, ``following``, are checked meanwhile.
        """
        place = self._folder / unit.name
        check = self._checks.pop(unit.name, None) or self._checkers.submit(self._damage, unit)
        if following is not None:
            self._checks[following.name] = self._checkers.submit(self._damage, following)
        if damage := check.result():
            raise CheckpointError(
                problem_list(f"unit {unit.name} is damaged ({place})", damage)
                + "; convert again, or copy the folder again from where it is whole"
            )
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

    def entry(self, unit: Unit) -> dict[str, Any] | None:
        """What is recorded of a saved unit, as the manifest has it; None where nothing valid is."""
        try:
            entry = read_json_object(self._record(unit))
        except ConfigError:
            entry = self._recorded.get(unit.name)
        valid = isinstance(entry, dict) and entry.get("arrays") == _arrays(unit)
        return entry if valid and checksums.from_json(entry.get("files")) is not None else None

    def remove_leftovers(self) -> None:
        """Removes what killed saves have left: folders that Orbax had not yet renamed."""
        for folder in self._folder.glob("*.orbax-checkpoint-tmp*"):
            shutil.rmtree(folder)

    def remove_records(self) -> None:
        """Removes the records, once a manifest holds them."""
        shutil.rmtree(self._records, ignore_errors=True)

    def close(self) -> None:
        """Completes a running save and ends all threads; closing twice is allowed."""
        self._saver.shutdown()
        self._checkers.shutdown(cancel_futures=True)
        self._checkpointer.close()

    def _record(self, unit: Unit) -> Path:
        return self._records / f"{unit.name}.json"

    def _damage(self, unit: Unit) -> list[str]:
        """Where the unit's files differ from its record, in words."""
        entry = self.entry(unit)
        if entry is None:
            return ["its checksums are not recorded"]
        sums = checksums.from_json(entry["files"])
        return checksums.content_problems(self._folder / unit.name, sums or {})

    def _save(self, unit: Unit, arrays: Sequence[np.ndarray]) -> None:
        self._folder.mkdir(exist_ok=True)
        self._records.mkdir(exist_ok=True)
        # A disk that is full half-way through makes Orbax print tracebacks, and sometimes wait for minutes.
        if lacking_room(self._folder, unit.nbytes, FILES_PER_UNIT):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._folder))
        tree = {piece.target.key: array for piece, array in zip(unit.pieces, arrays, strict=True)}
        try:
            with _quiet_orbax(), _quiet_callbacks():
                self._checkpointer.save(self._folder / unit.name, tree)
                self._checkpointer.wait_until_finished()
        except (ValueError, RuntimeError) as error:  # what tensorstore makes of every failure of the file system
            if "No space left on device" in str(error) or "Disk quota exceeded" in str(error):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._folder)) from None
            raise
        files = checksums.to_json(checksums.sum_folder(self._folder / unit.name))
        sync_folder(self._folder)
        write_whole(self._record(unit), json.dumps({"arrays": _arrays(unit), "files": files}))


def write_manifest(path: Path, source: Checkpoint, store: UnitStore) -> None:
    """Writes the manifest of the folder ``path`` whose units ``store`` has all saved, which makes it a checkpoint.

    The records of the units go into it and are removed.
    """
    manifest = {
        "version": VERSION,
        "weight_dtype": source.weight_dtype.name,
        "bias_dtype": source.bias_dtype.name,
        "source": {"format": source.format, "fingerprint": source.fingerprint(), "bytes": source.total_bytes},
        "packages": {"oled-jax": __version__, **{name: importlib.metadata.version(name) for name in _PACKAGES}},
        "units": {unit.name: store.entry(unit) for unit in source.units()},
    }
    write_whole(path / MANIFEST, json.dumps(manifest))
    store.remove_records()


def recorded_units(path: Path) -> Mapping[str, Any]:
    """The units' entries in the manifest of an unfinished folder; none where there is no manifest of this version.

    A conversion that was killed at its very end has a manifest and may have lost some of its records.
    """
    try:
        return _read_manifest(path)["units"]
    except CheckpointError:
        return {}


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
        elif (sums := checksums.from_json(entry.get("files"))) is None:
            problems.append(f"unit {name} has no valid list of files in the manifest")
        elif not folder.is_dir():
            problems.append(f"unit {name} is missing: {folder} does not exist")
        else:
            problems += [f"unit {name} is damaged: {problem}" for problem in checksums.size_problems(folder, sums)]
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


@contextlib.contextmanager
def _quiet_callbacks() -> Iterator[None]:
    """Drops the tracebacks of writes that were still under way when Orbax failed over another one.

    Orbax then closes its event loop, and tensorstore's threads report that they find it closed, where nobody can catch
    it. All that is to be said is in the exception that Orbax raises. Nothing tells when the last of them has ended, so
    a failure is passed on a little later.
    """
    previous = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if not (unraisable.exc_type is RuntimeError and str(unraisable.exc_value) == "Event loop is closed"):
            previous(unraisable)

    sys.unraisablehook = hook
    try:
        yield
    except BaseException:
        time.sleep(_SECONDS_TO_SETTLE)
        raise
    finally:
        if sys.unraisablehook is hook:
            sys.unraisablehook = previous
