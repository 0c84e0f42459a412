"""Trace files: what a run's tokens asked of the experts, forward by forward, in one safetensors file.

Promises: a file is believed only after its header and then every value have been checked, and everything that is wrong
with it is told in one OledError; a file being written has its name only once it is whole; equal traces give equal
bytes. Reading takes plain and gzipped files alike, told apart by content.

One row per (forward, sequence). Sizes: F rows, L mixture-of-experts layers, T tokens of a row, K experts per token.

    expert_ids  uint16 [F, L, T, K]   65535 in all of them where a token does not count
    weights     float16 [F, L, T, K]  router weights, normalised, before the scaling factor; or uint8, units of 1/255
    confidence  float16 [F, T]        probability of the sampled token, negative where there is none
    tokens      int32 [F, T]          ids after the forward's sampling
    candidates  int32 [F, T]          the token that the forward proposed, written or not, -1 where there is none; may
                                      be absent: then nobody knows, and -1 stands everywhere
    status      uint8 [F, T]          0 masked, 1 just committed, 2 settled, 3 prompt; after the sampling
    sequence, block, step  int32 [F]
    phase       uint8 [F]             0 prefill, 1 denoise, 2 a forward that only writes keys and values
    forward     int32 [F]             rows of one forward stand together, and forwards increase; may be absent: then
                                      every row is a forward of its own

T is the length of a block. A chunk of a prompt is longer, so a forward of prefill has several rows for a sequence, in
order, one per block.

The metadata are strings: ``format`` ("oled-trace"), ``version``, ``num_experts``, and an entry for whatever else the
recorder knew (model, config, decoding arguments, versions, routing). A value is JSON; a string that is not JSON by
itself stands as it is. ``sequences`` describes sequences, an object each: ``sequence`` (its number) and, where known,
``task``, ``split`` ("calibration" or "evaluation") and more. Files of before version 1 hold one entry ``trace``, a JSON
object of all this, and are read as well.

Deliberately not here: making rows from an engine's records (``recording``), the checks (``trace_checks``), and what
policies see (``stream``).
"""

import contextlib
import dataclasses
import gzip
import json
import math
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from oled_jax.errors import OledError, problem_list
from oled_jax.files import open_regular, whole_file
from oled_jax.lab.trace_checks import (
    LAYOUT,
    experts_problems,
    layout_problems,
    sequences_problems,
    value_problems,
)
from oled_jax.lab.trace_checks import PADDING as PADDING

FORMAT, VERSION = "oled-trace", 1
_GZIP_LEVEL = 6
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_DTYPES = {"U8": "uint8", "U16": "uint16", "I32": "int32", "F16": "float16"}  # those that a trace may hold
_BYTES_AT_A_TIME = 1 << 24


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Trace:
    """The arrays of a trace file as the module describes them, checked. ``num_experts``: E, the routed experts of a
    layer; ``metadata``: what else is known; ``source``: what messages call it.

    OledError for arrays or descriptions of sequences that are no trace, all problems in one message.
    """

    num_experts: int
    expert_ids: np.ndarray
    weights: np.ndarray
    confidence: np.ndarray
    tokens: np.ndarray
    status: np.ndarray
    sequence: np.ndarray
    block: np.ndarray
    step: np.ndarray
    phase: np.ndarray
    forward: np.ndarray
    candidates: np.ndarray | None = None
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)
    source: str = "trace"

    def __post_init__(self):
        if self.candidates is None:
            object.__setattr__(self, "candidates", np.full(np.shape(self.expert_ids)[0:3:2], -1, np.int32))
        arrays = self.arrays()
        described = {name: (array.dtype.name, array.shape) for name, array in arrays.items()}
        problems = [*experts_problems(self.num_experts), *layout_problems(described)]
        problems += sequences_problems(self._sequences)
        if not problems:
            problems = value_problems(arrays, self.num_experts)
        if problems:
            raise OledError(problem_list(self.source, problems))

    @property
    def num_layers(self) -> int:
        """L."""
        return self.expert_ids.shape[1]

    @property
    def tokens_per_row(self) -> int:
        """T."""
        return self.expert_ids.shape[2]

    @property
    def tasks(self) -> dict[int, str]:
        """The task of each sequence that has one, by sequence number."""
        return self._labels("task")

    @property
    def splits(self) -> dict[int, str]:
        """ "calibration" or "evaluation", for each sequence that was put into either."""
        return self._labels("split")

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays by their names in a file."""
        return {name: getattr(self, name) for name in LAYOUT}

    def select(self, sequences: Iterable[int]) -> "Trace":
        """The rows of some sequences, in the order in which they stand, with their descriptions.

        Forwards keep their numbers, and those without a row left are gone. A sequence that was decoded in a batch
        leaves the others behind, so that what is left asks for less than the engine saw: select whole batches for
        counts that an engine could have had. OledError for a sequence without rows, or if none is named.
        """
        wanted = set(sequences)
        absent = sorted(wanted - set(self.sequence.tolist()))
        if absent or not wanted:
            wrong = f"has no sequence {', '.join(map(str, absent[:5]))}" if absent else "without any sequence is none"
            raise OledError(f"{self.source} {wrong}: its sequences are {_ranges(self.sequence)}")
        rows = np.isin(self.sequence, sorted(wanted))
        metadata = dict(self.metadata)
        if "sequences" in metadata:
            metadata["sequences"] = [entry for entry in self._sequences if entry["sequence"] in wanted]
        chosen = {name: array[rows] for name, array in self.arrays().items()}
        return dataclasses.replace(self, **chosen, metadata=metadata)

    @property
    def _sequences(self) -> Any:
        return self.metadata.get("sequences", [])

    def _labels(self, name: str) -> dict[int, str]:
        return {entry["sequence"]: entry[name] for entry in self._sequences if name in entry}


def read_trace(path: str | Path) -> Trace:
    """Reads a trace file, gzipped or not; OledError for what cannot be read or is no trace, all problems together."""
    path = Path(path)
    try:
        with open(open_regular(path), "rb") as file:
            zipped = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            with gzip.GzipFile(fileobj=file) if zipped else file as content:
                arrays, about = _read(content, str(path))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise OledError(f"trace {path} is truncated or damaged: {error}") from None
    except (OSError, ValueError) as error:
        if isinstance(error, OledError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise OledError(f"trace {str(path)!r:.200} cannot be read: {reason}") from None
    arrays.setdefault("forward", np.arange(len(arrays["sequence"]), dtype=np.int32))
    return Trace(**arrays, num_experts=about.pop("num_experts"), metadata=about, source=f"trace {path}")


def write_trace(path: str | Path, trace: Trace) -> None:
    """Writes ``trace``, gzipped if ``path`` ends in ``.gz``, replacing a file of that name; OSError on a full disk."""
    arrays = trace.arrays()
    described = {name: (array.dtype, array.shape) for name, array in arrays.items()}
    write_arrays(path, trace.num_experts, trace.metadata, described, lambda name: [arrays[name]])


def write_arrays(
    path: str | Path,
    num_experts: int,
    metadata: Mapping[str, Any],
    described: Mapping[str, tuple[np.dtype, tuple[int, ...]]],
    parts: Callable[[str], Iterable[np.ndarray]],
) -> None:
    """Writes a trace of which no more need be in memory than one part: ``described`` gives dtype and shape of every
    array, ``parts(name)`` its rows, in order. The caller vouches for what is in them. See ``write_trace``."""
    path = Path(path)
    # Wide elements first: every array is then aligned to its own elements.
    order = sorted(described, key=lambda name: (-described[name][0].itemsize, name))
    with whole_file(path) as file, _compressed(file) if path.suffix == ".gz" else contextlib.nullcontext(file) as out:
        out.write(_header(num_experts, metadata, {name: described[name] for name in order}))
        for name in order:
            for part in parts(name):
                out.write(np.ascontiguousarray(part).data.cast("B"))


def _compressed(file: IO[bytes]) -> gzip.GzipFile:
    """Without a name and a time, which would make equal traces differ."""
    return gzip.GzipFile("", "wb", _GZIP_LEVEL, file, mtime=0)


def _header(
    num_experts: int, metadata: Mapping[str, Any], described: Mapping[str, tuple[np.dtype, tuple[int, ...]]]
) -> bytes:
    """Length prefix and header of a file."""
    about = {**metadata, "format": FORMAT, "version": VERSION, "num_experts": num_experts}
    header: dict[str, Any] = {"__metadata__": {key: _as_string(about[key]) for key in sorted(about)}}
    names, end = {dtype: name for name, dtype in _DTYPES.items()}, 0
    for name, (dtype, shape) in described.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": names[dtype.name], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _as_string(value: Any) -> str:
    """JSON, but a string stands as it is where nobody could take it for JSON."""
    if isinstance(value, str) and value.isprintable() and _as_value(value) is value:
        return value
    return json.dumps(value, sort_keys=True)


def _as_value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _read(file: IO[bytes], where: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Arrays and metadata of a file; the data are read once the header is that of a trace."""
    start = file.read(8)
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > _MAX_HEADER_BYTES:
        raise OledError(f"trace {where} is no safetensors file, or is truncated")
    raw = file.read(length)
    if len(raw) < length:
        raise OledError(f"trace {where} is truncated: its header takes {length} bytes, and {len(raw)} are left for it")
    try:
        header = json.loads(raw)
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        described = {name: _described(entry) for name, entry in entries.items()}
        extents = {name: _extent(entry) for name, entry in entries.items()}
    except (ValueError, RecursionError, AttributeError, TypeError, KeyError) as error:
        raise OledError(f"trace {where} has a header that is not of a safetensors file ({error})") from None
    about, problems = _about(header.get("__metadata__"))
    problems += layout_problems(_absent(described) | described)
    if problems:
        raise OledError(problem_list(f"trace {where}", problems))
    arrays, end = {}, 0
    size = sum(np.dtype(dtype).itemsize * math.prod(shape) for dtype, shape in described.values())
    for name, (begins, ends) in sorted(extents.items(), key=lambda item: item[1]):
        dtype, shape = described[name]
        if begins != end or ends - begins != np.dtype(dtype).itemsize * math.prod(shape):
            raise OledError(f"trace {where} is damaged: {name} cannot lie from byte {begins} to {ends} of its data")
        data, end = _take(file, ends - begins), ends
        if len(data) < ends - begins:
            found = begins + len(data)
            raise OledError(f"trace {where} is truncated or damaged: it holds {found} bytes of data, expected {size}")
        arrays[name] = np.frombuffer(data, dtype).reshape(shape)
    if file.read(1):
        raise OledError(f"trace {where} is truncated or damaged: it holds more than {size} bytes of data")
    return arrays, about


def _take(file: IO[bytes], count: int) -> bytearray:
    """The next ``count`` bytes, or as many as there are: memory is asked for as they come, whatever a header says."""
    data = bytearray()
    while len(data) < count and (part := file.read(min(count - len(data), _BYTES_AT_A_TIME))):
        data += part
    return data


def _described(entry: dict[str, Any]) -> tuple[str, tuple[int, ...]]:
    """dtype and shape of one header entry."""
    shape = tuple(entry["shape"])
    if not all(type(count) is int and 0 <= count < 2**40 for count in shape):
        raise ValueError(f"a shape is {entry['shape']}")
    return _DTYPES.get(entry["dtype"], entry["dtype"]), shape


def _extent(entry: dict[str, Any]) -> tuple[int, int]:
    """Where the data of one header entry begin and end."""
    begins, ends = entry["data_offsets"]
    if type(begins) is not int or type(ends) is not int:
        raise ValueError(f"data_offsets are {entry['data_offsets']}")
    return begins, ends


def _absent(described: dict[str, tuple[str, tuple[int, ...]]]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """What arrays that may be absent would have to be."""
    shape = described.get("expert_ids", ("", (0, 0, 0)))[1]
    return {"forward": ("int32", shape[:1]), "candidates": ("int32", shape[:3:2])}


def _about(metadata: Any) -> tuple[dict[str, Any], list[str]]:
    """What the metadata say, ``num_experts`` among it, and what is wrong with them."""
    strings = metadata if isinstance(metadata, dict) else {}
    if "format" in strings:
        about = {key: _as_value(text) if isinstance(text, str) else text for key, text in strings.items()}
        written, version = about.pop("format"), about.pop("version", None)
        if written != FORMAT:
            return {}, [f"its format is {written!r}; a trace's is {FORMAT!r}"]
        if type(version) is not int or version != VERSION:
            return {}, [f"its version is {version!r}; this release of oled-jax reads {VERSION}"]
    elif "trace" not in strings:
        return {}, [f'its metadata have no entry "format" that says {FORMAT}']
    else:
        about = _as_value(strings["trace"]) if isinstance(strings["trace"], str) else None
        if not isinstance(about, dict):
            return {}, ['its metadata entry "trace" is no JSON object']
    return about, [*experts_problems(about.get("num_experts")), *sequences_problems(about.get("sequences", []))]


def _ranges(sequences: np.ndarray) -> str:
    """Numbers in words: "0 to 9, 12"."""
    numbers = np.unique(sequences)
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1)
    told = [f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return ", ".join(told[:10]) + (", ..." if len(told) > 10 else "")
