"""Files and paths as users give them: read only where that ends, written whole or not at all.

Promises: nothing but a regular file is opened for reading (a named pipe waits for a writer, /dev/zero never ends, and
both may stand where a checkpoint's file should); a written file has its name only once its bytes are on the disk; a
path that the file system cannot take is told from one that does not exist.

Deliberately not here: what files hold, and locks.
"""

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from oled_jax.errors import CheckpointError

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def checked_path(path: Any) -> Path:
    """``path`` as a Path; CheckpointError for what is no path, or one with NUL or surrogate characters.

    A surrogate stands for a byte that is no UTF-8: neither Orbax nor JSON can take such a name.
    """
    try:
        text = os.fspath(path)
        if not isinstance(text, str):
            raise TypeError("it is no string")
        if "\0" in text:
            raise ValueError("it holds a NUL character")
        text.encode()
    except UnicodeEncodeError as error:
        reason: Any = f"character {error.start} is no valid Unicode; rename the folder in UTF-8"
    except (TypeError, ValueError) as error:
        reason = error
    else:
        return Path(text)
    shown = ascii(str(path) if isinstance(path, Path) else path)
    raise CheckpointError(f"{shown:.200} cannot be the path of a checkpoint folder: {reason}")


def open_regular(path: str | Path) -> int:
    """Opens a regular file for reading and returns its descriptor; OSError for every other kind of file as well.

    That error's ``strerror`` says what is there. The caller closes the descriptor.
    """
    kind = stat.S_IFMT(os.stat(path).st_mode)
    if kind != stat.S_IFREG:
        raise OSError(None, f"it is {_KINDS.get(kind, 'special')}, not a regular file", str(path))
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def read_bytes(path: str | Path) -> bytes:
    """All of a regular file; OSError as ``open_regular`` raises it."""
    with open(open_regular(path), "rb") as file:
        return file.read()


def temporary_name(path: Path) -> Path:
    """Where the bytes of ``path`` lie while a ``whole_file`` is written."""
    return path.with_name(path.name + ".tmp")


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write: under its ``temporary_name`` (``.tmp`` appended), renamed once it is on the disk.

    After an exception the temporary file is gone; a full disk raises OSError.
    """
    temporary = temporary_name(path)
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes ``content`` as a ``whole_file``."""
    with whole_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def lacking_room(folder: Path, nbytes: int, files: int) -> str | None:
    """What the file system of ``folder`` lacks to take ``files`` more files, ``nbytes`` in all; None if nothing."""
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        return f"{nbytes:,} bytes are needed and {free:,} available; free {nbytes - free:,} more"
    system = os.statvfs(folder)
    if system.f_files and files > system.f_favail:  # some file systems have no such limit and say 0
        return (
            f"{files:,} files (inodes) are needed and {system.f_favail:,} available; delete {files - system.f_favail:,}"
        )
    return None


def sync_file(path: Path) -> None:
    """Has the system bring a file's bytes to the disk; OSError when it cannot."""
    descriptor = open_regular(path)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Has the system bring the names in a folder to the disk, where the file system offers that."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
