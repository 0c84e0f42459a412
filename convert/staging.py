"""The destination of a conversion: a folder that is either absent, or under work at ``DST.partial``, or complete.

Promises: nothing exists under the destination's name before everything is written; a conversion that was killed,
interrupted or ran out of disk resumes from what it had finished, but only if source, command and settings are the same;
two conversions never work on one destination at the same time.

Deliberately not here: what is written (``to_orbax``, ``to_hf``).
"""

import contextlib
import errno
import fcntl
import json
import os
import shutil
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from oled_jax.checkpoint import PARTIAL_RECORD, PARTIAL_SUFFIX, Checkpoint
from oled_jax.errors import CheckpointError, problem_list
from oled_jax.files import checked_path, lacking_room, open_regular, read_bytes, sync_folder, write_whole

# What travels along with the weights: everything that tokenising, prompting and the reference class need.
COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "*.py",
    "README.md",
    "LICENSE*",
)


def check_destination(source: Path, destination: Path) -> None:
    """Raises CheckpointError unless a conversion from ``source`` may create ``destination``; creates nothing."""
    source, destination = checked_path(source), checked_path(destination)
    if os.path.realpath(source) == os.path.realpath(destination):
        raise CheckpointError(f"{destination} is both source and destination: name another destination")
    if os.path.lexists(destination):
        raise CheckpointError(f"{destination} exists: nothing is overwritten; delete it or name another destination")
    if destination.name == "..":
        raise CheckpointError(f"{destination} is no name for a new folder: end it in one")
    if destination.name.endswith(PARTIAL_SUFFIX):
        raise CheckpointError(f"{destination} ends in {PARTIAL_SUFFIX}, which marks unfinished work: name it otherwise")


class Staging:
    """The working folder ``work`` of one conversion, locked; a context manager that leaves it for resuming."""

    def __init__(self, source: Checkpoint, destination: Path, command: str, settings: dict[str, Any]):
        """Creates or resumes ``DST.partial``; CheckpointError when it belongs to another conversion."""
        check_destination(source.path, destination)
        self.source = source
        self.destination = destination
        self.work = destination.with_name(destination.name + PARTIAL_SUFFIX)
        self._record = self.work / PARTIAL_RECORD
        self._companions = companions(source.path)
        wanted = {"command": command, "settings": settings, "fingerprint": source.fingerprint()}
        self._lock = self._open_record()
        try:
            self._lock_record()
            # Whoever was killed right at the start has left an empty record, and nothing else.
            self._resumes = os.fstat(self._lock).st_size > 0
            if self._resumes:
                self._check_record(wanted)
            else:
                self._write_record(wanted)
        except BaseException:
            os.close(self._lock)
            raise

    def check_space(self, remaining_bytes: int, remaining_files: int) -> None:
        """Raises CheckpointError unless the disk has room for the bytes and files that are still to be written."""
        needed = remaining_bytes + sum(file.stat().st_size for file in self._companions)
        lacks = lacking_room(self.work, needed, remaining_files + len(self._companions))
        if lacks:
            if not self._resumes:  # nothing is in it yet, and nothing half-written stays behind
                shutil.rmtree(self.work)
            raise CheckpointError(f"not enough disk space for {self.destination}: {lacks}")

    def copy_companions(self) -> None:
        """Copies config, tokenizer, chat template and the like, byte for byte."""
        for file in self._companions:
            write_whole(self.work / file.name, read_bytes(file))

    def finish(self) -> None:
        """Gives the complete folder its name."""
        check_destination(self.source.path, self.destination)
        sync_folder(self.work)
        os.rename(self.work, self.destination)
        (self.destination / PARTIAL_RECORD).unlink()
        sync_folder(self.destination.absolute().parent)

    def __enter__(self) -> "Staging":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        os.close(self._lock)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CheckpointError(
                f"the disk is full: {self.destination} was not created; finished work is kept in {self.work}, so free "
                "some space and run the same command again, or delete it"
            ) from None

    def _open_record(self) -> int:
        """Opens the record, which is empty in a new working folder; CheckpointError for a folder that is none."""
        try:
            self.work.mkdir(parents=True, exist_ok=True)
            if not os.listdir(self.work):
                # Not written under a temporary name: the lock must be on the file that every other run opens.
                return os.open(self._record, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            os.close(open_regular(self._record))
            return os.open(self._record, os.O_RDWR | os.O_CLOEXEC)
        except (FileNotFoundError, FileExistsError):
            raise self._foreign() from None
        except OSError as error:
            with contextlib.suppress(OSError):
                self.work.rmdir()  # which fails unless it is empty
            raise CheckpointError(f"{error.filename or self.work} cannot be opened: {error.strerror}") from None

    def _lock_record(self) -> None:
        """Raises CheckpointError when another conversion has the lock."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The other conversion may have finished after the record was opened, and given the folder its name.
            free = os.path.samestat(os.fstat(self._lock), os.stat(self._record))
        except (BlockingIOError, FileNotFoundError):
            free = False
        except OSError as error:
            raise CheckpointError(f"{self._record} cannot be locked: {error.strerror}") from None
        if not free:
            raise CheckpointError(f"{self.work} is in use: another conversion is writing it")

    def _foreign(self) -> CheckpointError:
        return CheckpointError(f"{self.work} exists and is no unfinished conversion: delete or move it")

    def _write_record(self, wanted: dict[str, Any]) -> None:
        try:
            os.write(self._lock, json.dumps(wanted, indent=1).encode())
            os.fsync(self._lock)
        except BaseException as error:
            shutil.rmtree(self.work)  # nothing half-written stays behind
            if isinstance(error, OSError):
                raise CheckpointError(f"{self._record} cannot be written: {error.strerror}") from None
            raise

    def _check_record(self, wanted: dict[str, Any]) -> None:
        try:
            found = json.loads(read_bytes(self._record))
        except (OSError, ValueError, RecursionError):
            raise self._foreign() from None
        if found != wanted:
            changed = [key for key in wanted if not isinstance(found, dict) or found.get(key) != wanted[key]]
            words = {
                "fingerprint": "a source that was different",
                "command": "another command",
                "settings": "other settings",
            }
            what = " and ".join(words[key] for key in changed) or "another version"
            raise CheckpointError(f"{self.work} is an unfinished conversion with {what}: delete it to start afresh")


def companions(folder: Path) -> list[Path]:
    """The files of a checkpoint folder that are copied along, sorted by name.

    Raises CheckpointError naming those that are no regular files, such as pipes, devices and links that lead nowhere.
    """
    # Not by Path.glob, some versions of which pass over links that lead nowhere.
    found = [file for file in sorted(folder.iterdir()) if any(fnmatchcase(file.name, name) for name in COMPANIONS)]
    found = [file for file in found if not file.is_dir()]
    odd = [file.name for file in found if not file.is_file()]
    if odd:
        problems = [f"{name} is no regular file, or a link to nothing: replace or remove it" for name in odd]
        raise CheckpointError(problem_list(str(folder), problems))
    return found
