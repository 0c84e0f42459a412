"""The destination of a conversion: a folder that is either absent, or under work at ``DST.partial``, or complete.

Promises: nothing exists under the destination's name before everything is written; a conversion that was killed,
interrupted or ran out of disk resumes from what it had finished, but only if source, command and settings are the same;
two conversions never work on one destination at the same time.

Deliberately not here: what is written (``to_orbax``, ``to_hf``).
"""

import errno
import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import Any

from oled_jax.checkpoint import PARTIAL_RECORD, PARTIAL_SUFFIX, Checkpoint
from oled_jax.errors import CheckpointError

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
    if source.resolve() == destination.resolve():
        raise CheckpointError(f"{destination} is both source and destination: name another destination")
    if os.path.lexists(destination):
        raise CheckpointError(f"{destination} exists: nothing is overwritten; delete it or name another destination")
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
        wanted = {"command": command, "settings": settings, "fingerprint": source.fingerprint()}
        self._resumes = self.work.exists()
        if self._resumes:
            self._check_record(wanted)
        else:
            self.work.mkdir(parents=True)
            self._write_record(wanted)
        self._lock = os.open(self._record, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise CheckpointError(f"{self.work} is in use: another conversion is writing it") from None

    def check_space(self, remaining_bytes: int) -> None:
        """Raises CheckpointError unless the disk has room for what is still to be written."""
        needed = remaining_bytes + sum(file.stat().st_size for file in companions(self.source.path))
        available = shutil.disk_usage(self.work).free
        if needed > available:
            if not self._resumes:  # nothing is in it yet, and nothing half-written stays behind
                shutil.rmtree(self.work)
            raise CheckpointError(
                f"not enough disk space for {self.destination}: {needed:,} bytes are needed and {available:,} "
                f"available; free {needed - available:,} more"
            )

    def copy_companions(self) -> None:
        """Copies config, tokenizer, chat template and the like, byte for byte."""
        for file in companions(self.source.path):
            shutil.copyfile(file, self.work / file.name)

    def finish(self) -> None:
        """Gives the complete folder its name."""
        check_destination(self.source.path, self.destination)
        os.rename(self.work, self.destination)
        (self.destination / PARTIAL_RECORD).unlink()

    def __enter__(self) -> "Staging":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        os.close(self._lock)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CheckpointError(
                f"the disk is full: {self.destination} was not created; finished work is kept in {self.work}, so free "
                "some space and run the same command again, or delete it"
            ) from None

    def _write_record(self, wanted: dict[str, Any]) -> None:
        temporary = self._record.with_name(PARTIAL_RECORD + ".tmp")
        try:
            temporary.write_text(json.dumps(wanted, indent=1))
            temporary.replace(self._record)
        except BaseException:
            shutil.rmtree(self.work)  # a folder without a record could never be resumed
            raise

    def _check_record(self, wanted: dict[str, Any]) -> None:
        try:
            found = json.loads(self._record.read_text())
        except (OSError, ValueError):
            raise CheckpointError(f"{self.work} exists and is no unfinished conversion: delete or move it") from None
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
    """The files of a checkpoint folder that are copied along, sorted by name."""
    found = {file for pattern in COMPANIONS for file in folder.glob(pattern) if file.is_file()}
    return sorted(found)
