"""Trace files: what a run's tokens asked of the experts, forward by forward, in one safetensors file.

Promises: a file is believed only after its header and then every value have been checked, and everything that is wrong
with it is told in one OledError; a file being written has its name only once it is whole; equal traces give equal
bytes. Reading takes plain and gzipped files alike, told apart by content.

One row per (forward, sequence). Sizes: F rows, L mixture-of-experts layers, T tokens of a row, K experts per token.

    expert_ids  uint16 [F, L, T, K]   65535 in all of them where a token does not count
    weights     float16 [F, L, T, K]  router weights, normalised, before the scaling factor; or uint8, units of 1/255
    confidence  float16 [F, T]        probability of the sampled token, negative where there is none
    tokens      int32 [F, T]          ids after the forward's sampling
    status      uint8 [F, T]          0 masked, 1 just committed, 2 settled, 3 prompt; after the sampling
    sequence, block, step  int32 [F]
    phase       uint8 [F]             0 prefill, 1 denoise, 2 a forward that only writes keys and values
    forward     int32 [F]             rows of one forward stand together, and forwards increase; may be absent: then
                                      every row is a forward of its own

T is the length of a block. A chunk of a prompt is longer, so a forward of prefill has several rows for a sequence, in
order, one per block. The metadata hold one entry, ``trace``: a JSON object with ``num_experts`` and whatever the
recorder knew (model, config, decoding arguments, versions).

Deliberately not here: making rows from an engine's records (``recording``), and what policies see (``stream``).
"""

import dataclasses
import gzip
import json
import math
import zlib
from pathlib import Path
from typing import IO, Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from oled_jax.errors import OledError, problem_list
from oled_jax.files import open_regular, write_whole
from oled_jax.retention.record import KV_WRITE, PREFILL, PROMPT

PADDING = 65535  # the expert id of a token that does not count
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_DTYPES = {"U8": "uint8", "U16": "uint16", "I32": "int32", "F16": "float16"}  # those that a trace may hold
_LAYOUT = {
    "expert_ids": (("uint16",), "FLTK"),
    "weights": (("float16", "uint8"), "FLTK"),
    "confidence": (("float16",), "FT"),
    "tokens": (("int32",), "FT"),
    "status": (("uint8",), "FT"),
    "sequence": (("int32",), "F"),
    "block": (("int32",), "F"),
    "step": (("int32",), "F"),
    "phase": (("uint8",), "F"),
    "forward": (("int32",), "F"),
}
_ROWS_AT_A_TIME = 1 << 12


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Trace:
    """The arrays of a trace file as the module describes them, checked. ``num_experts``: E, the routed experts of a
    layer; ``metadata``: the rest of the JSON object; ``source``: what messages call it.

    OledError for arrays that are no trace, all problems in one message.
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
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)
    source: str = "trace"

    def __post_init__(self):
        arrays = self.arrays()
        described = {name: (array.dtype.name, array.shape) for name, array in arrays.items()}
        problems = [*_experts_problems(self.num_experts), *_layout_problems(described)]
        if not problems:
            problems = _value_problems(arrays, self.num_experts)
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

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays by their names in a file."""
        return {name: getattr(self, name) for name in _LAYOUT}


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
    about = json.dumps({"num_experts": trace.num_experts, **trace.metadata}, sort_keys=True)
    arrays = {name: np.ascontiguousarray(array) for name, array in trace.arrays().items()}
    # One entry only: several would be written in an order that changes from process to process.
    content = save(arrays, metadata={"trace": about})
    path = Path(path)
    write_whole(path, gzip.compress(content, 6, mtime=0) if path.suffix == ".gz" else content)


def _read(file: IO[bytes], where: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Arrays and the JSON object of a file's metadata; the data are read once the header is that of a trace."""
    start = file.read(8)
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > _MAX_HEADER_BYTES:
        raise OledError(f"trace {where} is no safetensors file, or is truncated")
    raw = file.read(length)
    if len(raw) < length:
        raise OledError(f"trace {where} is truncated: its header takes {length} bytes, and {len(raw)} are left for it")
    try:
        header = json.loads(raw)
        described = {name: _described(entry) for name, entry in header.items() if name != "__metadata__"}
    except (ValueError, RecursionError, AttributeError, TypeError, KeyError) as error:
        raise OledError(f"trace {where} has a header that is not of a safetensors file ({error})") from None
    about, problems = _about(header.get("__metadata__"))
    problems += _layout_problems({"forward": ("int32", _rows(described)), **described})
    if problems:
        raise OledError(problem_list(f"trace {where}", problems))
    size = sum(np.dtype(dtype).itemsize * math.prod(shape) for dtype, shape in described.values())
    data = file.read(size + 1)
    if len(data) != size:
        found = f"more than {size}" if len(data) > size else len(data)
        raise OledError(f"trace {where} is truncated or damaged: it holds {found} bytes of data, expected {size}")
    try:
        return load(start + raw + data), about
    except SafetensorError as error:
        raise OledError(f"trace {where} is damaged: {error}") from None


def _described(entry: dict[str, Any]) -> tuple[str, tuple[int, ...]]:
    """dtype and shape of one header entry."""
    shape = tuple(entry["shape"])
    if not all(type(count) is int and 0 <= count < 2**40 for count in shape):
        raise ValueError(f"a shape is {entry['shape']}")
    return _DTYPES.get(entry["dtype"], entry["dtype"]), shape


def _rows(described: dict[str, tuple[str, tuple[int, ...]]]) -> tuple[int, ...]:
    """The shape that ``forward`` has where it is not given."""
    return described.get("expert_ids", ("", (0,)))[1][:1]


def _about(metadata: Any) -> tuple[dict[str, Any], list[str]]:
    """The JSON object of the metadata, and what is wrong with it."""
    text = metadata.get("trace") if isinstance(metadata, dict) else None
    if not isinstance(text, str):
        return {}, ['its metadata have no entry "trace"']
    try:
        about = json.loads(text)
    except (ValueError, RecursionError) as error:
        return {}, [f'its metadata entry "trace" is no JSON ({error})']
    if not isinstance(about, dict):
        return {}, ['its metadata entry "trace" is no JSON object']
    return about, list(_experts_problems(about.get("num_experts")))


def _experts_problems(num_experts: Any) -> list[str]:
    if type(num_experts) is int and 1 <= num_experts <= PADDING:
        return []
    return [f"num_experts is {num_experts!r}; it must be an integer from 1 to {PADDING}"]


def _layout_problems(described: dict[str, tuple[str, tuple[int, ...]]]) -> list[str]:
    """Arrays that are missing or unknown, have another dtype, or a shape that disagrees with ``expert_ids``."""
    problems = [f"{name} is missing" for name in _LAYOUT if name not in described]
    problems += [f"{name!r} is no array of a trace" for name in described if name not in _LAYOUT]
    shape = described.get("expert_ids", ("", ()))[1]
    sizes = dict(zip("FLTK", shape, strict=True)) if len(shape) == 4 else None
    if sizes is not None and 0 in sizes.values():
        problems.append(f"expert_ids is empty: its shape is {list(shape)}")
    for name, (dtypes, axes) in _LAYOUT.items():
        if name not in described:
            continue
        dtype, shape = described[name]
        if dtype not in dtypes:
            problems.append(f"{name} is {dtype}; it must be {' or '.join(dtypes)}")
        if len(shape) != len(axes):
            problems.append(f"{name} has shape {list(shape)}; it must have {len(axes)} axes: {', '.join(axes)}")
        elif sizes is not None and shape != tuple(sizes[axis] for axis in axes):
            expected = [sizes[axis] for axis in axes]
            problems.append(f"{name} has shape {list(shape)}; expert_ids asks for {expected} ({', '.join(axes)})")
    return problems


def _value_problems(arrays: dict[str, np.ndarray], num_experts: int) -> list[str]:
    problems = []
    for name in ("sequence", "block", "step", "forward"):
        _tell(problems, name, arrays[name], arrays[name] < 0, "must not be negative")
    _tell(problems, "phase", arrays["phase"], arrays["phase"] > KV_WRITE, f"must be {PREFILL} to {KV_WRITE}")
    _tell(problems, "status", arrays["status"], arrays["status"] > PROMPT, f"must be 0 to {PROMPT}")
    confidence = arrays["confidence"].astype(np.float32)
    _tell(
        problems, "confidence", confidence, ~(confidence <= 1) | np.isinf(confidence), "must be at most 1, and finite"
    )
    _tell_of_large(problems, arrays, num_experts)
    _tell_of_order(problems, arrays)
    return problems


def _tell(problems: list[str], name: str, values: np.ndarray, wrong: np.ndarray, rule: str, first_row: int = 0) -> bool:
    """Adds a problem if any of ``values`` is ``wrong``; names the first of them."""
    if not wrong.any():
        return False
    where = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
    place = ", ".join(str(int(i) + (first_row if axis == 0 else 0)) for axis, i in enumerate(where))
    problems.append(f"{name}[{place}] is {values[where]}; it {rule}")
    return True


def _tell_of_large(problems: list[str], arrays: dict[str, np.ndarray], num_experts: int) -> None:
    """Experts and weights, some rows at a time, until one problem of each kind is found."""
    told = set()
    for row in range(0, len(arrays["sequence"]), _ROWS_AT_A_TIME):
        ids, weights = (arrays[name][row : row + _ROWS_AT_A_TIME] for name in ("expert_ids", "weights"))
        padded = ids == PADDING
        checks = [("expert_ids", ids, (ids >= num_experts) & ~padded, f"must be below {num_experts}, or {PADDING}")]
        uneven = padded != padded[:, :1, :, :1]
        checks.append(
            ("expert_ids ", ids, uneven, f"must be {PADDING} in all layers and choices of a token, or in none")
        )
        if weights.dtype == np.float16:
            # As bits, because numpy computes with float16 one by one: 0 to 1 are the bit patterns up to that of 1.
            outside = (weights.view(np.uint16) > 0x3C00) & (weights.view(np.uint16) != 0x8000)
            checks.append(("weights", weights, outside, "must be from 0 to 1"))
        for name, values, wrong, rule in checks:
            if name not in told and _tell(problems, name.strip(), values, wrong, rule, row):
                told.add(name)


def _tell_of_order(problems: list[str], arrays: dict[str, np.ndarray]) -> None:
    forward, prefill = arrays["forward"].astype(np.int64), arrays["phase"] == PREFILL
    back = np.concatenate([[False], np.diff(forward) < 0])
    _tell(problems, "forward", forward, back, "must not be smaller than the one before")
    if back.any():
        return
    begins = np.flatnonzero(np.concatenate([[True], np.diff(forward) > 0]))
    mixed = np.logical_or.reduceat(prefill, begins) & np.logical_or.reduceat(~prefill, begins)
    _tell(
        problems, "forward", forward, np.isin(forward, forward[begins[mixed]]), "holds both prefill and decoding rows"
    )
    order = np.lexsort((arrays["sequence"], forward))
    same = (np.diff(forward[order]) == 0) & (np.diff(arrays["sequence"][order]) == 0)
    repeated = np.zeros(len(forward), bool)
    repeated[order[1:]] = same & ~prefill[order[1:]]
    _tell(problems, "sequence", arrays["sequence"], repeated, "has two decoding rows in one forward")
