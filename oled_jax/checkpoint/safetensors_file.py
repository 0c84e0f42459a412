"""Safetensors files by byte range: a checked header, positioned reads into given memory, and a streaming writer.

Promises: a header is believed only after it has been checked against the file (all problems of one file in one
message), and no input makes reading raise anything but ``CheckpointError``. Reads go through positioned reads into
memory that the caller allocated, never through a memory map, whose touched pages would count as this process's memory.
A file being written carries a temporary name until its last byte is there.

Deliberately not here: which tensors a model needs (``huggingface``). Reads from several threads are safe; a writer
belongs to one thread.
"""

import itertools
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from oled_jax.errors import CheckpointError, problem_list
from oled_jax.files import open_regular

# Bytes of one element, by the format's name of the dtype. Types narrower than a byte are no weights of ours.
ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
WEIGHT_DTYPES = {"BF16": np.dtype(ml_dtypes.bfloat16), "F32": np.dtype(np.float32)}
_DTYPE_NAMES = {dtype: name for name, dtype in WEIGHT_DTYPES.items()}

# The limit of the reference implementation; beyond it the length is garbage and must not be allocated.
MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a file: ``dtype`` by the format's name ("BF16"), ``offset`` in bytes from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class SafetensorsFile:
    """An open file: ``tensors`` by name, and ``read_into``.

    Raises CheckpointError when the file is no regular one, cannot be opened or its header does not describe it.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        try:
            self._fd = open_regular(self.path)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be opened: {error.strerror}") from None
        try:
            stat = os.fstat(self._fd)
            self.size, self.mtime_ns = stat.st_size, stat.st_mtime_ns
            self.tensors: Mapping[str, TensorInfo] = self._read_header()
        except BaseException:
            self.close()
            raise

    def read_into(self, out: np.ndarray, offset: int) -> None:
        """Fills the C-contiguous ``out`` with the ``out.nbytes`` bytes at ``offset``; CheckpointError if they end."""
        view = _bytes_of(out)
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self._fd, [view[done:]], offset + done)
            except OSError as error:
                raise CheckpointError(f"{self.path} cannot be read at byte {offset + done}: {error.strerror}") from None
            if count == 0:
                raise CheckpointError(
                    f"{self.path} ends at byte {offset + done}, {len(view) - done} bytes short: it changed while in use"
                )
            done += count

    def close(self) -> None:
        """Closes the file; reading afterwards is an error. Closing twice is not."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _read_header(self) -> dict[str, TensorInfo]:
        prefix = np.zeros(8, np.uint8)
        if self.size < 8:
            raise CheckpointError(f"{self.path} is truncated: {self.size} bytes are too few for a safetensors file")
        self.read_into(prefix, 0)
        if bytes(prefix) == b"version ":
            raise CheckpointError(f"{self.path} is a Git LFS pointer, not the data: fetch it with `git lfs pull`")
        length = int(prefix.view("<u8")[0])
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(f"{self.path} is no safetensors file: its header would be {length} bytes long")
        if length > self.size - 8:
            raise CheckpointError(
                f"{self.path} is truncated: its header takes {length} bytes, and {self.size - 8} are left for it"
            )
        raw = np.empty(length, np.uint8)
        self.read_into(raw, 8)
        tensors, problems = parse_header(raw.tobytes(), self.size)
        if problems:
            raise CheckpointError(problem_list(str(self.path), problems))
        return tensors


def parse_header(raw: bytes, file_size: int) -> tuple[dict[str, TensorInfo], list[str]]:
    """The tensors that the JSON header ``raw`` lists, and everything that is wrong with it in a file of that size."""
    data_start = 8 + len(raw)
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        return {}, [f"the header is not valid JSON ({str(error) or type(error).__name__})"]
    if not isinstance(header, dict):
        return {}, ["the header is no JSON object"]
    tensors: dict[str, TensorInfo] = {}
    problems: list[str] = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        info = _parse_entry(name, entry, data_start)
        if isinstance(info, str):
            problems.append(info)
        else:
            tensors[name] = info
    return tensors, problems or _extent_problems(tensors, data_start, file_size)


class SafetensorsWriter:
    """Writes one file whose tensors (name to dtype and shape) are known beforehand and arrive in any order of rows.

    Nothing appears under ``path`` before ``finish``: the bytes go to ``path`` with ``.tmp`` appended. As a context
    manager it finishes, or on an exception removes the temporary file. A full disk raises OSError.
    """

    def __init__(
        self,
        path: str | Path,
        tensors: Mapping[str, tuple[np.dtype, tuple[int, ...]]],
        metadata: Mapping[str, str] | None = None,
    ):
        self.path = Path(path)
        self._temporary = self.path.with_name(self.path.name + ".tmp")
        header, self._offsets = _layout(tensors, metadata)
        self._tensors = dict(tensors)
        self._left = {name: math.prod(shape) * dtype.itemsize for name, (dtype, shape) in tensors.items()}
        self._fd = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            self._write_at(memoryview(header), 0)
        except BaseException:
            self.abandon()
            raise

    @property
    def complete(self) -> bool:
        """True once every byte of every tensor has been written."""
        return not any(self._left.values())

    def write(self, name: str, rows: np.ndarray, start: int = 0) -> None:
        """Writes ``rows`` as rows ``start : start + len(rows)`` (axis 0) of tensor ``name``, of the announced dtype."""
        dtype, shape = self._tensors[name]
        fits = rows.ndim == len(shape) and rows.shape[1:] == shape[1:] and start + rows.shape[0] <= shape[0]
        if rows.dtype != dtype or not fits or rows.nbytes > self._left[name]:
            raise ValueError(f"{name}: {rows.dtype}{list(rows.shape)} at row {start} does not fit {dtype}{list(shape)}")
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        self._write_at(_bytes_of(np.ascontiguousarray(rows)), self._offsets[name] + start * row_bytes)
        self._left[name] -= rows.nbytes

    def finish(self) -> None:
        """Makes the file durable and gives it its name; ValueError if a tensor is not complete."""
        if not self.complete:
            raise ValueError(f"{self.path}: incomplete: {[name for name, left in self._left.items() if left][:5]}")
        os.fsync(self._fd)
        os.close(self._fd)
        self._fd = -1
        os.replace(self._temporary, self.path)

    def abandon(self) -> None:
        """Removes what was written so far; does nothing after ``finish``."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._temporary.unlink(missing_ok=True)

    def __enter__(self) -> "SafetensorsWriter":
        return self

    def __exit__(self, kind, value, traceback) -> None:
        if kind is None:
            self.finish()
        else:
            self.abandon()

    def _write_at(self, view: memoryview, offset: int) -> None:
        done = 0
        while done < len(view):
            done += os.pwrite(self._fd, view[done:], offset + done)


def _layout(
    tensors: Mapping[str, tuple[np.dtype, tuple[int, ...]]], metadata: Mapping[str, str] | None
) -> tuple[bytes, dict[str, int]]:
    """Length prefix and header of a file, and where each tensor starts in it."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    starts: dict[str, int] = {}
    end = 0
    # Wide elements first, as the reference writer has it: every tensor is then aligned to its own element size.
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: -item[1][0].itemsize):
        starts[name], end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [starts[name], end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, {name: 8 + len(text) + start for name, start in starts.items()}


def _bytes_of(array: np.ndarray) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8))


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError("a name occurs twice")
    return result


def _parse_entry(name: str, entry: Any, data_start: int) -> TensorInfo | str:
    """The tensor that one header entry describes, or what is wrong with the entry."""
    if not isinstance(entry, dict):
        return f"{name!r} is no JSON object"
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        return f"{name!r} has the unknown dtype {dtype!r}"
    if not _is_counts(shape):
        return f"{name!r} has the shape {shape!r}, expected a list of counts"
    if not _is_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        return f"{name!r} has data_offsets {offsets!r}, expected [begin, end]"
    nbytes = math.prod(shape) * ITEM_BYTES[dtype]
    if nbytes != offsets[1] - offsets[0]:
        return f"{name!r} spans {offsets[1] - offsets[0]} bytes, and {dtype}{shape} takes {nbytes}"
    return TensorInfo(name, dtype, tuple(shape), data_start + offsets[0], nbytes)


def _is_counts(value: Any) -> bool:
    # A count beyond 2^63 fits no file, and its decimal form could be too long to print.
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _extent_problems(tensors: dict[str, TensorInfo], data_start: int, file_size: int) -> list[str]:
    """Overlaps, gaps and a wrong file size: the format asks that the tensors fill the file exactly."""
    ordered = sorted(tensors.values(), key=lambda info: (info.offset, info.nbytes))
    problems = []
    for left, right in itertools.pairwise(ordered):
        end = left.offset + left.nbytes
        if right.offset != end:
            kind = "overlap" if right.offset < end else f"leave a gap of {right.offset - end} bytes"
            problems.append(f"{left.name!r} and {right.name!r} {kind}")
    if ordered and ordered[0].offset != data_start:
        problems.append(f"{ordered[0].offset - data_start} bytes precede the first tensor {ordered[0].name!r}")
    end = max((info.offset + info.nbytes for info in ordered), default=data_start)
    if end > file_size:
        problems.append(f"the file is truncated: it holds {file_size} bytes of {end}")
    elif end < file_size:
        problems.append(f"{file_size - end} bytes follow the last tensor")
    return problems
