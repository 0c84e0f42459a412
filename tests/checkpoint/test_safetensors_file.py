"""The format itself: against the reference library, against defects, and against garbage."""

import errno
import json
import os

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from oled_jax.checkpoint.safetensors_file import (
    ITEM_BYTES,
    MAX_HEADER_BYTES,
    SafetensorsFile,
    SafetensorsWriter,
    parse_header,
)
from oled_jax.errors import CheckpointError

BF16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)


def file_of(path, header, data=b""):
    """Writes a file with the given header (bytes, or an object that becomes JSON)."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    return path


def entry(begin=0, end=8, dtype="F32", shape=(2,)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def read(file, name):
    """One tensor through our reader, as raw bytes."""
    info = file.tensors[name]
    out = np.empty(info.nbytes, np.uint8)
    file.read_into(out, info.offset)
    return out.tobytes()


@pytest.fixture
def tensors():
    rng = np.random.default_rng(0)
    return {
        "odd": rng.standard_normal((3, 5)).astype(BF16),
        "wide": rng.standard_normal((4, 7)).astype(F32),
        "empty": np.zeros((0, 3), F32),
        "one": np.array([np.nan], F32),
        "ünï": rng.standard_normal(2).astype(BF16),
    }


def test_reads_what_the_reference_library_wrote(tmp_path, tensors):
    safetensors.numpy.save_file(tensors, tmp_path / "f", metadata={"format": "pt"})
    file = SafetensorsFile(tmp_path / "f")
    assert set(file.tensors) == set(tensors)
    for name, tensor in tensors.items():
        assert file.tensors[name].shape == tensor.shape
        assert read(file, name) == tensor.tobytes()
    out = np.empty((2, 7), F32)
    file.read_into(out, file.tensors["wide"].offset + 7 * 4)
    np.testing.assert_array_equal(out, tensors["wide"][1:3])
    file.close()
    file.close()


def test_the_reference_library_reads_what_the_writer_wrote_in_any_order(tmp_path, tensors):
    path = tmp_path / "f"
    with SafetensorsWriter(path, {n: (t.dtype, t.shape) for n, t in tensors.items()}, {"format": "pt"}) as writer:
        for name in reversed(tensors):
            for row in reversed(range(len(tensors[name]))):
                assert not path.exists()
                writer.write(name, tensors[name][row : row + 1], row)
        assert writer.complete
    loaded = safetensors.numpy.load_file(path)
    assert {n: t.tobytes() for n, t in loaded.items()} == {n: t.tobytes() for n, t in tensors.items()}
    assert {n: t.dtype for n, t in loaded.items()} == {n: t.dtype for n, t in tensors.items()}
    for info in SafetensorsFile(path).tensors.values():
        assert info.offset % ITEM_BYTES[info.dtype] == 0
    assert os.listdir(tmp_path) == ["f"]


def test_a_writer_leaves_nothing_when_it_fails_or_is_incomplete(tmp_path, monkeypatch):
    shapes = {"a": (F32, (2, 3))}
    with pytest.raises(ValueError, match="incomplete"), SafetensorsWriter(tmp_path / "f", shapes) as writer:
        writer.write("a", np.zeros((1, 3), F32))
    writer.abandon()
    assert os.listdir(tmp_path) == []

    with pytest.raises(RuntimeError), SafetensorsWriter(tmp_path / "f", shapes):
        raise RuntimeError
    assert os.listdir(tmp_path) == []

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        SafetensorsWriter(tmp_path / "f", shapes)
    assert os.listdir(tmp_path) == []


def test_short_writes_are_continued(tmp_path, monkeypatch):
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, view, offset: real(fd, view[:5], offset))
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    with SafetensorsWriter(tmp_path / "f", {"a": (F32, (3, 4))}) as writer:
        writer.write("a", array)
    np.testing.assert_array_equal(safetensors.numpy.load_file(tmp_path / "f")["a"], array)


@pytest.mark.parametrize(
    ("rows", "start"),
    [(np.zeros((1, 3), BF16), 0), (np.zeros((1, 4), F32), 0), (np.zeros((2, 3), F32), 1), (np.zeros(3, F32), 0)],
)
def test_a_writer_refuses_rows_that_do_not_fit(tmp_path, rows, start):
    with pytest.raises(ValueError, match="does not fit"), SafetensorsWriter(tmp_path / "f", {"a": (F32, (2, 3))}) as w:
        w.write("a", rows, start)


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"{", b"", "not valid JSON"),
        (b"\xff\xfe", b"", "not valid JSON"),
        (b"[" * 100_000, b"", "not valid JSON"),
        (b"[]", b"", "no JSON object"),
        (b'{"a": 1, "a": 2}', b"", "a name occurs twice"),
        ({"a": 3}, b"", "'a' is no JSON object"),
        ({"a": entry(dtype="F33")}, bytes(8), "unknown dtype 'F33'"),
        ({"a": entry(dtype=[])}, bytes(8), "unknown dtype"),
        ({"a": entry(shape=(-2,))}, bytes(8), "shape"),
        ({"a": entry() | {"shape": 2}}, bytes(8), "shape"),
        ({"a": entry() | {"shape": [True]}}, bytes(8), "shape"),
        ({"a": entry() | {"shape": [2.0]}}, bytes(8), "shape"),
        ({"a": entry() | {"shape": [10**400]}}, bytes(8), "shape"),
        ({"a": entry(8, 0)}, bytes(8), "data_offsets"),
        ({"a": entry() | {"data_offsets": [0]}}, bytes(8), "data_offsets"),
        ({"a": entry(0, 4)}, bytes(4), "spans 4 bytes, and F32[2] takes 8"),
        ({"a": entry()}, bytes(7), "truncated"),
        ({"a": entry()}, bytes(9), "1 bytes follow"),
        ({"a": entry(4, 12)}, bytes(12), "4 bytes precede"),
        ({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12), "'a' and 'b' overlap"),
        ({"a": entry(0, 8), "b": entry(0, 8)}, bytes(8), "'a' and 'b' overlap"),
        ({"a": entry(0, 8), "b": entry(9, 17)}, bytes(17), "'a' and 'b' leave a gap of 1 bytes"),
    ],
)
def test_a_bad_header_is_one_clear_error(tmp_path, header, data, message):
    path = file_of(tmp_path / "bad.safetensors", header, data)
    with pytest.raises(CheckpointError) as caught:
        SafetensorsFile(path)
    assert message in str(caught.value)
    assert "bad.safetensors" in str(caught.value)


def test_all_bad_entries_are_reported_together(tmp_path):
    path = file_of(tmp_path / "f", {"a": entry(dtype="X"), "b": entry(shape=(3,)), "c": 1}, bytes(8))
    with pytest.raises(CheckpointError, match=r"3 problems: .*'a'.*'b'.*'c'"):
        SafetensorsFile(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "truncated"),
        (b"1234567", "truncated"),
        ((100).to_bytes(8, "little") + b"{}", "truncated"),
        ((MAX_HEADER_BYTES + 1).to_bytes(8, "little"), "no safetensors file"),
        (b"\xff" * 64, "no safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git lfs pull"),
    ],
)
def test_a_file_that_is_none_is_one_clear_error(tmp_path, content, message):
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        SafetensorsFile(tmp_path / "f")


def test_absent_files_and_folders_are_clear_errors(tmp_path):
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(CheckpointError, match=str(path)):
            SafetensorsFile(path)


def test_every_truncation_of_a_good_file_is_found(tmp_path, tensors):
    safetensors.numpy.save_file(tensors, tmp_path / "f")
    content = (tmp_path / "f").read_bytes()
    for size in range(0, len(content), 7):
        (tmp_path / "cut").write_bytes(content[:size])
        with pytest.raises(CheckpointError):
            SafetensorsFile(tmp_path / "cut")


def test_a_file_that_shrinks_while_open_is_a_clear_error(tmp_path):
    path = file_of(tmp_path / "f", {"a": entry()}, bytes(8))
    file = SafetensorsFile(path)
    os.truncate(path, path.stat().st_size - 3)
    with pytest.raises(CheckpointError, match="3 bytes short"):
        read(file, "a")
    file.close()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=10,
)
plausible_entry = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(sorted(ITEM_BYTES)) | json_values,
        "shape": st.lists(st.integers(0, 4), max_size=3) | json_values,
        "data_offsets": st.lists(st.integers(0, 64), min_size=2, max_size=2) | json_values,
    },
)


def opens_or_is_refused(path):
    try:
        file = SafetensorsFile(path)
    except CheckpointError:
        return
    for name in file.tensors:
        assert len(read(file, name)) == file.tensors[name].nbytes
    file.close()


@given(st.binary(max_size=200))
def test_garbage_never_raises_anything_else(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("garbage") / "f"
    path.write_bytes(content)
    opens_or_is_refused(path)


@given(st.binary(max_size=60) | json_values.map(lambda v: json.dumps(v).encode()), st.binary(max_size=20))
def test_a_garbage_header_never_raises_anything_else(tmp_path_factory, header, data):
    opens_or_is_refused(file_of(tmp_path_factory.mktemp("garbage") / "f", header, data))


@given(st.dictionaries(st.text(max_size=3), plausible_entry | json_values, max_size=4), st.integers(0, 80))
def test_a_plausible_header_is_believed_only_if_it_tiles_the_file(header, data_bytes):
    raw = json.dumps(header).encode()
    tensors, problems = parse_header(raw, 8 + len(raw) + data_bytes)
    if not problems:
        covered = sorted((t.offset, t.offset + t.nbytes) for t in tensors.values() if t.nbytes)
        edges = [8 + len(raw), *(edge for span in covered for edge in span), 8 + len(raw) + data_bytes]
        assert edges[::2] == edges[1::2]


@pytest.mark.parametrize(("make", "words"), [(os.mkfifo, "a named pipe"), (os.mkdir, "a folder")])
def test_what_is_no_regular_file_is_not_waited_for(tmp_path, make, words):
    make(tmp_path / "odd")
    with pytest.raises(CheckpointError, match=f"odd cannot be opened: it is {words}, not a regular file"):
        SafetensorsFile(tmp_path / "odd")
