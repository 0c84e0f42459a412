"""Reads a checkpoint in the published Hugging Face layout, and the variants of it that are in circulation.

Promises: one ``model.safetensors`` or shards under an index, in any order, the matrices of one expert in any shards;
experts stored one by one, stacked per layer (``experts.gate_proj [E, I, H]``), or fused (``experts.gate_up_proj
[E, 2I, H]``), with and without ``.weight``; the prefix ``model.language_model.``. Opening reads headers only and
reports every bad name, dtype, shape and file together. All variants end as the same table: the published name of every
matrix, and the place in a file where its bytes lie.

Deliberately not here: other tensors of multimodal derivatives, float16 and quantised weights (all are errors).
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from oled_jax.checkpoint import layout
from oled_jax.checkpoint.layout import Piece, Unit
from oled_jax.checkpoint.reading import Checkpoint
from oled_jax.checkpoint.safetensors_file import WEIGHT_DTYPES, SafetensorsFile, TensorInfo
from oled_jax.config import ModelConfig, read_json_object
from oled_jax.errors import CheckpointError, ConfigError, problem_list
from oled_jax.files import read_bytes

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_MULTIMODAL_PREFIX = "model.language_model."
_MULTI_EXPERT = re.compile(
    r"model\.layers\.(0|[1-9][0-9]{0,5})\.mlp\.experts\.(gate_proj|up_proj|down_proj|gate_up_proj)(?:\.weight)?"
)
# Left over in derived checkpoints: rotary tables, which are computed, and the value head of reinforcement learning.
_IGNORED = re.compile(r"(?:.*\.)?(?:inv_freq|v_head(?:\..*)?)")


class _Span(NamedTuple):
    """Where the bytes of one published tensor start."""

    file: SafetensorsFile
    offset: int


class _Form(NamedTuple):
    """How one stored tensor is read: its expected shape, and the published tensors in it by their first element."""

    shape: tuple[int, ...]
    parts: tuple[tuple[str, int], ...]
    layout: str


@dataclass
class _Findings:
    """What the headers of a folder say, filled while they are compared with the config."""

    problems: list[str] = field(default_factory=list)
    claimed: dict[str, str] = field(default_factory=dict)  # published name -> the stored tensor that gives it
    spans: dict[str, _Span] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)  # stored tensor -> dtype
    layouts: set[str] = field(default_factory=set)
    prefixed: bool = False


class HuggingFaceCheckpoint(Checkpoint):
    """A folder in the published layout. Raises CheckpointError listing everything that is wrong with it."""

    format = "huggingface"

    def __init__(self, path: Path, config: ModelConfig):
        self._files: dict[str, SafetensorsFile] = {}
        try:
            found = self._inspect(path, config)
            super().__init__(path, config, *_found_dtypes(found))
        except BaseException:
            self.close()
            raise
        self._spans = found.spans
        self._stored = len(found.dtypes)
        # A fused layer keeps its down projection in a stacked tensor, so "fused" is the name for both.
        kinds = found.layouts - {"stacked"} if "fused" in found.layouts else found.layouts
        self._layout = "experts " + " and ".join(sorted(kinds)) if kinds else "no experts"
        self._layout += f", prefix {_MULTIMODAL_PREFIX}" if found.prefixed else ""
        self._expert_keys = {layout.gate_up_key(i): (i, _read_gate_up) for i in config.moe_layers}
        self._expert_keys |= {layout.down_key(i): (i, _read_down) for i in config.moe_layers}

    def read(self, unit: Unit) -> list[np.ndarray]:
        return [self._read_piece(piece) for piece in unit.pieces]

    def fingerprint(self) -> str:
        digest = hashlib.sha256(read_bytes(self.path / "config.json"))
        for name, file in sorted(self._files.items()):
            digest.update(f"{name}\0{file.size}\0{file.mtime_ns}\0".encode())
        return digest.hexdigest()

    def describe(self) -> dict[str, Any]:
        return {"layout": self._layout, "files": len(self._files), "stored_tensors": self._stored}

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _read_piece(self, piece: Piece) -> np.ndarray:
        out = np.empty(piece.shape, piece.target.dtype)
        layer_and_reader = self._expert_keys.get(piece.target.key)
        if layer_and_reader is None:
            span = self._spans[layout.published_name(piece.target.key)]
            span.file.read_into(out, span.offset + piece.start * (out.nbytes // piece.rows))
        else:
            layer, reader = layer_and_reader
            for row, expert in enumerate(range(piece.start, piece.start + piece.rows)):
                reader(self._spans, layer, expert, out[row])
        return out

    def _inspect(self, path: Path, config: ModelConfig) -> _Findings:
        found = _Findings()
        published = layout.published_shapes(config)
        index = _read_index(path)
        for name in sorted(set(index.values())) if index is not None else [SINGLE_FILE]:
            self._open(path, name, found)
        if index is None and not self._files:  # everything would be missing as well
            raise CheckpointError(problem_list(str(path), found.problems))
        if index is not None:
            self._compare_with_index(index, found)
            for name, shard in index.items():
                if shard in self._files and name in self._files[shard].tensors:
                    continue
                # Reported already, with its shard or as absent from it; so not once more as a missing tensor.
                form = _form(name, published, config)
                if form is None:
                    found.problems.append(_unknown(name))
                else:
                    found.claimed.update((part, name) for part, _ in form.parts)
        for file_name, file in self._files.items():
            for info in file.tensors.values():
                # A tensor out of place was reported above; it is not looked at twice.
                if _IGNORED.fullmatch(info.name) or (index is not None and index.get(info.name) != file_name):
                    continue
                _claim(info, file, _form(info.name, published, config), found)
        found.problems += _dtype_problems(found)
        found.problems += [f"{name} is missing" for name in published if name not in found.claimed]
        if found.problems:
            raise CheckpointError(problem_list(str(path), found.problems))
        return found

    def _open(self, path: Path, name: str, found: _Findings) -> None:
        if not (path / name).exists():
            found.problems.append(f"shard {name} is missing: the index names it; download it again")
            return
        try:
            self._files[name] = SafetensorsFile(path / name)
        except CheckpointError as error:
            found.problems.append(str(error))

    def _compare_with_index(self, index: dict[str, str], found: _Findings) -> None:
        for name, shard in index.items():
            if shard in self._files and name not in self._files[shard].tensors:
                found.problems.append(f"the index places {name} in {shard}, which lacks it")
        for file_name, file in self._files.items():
            for name in file.tensors:
                shard = index.get(name)
                if shard is None and not _IGNORED.fullmatch(name):
                    found.problems.append(f"{file_name} holds {name}, which the index does not name")
                elif shard is not None and shard != file_name:
                    found.problems.append(
                        f"{name} is in two shards: the index says {shard}, and {file_name} holds it too"
                    )


def _found_dtypes(found: _Findings) -> tuple[np.dtype, np.dtype]:
    """Dtype of the weights and of the expert biases, which the checks have shown to be one each."""
    weights = next(dtype for name, dtype in found.dtypes.items() if not _is_bias(name))
    bias = next((dtype for name, dtype in found.dtypes.items() if _is_bias(name)), weights)
    return WEIGHT_DTYPES[weights], WEIGHT_DTYPES[bias]


def transpose_into(out: np.ndarray, matrix: np.ndarray) -> None:
    """Writes the transpose of ``matrix [m, n]`` to ``out [n, m]``, in strips that stay in the processor's cache."""
    # As integers: numpy copies the bfloat16 extension type element by element, a fifth slower.
    kind = np.dtype(f"u{matrix.dtype.itemsize}")
    source, target = matrix.view(kind), out.view(kind)
    for row in range(0, source.shape[0], 64):
        target[:, row : row + 64] = source[row : row + 64].T


def _read_gate_up(spans: Mapping[str, _Span], layer: int, expert: int, out: np.ndarray) -> None:
    width = out.shape[0] // 2
    for matrix, rows in (("gate_proj", out[:width]), ("up_proj", out[width:])):
        span = spans[layout.expert_name(layer, expert, matrix)]
        span.file.read_into(rows, span.offset)


def _read_down(spans: Mapping[str, _Span], layer: int, expert: int, out: np.ndarray) -> None:
    span = spans[layout.expert_name(layer, expert, "down_proj")]
    stored = np.empty(out.shape[::-1], out.dtype)
    span.file.read_into(stored, span.offset)
    transpose_into(out, stored)


def _read_index(path: Path) -> dict[str, str] | None:
    """The index's map from tensor to shard without the tensors to ignore; None where the folder has no index."""
    file = path / INDEX_FILE
    if not file.exists():
        return None
    try:
        table = read_json_object(file).get("weight_map")
    except ConfigError as error:
        raise CheckpointError(str(error)) from None
    if not isinstance(table, dict) or not table:
        raise CheckpointError(f"{file} holds no weight_map: it must map tensor names to shard files")
    bad = [
        f"weight_map places {name} in {shard!r}, which is no file name in this folder"
        for name, shard in table.items()
        if not isinstance(shard, str) or not shard.isprintable() or not shard or shard != Path(shard).name
    ]
    if bad:
        raise CheckpointError(problem_list(str(file), bad))
    return {name: shard for name, shard in table.items() if not _IGNORED.fullmatch(name)}


def _form(name: str, published: Mapping[str, tuple[int, ...]], config: ModelConfig) -> _Form | None:
    """What a stored tensor of this name holds; None for a name that no layout has."""
    if name.startswith(_MULTIMODAL_PREFIX):
        name = "model." + name.removeprefix(_MULTIMODAL_PREFIX)
    if name in published:
        return _Form(published[name], ((name, 0),), "one by one" if ".mlp.experts." in name else "")
    match = _MULTI_EXPERT.fullmatch(name)
    if match is None or int(match[1]) not in config.moe_layers:
        return None
    layer, matrix = int(match[1]), match[2]
    experts = range(config.num_experts)
    size = config.moe_intermediate_size * config.hidden_size
    if matrix == "gate_up_proj":
        parts = [(layout.expert_name(layer, e, "gate_proj"), 2 * e * size) for e in experts]
        parts += [(layout.expert_name(layer, e, "up_proj"), (2 * e + 1) * size) for e in experts]
        return _Form((len(experts), 2 * config.moe_intermediate_size, config.hidden_size), tuple(parts), "fused")
    parts = [(layout.expert_name(layer, e, matrix), e * size) for e in experts]
    return _Form((len(experts), *published[parts[0][0]]), tuple(parts), "stacked")


def _unknown(name: str) -> str:
    return f"{name} is unknown: no tensor of this model has that name"


def _claim(info: TensorInfo, file: SafetensorsFile, form: _Form | None, found: _Findings) -> None:
    if form is None:
        found.problems.append(_unknown(info.name))
        return
    found.dtypes[info.name] = info.dtype
    found.layouts |= {form.layout} - {""}
    found.prefixed |= info.name.startswith(_MULTIMODAL_PREFIX)
    rivals = {found.claimed[part] for part, _ in form.parts if part in found.claimed}
    found.problems += [f"{info.name} gives what {rival} gives already" for rival in sorted(rivals)]
    if info.shape != form.shape:
        found.problems.append(f"{info.name} has the shape {list(info.shape)}, the config asks for {list(form.shape)}")
    item = info.nbytes // max(1, np.prod(info.shape, dtype=np.int64))
    for part, first in form.parts:
        found.claimed[part] = info.name
        found.spans[part] = _Span(file, info.offset + first * int(item))


def _is_bias(name: str) -> bool:
    return name.endswith(".expert_bias")


def _dtype_problems(found: _Findings) -> list[str]:
    """Weights must share one of the two dtypes, and so must the expert biases; the majority is taken as intended."""
    problems = []
    for kind, bias in (("weights", False), ("expert biases", True)):
        stored = {name: dtype for name, dtype in found.dtypes.items() if _is_bias(name) == bias}
        values = list(stored.values())
        intended = max(WEIGHT_DTYPES, key=values.count)
        for name, dtype in stored.items():
            if dtype not in WEIGHT_DTYPES:
                problems.append(f"{name} has the dtype {dtype}: {kind} must all be BF16 or all F32")
            elif dtype != intended:
                problems.append(f"{name} has the dtype {dtype} where the other {kind} are {intended}")
    return problems
