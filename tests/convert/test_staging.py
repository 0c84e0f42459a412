"""The working folder beside a destination: whose it is, who may work in it, and which names it may have."""

import json
import os

import pytest

from oled_jax.checkpoint import open_checkpoint
from oled_jax.checkpoint.orbax_format import UnitStore
from oled_jax.convert.staging import Staging, check_destination
from oled_jax.errors import CheckpointError

RECORD = "oled_conversion.json"


def one_line(err):
    lines = [line for line in err.splitlines() if line.strip()]
    assert len(lines) == 1, err
    return lines[0]


@pytest.mark.parametrize("record", [None, "{", "[]"])
def test_a_partial_folder_of_someone_else_is_left_alone(published, tmp_path, command, record):
    partial = tmp_path / "converted.partial"
    partial.mkdir()
    (partial / "precious").touch()
    if record is not None:
        (partial / "oled_conversion.json").write_text(record)
    code, _, err = command("to-orbax", published, tmp_path / "converted")
    assert code == 2
    assert "converted.partial" in one_line(err)
    assert (partial / "precious").exists()


def test_two_conversions_do_not_share_a_destination(published, tmp_path, command, monkeypatch):
    inner = []
    real = UnitStore.save

    def save(self, unit, arrays):
        if not inner:
            inner.append(None)
            inner[0] = command("to-orbax", published, tmp_path / "converted")
        return real(self, unit, arrays)

    monkeypatch.setattr(UnitStore, "save", save)
    assert command("to-orbax", published, tmp_path / "converted")[0] == 0
    assert inner[0][0] == 2
    assert "in use: another conversion is writing it" in inner[0][2]
    assert command("compare", published, tmp_path / "converted")[0] == 0


@pytest.mark.parametrize("verb", ["to-orbax", "to-hf"])
@pytest.mark.parametrize("record", [False, True])
def test_what_a_kill_right_at_the_start_leaves_is_resumed(published, tmp_path, command, verb, record):
    partial = tmp_path / "converted.partial"
    partial.mkdir()
    if record:
        (partial / RECORD).touch()
    assert command(verb, published, tmp_path / "converted")[0] == 0
    assert not partial.exists()
    assert not (tmp_path / "converted" / RECORD).exists()
    assert command("compare", published, tmp_path / "converted")[0] == 0


def test_a_file_in_place_of_the_working_folder_is_left_alone(published, tmp_path, command):
    (tmp_path / "converted.partial").write_text("precious")
    code, _, err = command("to-orbax", published, tmp_path / "converted")
    assert code == 2
    assert "converted.partial exists and is no unfinished conversion: delete or move it" in one_line(err)
    assert (tmp_path / "converted.partial").read_text() == "precious"


def test_a_pipe_as_the_record_does_not_make_it_wait(published, tmp_path, command):
    (tmp_path / "converted.partial").mkdir()
    os.mkfifo(tmp_path / "converted.partial" / RECORD)
    code, _, err = command("to-orbax", published, tmp_path / "converted")
    assert code == 2
    assert f"{RECORD} cannot be opened: it is a named pipe" in one_line(err)


def test_a_record_that_cannot_be_written_leaves_nothing(published, tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with open_checkpoint(published) as source, pytest.raises(CheckpointError, match="No space left on device"):
        Staging(source, tmp_path / "converted", "to-orbax", {})
    assert not (tmp_path / "converted.partial").exists()


def test_work_that_was_finished_between_opening_and_locking_is_not_resumed(published, tmp_path, monkeypatch):
    """The other conversion renames its folder after this one has opened the record there."""
    destination = tmp_path / "converted"
    real = Staging._lock_record

    def finish_first(staging):
        os.rename(staging.work, destination)
        real(staging)

    monkeypatch.setattr(Staging, "_lock_record", finish_first)
    with open_checkpoint(published) as source, pytest.raises(CheckpointError, match="in use"):
        Staging(source, destination, "to-orbax", {})


def test_the_record_names_no_path(published, tmp_path):
    with open_checkpoint(published) as source, Staging(source, tmp_path / "converted", "to-orbax", {}):
        record = json.loads((tmp_path / "converted.partial" / RECORD).read_text())
    assert set(record) == {"command", "settings", "fingerprint"}
    assert all(str(tmp_path) not in str(value) for value in record.values())


@pytest.mark.parametrize(
    "make", [os.mkfifo, lambda path: path.symlink_to("nowhere"), lambda p: p.symlink_to("/dev/zero")]
)
@pytest.mark.parametrize("verb", ["to-orbax", "to-hf"])
def test_companions_that_are_no_regular_files_are_named_together(published, tmp_path, command, verb, make):
    for name in ("tokenizer.json", "README.md"):
        (published / name).unlink(missing_ok=True)
        make(published / name)
    code, _, err = command(verb, published, tmp_path / "converted")
    assert code == 2
    assert "2 problems: README.md is no regular file, or a link to nothing" in one_line(err)
    assert "tokenizer.json is no regular file" in err
    assert not (tmp_path / "converted.partial").exists()


@pytest.mark.parametrize("name", ["a\0b", "a\udcffb", "\ud800"])
def test_a_name_that_no_folder_can_have_is_one_error(published, tmp_path, command, name):
    for source, destination in ((published, tmp_path / name), (tmp_path / name, tmp_path / "converted")):
        code, _, err = command("to-orbax", source, destination)
        assert code == 2
        assert "cannot be the path of a checkpoint folder" in one_line(err)
        assert err.strip().isprintable()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["published"]


def test_a_destination_needs_a_name_of_its_own(published, tmp_path):
    for destination in (tmp_path / "absent" / "..", tmp_path / "x.partial", published, tmp_path):
        with pytest.raises(CheckpointError):
            check_destination(published, destination)
    check_destination(published, tmp_path / "absent")


def test_links_that_lead_in_circles_are_one_line(published, tmp_path, command):
    (tmp_path / "loop").symlink_to("loop")
    assert "does not exist" in one_line(command("to-orbax", tmp_path / "loop", tmp_path / "converted")[2])
    code, _, err = command("to-orbax", published, tmp_path / "loop" / "converted")
    assert code == 2
    assert "symbolic links" in one_line(err)
