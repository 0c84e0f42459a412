"""Size and CRC-32 of every file below a folder: taken when the folder is complete, compared before it is used.

Promises: a byte that changed, a file that is missing, cut off or was put there is found, whoever else may or may not
notice; memory stays at a buffer per thread, whatever the files' sizes; no kind of file (pipes, devices) makes it wait.

Why CRC-32: it is the fastest in the standard library that is meant for this (2 to 3 GB/s on one core of a server, the
interpreter free meanwhile; SHA-256 reaches half), and it finds every run of up to 32 damaged bits. It guards against
accidents, not against someone who alters files on purpose.
"""

import os
import re
import zlib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from oled_jax.files import open_regular, sync_file, sync_folder

# Fits the second-level cache, so that the checksum reads what the copy from the page cache has just brought there.
CHUNK_BYTES = 256 * 2**10


class FileSum(NamedTuple):
    """A file's size in bytes and its CRC-32, eight hexadecimal digits."""

    nbytes: int
    crc32: str


# By the file's path below the folder, with slashes.
FileSums = dict[str, FileSum]


def sum_folder(folder: Path) -> FileSums:
    """Brings all files below ``folder`` to the disk and sums them up. OSError where one cannot be read."""
    sums = {}
    for name, size in sorted(_sizes(folder).items()):
        sync_file(folder / name)
        sums[name] = FileSum(size, crc32(folder / name))
    for parent in {(folder / name).parent for name in sums} | {folder}:
        sync_folder(parent)
    return sums


def size_problems(folder: Path, sums: Mapping[str, FileSum]) -> list[str]:
    """Files that are missing, of another size or not listed, in words. Reads no data."""
    found = _sizes(folder)
    problems = [f"{name} is missing" for name in sums if name not in found]
    problems += [f"{name} does not belong there" for name in sorted(found) if name not in sums]
    problems += [
        f"{name} holds {found[name]} bytes of {expected.nbytes}"
        for name, expected in sums.items()
        if name in found and found[name] != expected.nbytes
    ]
    return problems


def content_problems(folder: Path, sums: Mapping[str, FileSum]) -> list[str]:
    """What is wrong with the files, their data included, in words; data are read where the sizes are right."""
    problems = size_problems(folder, sums)
    if problems:
        return problems
    for name, expected in sums.items():
        try:
            found = crc32(folder / name)
        except OSError as error:
            problems.append(f"{name} cannot be read: {error.strerror}")
        else:
            if found != expected.crc32:
                problems.append(f"{name} has the CRC-32 {found}, and {expected.crc32} was written")
    return problems


def crc32(path: Path) -> str:
    """CRC-32 of a regular file in hexadecimal; OSError when it cannot be read."""
    buffer = memoryview(bytearray(CHUNK_BYTES))
    value = 0
    with open(open_regular(path), "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            value = zlib.crc32(buffer[:count], value)
    return f"{value:08x}"


def to_json(sums: Mapping[str, FileSum]) -> dict[str, list[Any]]:
    """As a manifest has them: ``{path: [bytes, crc32]}``."""
    return {name: list(entry) for name, entry in sums.items()}


def from_json(raw: Any) -> FileSums | None:
    """The sums that ``to_json`` turned into ``raw``; None when it is anything else."""
    if not isinstance(raw, dict) or not raw:
        return None
    sums = {}
    for name, entry in raw.items():
        if not isinstance(entry, list) or len(entry) != 2 or not _is_below(name):
            return None
        nbytes, crc = entry
        if type(nbytes) is not int or not isinstance(crc, str) or not re.fullmatch("[0-9a-f]{8}", crc):
            return None
        sums[name] = FileSum(nbytes, crc)
    return sums


def _is_below(name: str) -> bool:
    path = PurePosixPath(name)
    return str(path) == name and not path.is_absolute() and ".." not in path.parts


def _sizes(folder: Path) -> dict[str, int]:
    """Bytes of everything below ``folder`` that is no folder; links that lead nowhere are left out."""
    sizes = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            try:
                sizes[path.relative_to(folder).as_posix()] = path.stat().st_size
            except OSError:
                continue
    return sizes
