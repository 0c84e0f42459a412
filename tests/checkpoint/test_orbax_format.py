"""The converted folder: what is written is what is read, and what was damaged is named."""

import errno
import json
import logging
import os
import re
import shutil
import sys
import zlib
from pathlib import Path

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

from oled_jax.checkpoint import checksums, open_checkpoint, orbax_format, stream
from oled_jax.checkpoint.layout import Piece, Target, Unit
from oled_jax.checkpoint.orbax_format import UnitStore, write_manifest
from oled_jax.errors import CheckpointError

BF16 = np.dtype(ml_dtypes.bfloat16)
UNIT = "experts.layers.1.0000"


def convert(source_folder, destination):
    """A converted folder, written with the pieces that the conversion uses."""
    destination.mkdir()
    shutil.copy(source_folder / "config.json", destination)
    with open_checkpoint(source_folder) as source:
        store = UnitStore(destination)
        for unit, arrays in stream(source):
            store.save(unit, arrays)
        write_manifest(destination, source, store)
        store.close()
    return destination


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """The plain fixture, converted once."""
    golden = Path(__file__).parents[1] / "golden"
    return convert(golden / "llada2-tiny-f32", tmp_path_factory.mktemp("pristine") / "converted")


@pytest.fixture
def converted(pristine, tmp_path):
    """A copy of it to damage."""
    return shutil.copytree(pristine, tmp_path / "converted")


def edit_manifest(folder, change):
    path = folder / "oled_checkpoint.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def message_for(folder):
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)
    return str(caught.value)


def test_every_fixture_reads_the_same_in_both_formats(any_source, tmp_path):
    folder = convert(any_source.folder, tmp_path / "converted")
    with open_checkpoint(any_source.folder) as left, open_checkpoint(folder) as right:
        assert right.format == "orbax"
        assert right.units() == left.units()
        assert (right.weight_dtype, right.bias_dtype) == (left.weight_dtype, left.bias_dtype)
        assert right.total_bytes == left.total_bytes
        assert right.config == left.config
        for (unit, a), (_, b) in zip(stream(left), stream(right), strict=True):
            for piece, x, y in zip(unit.pieces, a, b, strict=True):
                assert y.shape == piece.shape
                assert y.dtype == piece.target.dtype
                assert isinstance(y, np.ndarray)
                assert y.flags.c_contiguous
                assert x.tobytes() == y.tobytes()


def test_any_bits_survive(tmp_path):
    bits = np.arange(2**16, dtype=np.uint16).reshape(256, 256)
    special = np.array([np.nan, -0.0, np.inf, 1e-45], np.float32)
    arrays = [bits.view(BF16), special]
    targets = [Target("layers.0.weight", (256, 256), BF16), Target("bias", (4,), np.dtype(np.float32))]
    unit = Unit("dense.test", tuple(Piece(t, 0, t.shape[0]) for t in targets))
    store = UnitStore(tmp_path)
    store.save(unit, arrays)
    back = store.load(unit)
    store.close()
    assert [x.tobytes() for x in back] == [x.tobytes() for x in arrays]


def test_orbax_alone_reads_a_unit(pristine):
    with ocp.StandardCheckpointer() as checkpointer:
        tree = checkpointer.restore(pristine.absolute() / "units" / UNIT)
    assert {k: v.shape for k, v in tree.items()} == {
        "layers.1.mlp.experts.gate_up": (16, 64, 64),
        "layers.1.mlp.experts.down": (16, 32, 64),
    }


def test_the_manifest_says_where_it_comes_from(pristine, tiny):
    manifest = json.loads((pristine / "oled_checkpoint.json").read_text())
    with open_checkpoint(tiny.folder) as source:
        assert manifest["source"]["fingerprint"] == source.fingerprint()
    assert manifest["version"] == 2
    assert {"oled-jax", "orbax-checkpoint", "jax", "numpy"} <= set(manifest["packages"])


def test_missing_units_are_named_together(converted):
    shutil.rmtree(converted / "units" / UNIT)
    shutil.rmtree(converted / "units" / "dense.final")
    message = message_for(converted)
    assert "2 problems" in message
    assert f"unit {UNIT} is missing" in message
    assert "unit dense.final is missing" in message


def test_a_truncated_unit_is_named(converted):
    largest = max((converted / "units" / UNIT).rglob("*"), key=lambda p: p.stat().st_size if p.is_file() else 0)
    largest.write_bytes(largest.read_bytes()[:-1])
    name, size = largest.relative_to(converted / "units" / UNIT), largest.stat().st_size
    assert f"1 problem: unit {UNIT} is damaged: {name} holds {size} bytes of {size + 1}" in message_for(converted)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(version=1), "format version 1, and this package reads 2: convert again"),
        (lambda m: m.update(weight_dtype="float16", bias_dtype=3), "2 problems: weight_dtype is 'float16'"),
        (lambda m: m.update(weight_dtype=[]), "weight_dtype is []"),
        (lambda m: m.pop("units"), "units is missing"),
        (lambda m: m["units"].pop(UNIT), f"1 problem: unit {UNIT} is missing from the manifest"),
        (lambda m: m["units"].update(extra={}), "1 problem: unit extra is unknown"),
        (lambda m: m["units"][UNIT].update(arrays=3), f"1 problem: unit {UNIT} holds 3, the config asks for"),
        (lambda m: m["units"][UNIT]["arrays"][0].update(dtype="bfloat16"), "gate_up bfloat16[16, 64, 64] from row 0"),
        (lambda m: m["units"][UNIT]["arrays"][0].update(shape=[1, 2]), "gate_up float32[1, 2] from row 0"),
        (lambda m: m["units"][UNIT].update(files=None), f"1 problem: unit {UNIT} has no valid list of files"),
        (lambda m: m["units"][UNIT]["files"].popitem(), f"1 problem: unit {UNIT} is damaged: "),
        (lambda m: m.update(bias_dtype="bfloat16"), "3 problems"),
    ],
)
def test_a_manifest_that_does_not_fit_is_a_clear_error(converted, change, message):
    edit_manifest(converted, change)
    assert message in message_for(converted)


def test_a_manifest_that_is_no_json(converted):
    (converted / "oled_checkpoint.json").write_text("{")
    assert "cannot be read as JSON" in message_for(converted)


def test_another_config_is_a_clear_error(converted):
    path = converted / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"moe_intermediate_size": 16}))
    message = message_for(converted)
    assert f"unit {UNIT} holds layers.1.mlp.experts.gate_up float32[16, 64, 64] from row 0" in message
    assert "the config asks for layers.1.mlp.experts.gate_up float32[16, 32, 64] from row 0" in message


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"layers.1.mlp.experts.down": ((16, 32, 64), np.float32)}, "gate_up is missing"),
        (
            {
                "layers.1.mlp.experts.gate_up": ((16, 64, 64), BF16),
                "layers.1.mlp.experts.down": ((16, 32, 63), np.float32),
            },
            "2 problems: layers.1.mlp.experts.gate_up is bfloat16[16, 64, 64], expected float32[16, 64, 64]",
        ),
    ],
)
def test_what_a_unit_really_holds_is_checked_when_it_is_read(converted, tree, message):
    place = converted.absolute() / "units" / UNIT
    shutil.rmtree(place)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(place, {key: np.ones(shape, dtype) for key, (shape, dtype) in tree.items()})
        checkpointer.wait_until_finished()
    files = checksums.to_json(checksums.sum_folder(place))
    edit_manifest(converted, lambda manifest: manifest["units"][UNIT].update(files=files))
    with open_checkpoint(converted) as checkpoint:
        (unit,) = (unit for unit in checkpoint.units() if unit.name == UNIT)
        with pytest.raises(CheckpointError) as caught:
            checkpoint.read(unit)
    assert message in str(caught.value)


def test_a_unit_that_vanishes_after_opening_is_a_clear_error(converted):
    with open_checkpoint(converted) as checkpoint:
        shutil.rmtree(converted / "units" / UNIT)
        with pytest.raises(CheckpointError, match=rf"unit {re.escape(UNIT)} is damaged .* is missing"):
            list(stream(checkpoint))


def test_a_flipped_bit_anywhere_in_a_unit_is_one_error_that_names_the_file(converted, caplog, capfd):
    """Orbax itself logs tracebacks for some of these bits and reads past others."""
    place = converted / "units" / UNIT
    with open_checkpoint(converted) as checkpoint:
        (unit,) = (unit for unit in checkpoint.units() if unit.name == UNIT)
        intact = [array.tobytes() for array in checkpoint.read(unit)]
        for file in sorted(file for file in place.rglob("*") if file.is_file()):
            content = file.read_bytes()
            for position in (0, len(content) // 2, len(content) - 1):
                damaged = bytearray(content)
                damaged[position] ^= 1 << position % 8
                file.write_bytes(damaged)
                with pytest.raises(CheckpointError) as caught:
                    checkpoint.read(unit)
                message = str(caught.value)
                assert message.startswith(f"unit {UNIT} is damaged ({place})")
                assert f"1 problem: {file.relative_to(place)} has the CRC-32 " in message
                assert "convert again" in message
            file.write_bytes(content)
        assert [array.tobytes() for array in checkpoint.read(unit)] == intact
    assert (capfd.readouterr(), caplog.records) == (("", ""), [])


def test_the_record_of_a_unit_becomes_its_entry_in_the_manifest(tiny, tmp_path):
    with open_checkpoint(tiny.folder) as source:
        unit, arrays = next(iter(stream(source)))
        store = UnitStore(tmp_path)
        store.save(unit, arrays)
        store.close()
    (record,) = (tmp_path / "unit_records").iterdir()
    entry = json.loads(record.read_text())
    assert [array["key"] for array in entry["arrays"]] == [piece.target.key for piece in unit.pieces]
    place = tmp_path / "units" / unit.name
    assert entry["files"] == {
        file.relative_to(place).as_posix(): [file.stat().st_size, f"{zlib.crc32(file.read_bytes()):08x}"]
        for file in place.rglob("*")
        if file.is_file()
    }


def test_no_record_remains_in_a_finished_folder(pristine):
    assert sorted(path.name for path in pristine.iterdir()) == ["config.json", "oled_checkpoint.json", "units"]


def test_a_pipe_among_the_files_of_a_unit_is_a_clear_error(converted):
    file = converted / "units" / UNIT / "_METADATA"
    with open_checkpoint(converted) as checkpoint:
        (unit,) = (unit for unit in checkpoint.units() if unit.name == UNIT)
        file.unlink()
        os.mkfifo(file)
        with pytest.raises(CheckpointError, match="_METADATA holds 0 bytes of"):
            checkpoint.read(unit)
    assert "_METADATA holds 0 bytes of" in message_for(converted)


def test_a_full_disk_is_told_before_orbax_meets_it(tmp_path, monkeypatch):
    """Orbax answers a disk that fills up under it with tracebacks, and may wait for minutes."""
    calls = []
    monkeypatch.setattr(ocp.StandardCheckpointer, "save", lambda *arguments: calls.append(arguments))
    usage = shutil.disk_usage(tmp_path)._replace(free=7)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    target = Target("a", (2,), np.dtype(np.float32))
    store = UnitStore(tmp_path)
    with pytest.raises(OSError, match="No space left") as caught:
        store.save(Unit("u", (Piece(target, 0, 2),)), [np.zeros(2, np.float32)])
    store.close()
    assert caught.value.errno == errno.ENOSPC
    assert not calls


def test_writes_under_way_when_a_save_fails_say_nothing_more(tmp_path, monkeypatch):
    """What tensorstore's threads raise then, where nobody can catch it; anything else is still reported."""
    reported = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: reported.append(str(unraisable.exc_value)))
    hook = sys.unraisablehook

    class Raises:
        def __init__(self, text):
            self.text = text

        def __del__(self):
            raise RuntimeError(self.text)

    def fail(*_, **__):
        for text in ("Event loop is closed", "something else"):
            Raises(text)
        raise ValueError(FULL)

    monkeypatch.setattr(orbax_format, "_SECONDS_TO_SETTLE", 0)
    monkeypatch.setattr(ocp.StandardCheckpointer, "save", fail)
    target = Target("a", (2,), np.dtype(np.float32))
    store = UnitStore(tmp_path)
    with pytest.raises(OSError, match="No space left"):
        store.save(Unit("u", (Piece(target, 0, 2),)), [np.zeros(2, np.float32)])
    store.close()
    assert reported == ["something else"]
    assert sys.unraisablehook is hook


# What tensorstore said on a full disk.
FULL = (
    'RESOURCE_EXHAUSTED: Error writing "a/0.0.0" in OCDBT database at local file "u2.orbax-checkpoint-tmp/": '
    "Failed to write 44122112 bytes to file 4: No space left on device [os_error_code='28']"
)


@pytest.mark.parametrize(("text", "kind"), [(FULL, OSError), ("INTERNAL: something else", ValueError)])
def test_a_full_disk_is_told_from_other_failures(tmp_path, monkeypatch, text, kind):
    def fail(*_, **__):
        raise ValueError(text)

    store = UnitStore(tmp_path)
    monkeypatch.setattr(ocp.StandardCheckpointer, "save", fail)
    target = Target("a", (2,), np.dtype(np.float32))
    with pytest.raises(kind) as caught:
        store.save(Unit("u", (Piece(target, 0, 2),)), [np.zeros(2, np.float32)])
    store.close()
    assert getattr(caught.value, "errno", None) == (errno.ENOSPC if kind is OSError else None)


def test_orbax_logs_nothing_of_what_is_raised_as_an_error(tmp_path, monkeypatch, caplog):
    def fail(*_, **__):
        for path in ("/site-packages/orbax/checkpoint/x.py", "/site-packages/other/x.py"):
            logging.getLogger("absl").handle(logging.LogRecord("absl", logging.ERROR, path, 1, path, (), None))
        raise ValueError(FULL)

    store = UnitStore(tmp_path)
    monkeypatch.setattr(ocp.StandardCheckpointer, "save", fail)
    target = Target("a", (2,), np.dtype(np.float32))
    with pytest.raises(OSError, match="No space left"):
        store.save(Unit("u", (Piece(target, 0, 2),)), [np.zeros(2, np.float32)])
    store.close()
    assert [record.pathname for record in caplog.records if record.name == "absl"] == ["/site-packages/other/x.py"]
    assert not logging.getLogger("absl").filters


def test_leftovers_of_killed_saves_are_removed_and_units_are_kept(converted):
    leftover = converted / "units" / f"{UNIT}.orbax-checkpoint-tmp"
    leftover.mkdir()
    (leftover / "half").write_bytes(b"x")
    store = UnitStore(converted)
    store.remove_leftovers()
    store.close()
    assert not leftover.exists()
    open_checkpoint(converted).close()
