"""Paths and files from outside: what cannot be used is told, what is written is whole."""

import errno
import os
from pathlib import Path

import pytest

from oled_jax import files
from oled_jax.errors import CheckpointError


def test_a_path_comes_back_as_one():
    assert files.checked_path("a/b") == files.checked_path(Path("a/b")) == Path("a/b")
    assert files.checked_path("größe ☃") == Path("größe ☃")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("a\0b", "'a\\x00b' cannot be the path of a checkpoint folder: it holds a NUL character"),
        (Path("a\udcffb"), "'a\\udcffb' cannot be .* character 1 is no valid Unicode"),
        ("\ud800", "'\\ud800' cannot be .* character 0 is no valid Unicode"),
        (b"a", "b'a' cannot be"),
        (3, "3 cannot be"),
        (None, "None cannot be"),
    ],
)
def test_what_cannot_be_a_path_is_shown_in_printable_form(path, words):
    with pytest.raises(CheckpointError, match=words.replace("\\", r"\\")) as caught:
        files.checked_path(path)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(("make", "words"), [(os.mkfifo, "a named pipe"), (os.mkdir, "a folder")])
def test_only_regular_files_are_opened(tmp_path, make, words):
    make(tmp_path / "odd")
    for function in (files.open_regular, files.read_bytes, files.sync_file):
        with pytest.raises(OSError, match=f"it is {words}, not a regular file") as caught:
            function(tmp_path / "odd")
        assert caught.value.strerror.startswith("it is")


def test_a_device_is_not_opened_even_through_a_link(tmp_path):
    (tmp_path / "link").symlink_to("/dev/zero")
    with pytest.raises(OSError, match="it is a device"):
        files.read_bytes(tmp_path / "link")


def test_a_file_is_read_whole_through_a_link_too(tmp_path):
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    assert files.read_bytes(tmp_path / "link") == b"content"


def test_an_absent_file_stays_an_absent_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        files.read_bytes(tmp_path / "absent")


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "file"
    files.write_whole(path, "älter")
    assert path.read_text(encoding="utf-8") == "älter"

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        files.write_whole(path, b"new")
    assert path.read_text(encoding="utf-8") == "älter"
    assert list(tmp_path.iterdir()) == [path]


def test_lacking_room_names_bytes_or_files(tmp_path, monkeypatch):
    assert files.lacking_room(tmp_path, 1, 1) is None
    free = files.shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: free)
    assert files.lacking_room(tmp_path, 1000, 1) is None
    assert files.lacking_room(tmp_path, 3000, 1) == "3,000 bytes are needed and 1,000 available; free 2,000 more"

    class Counted:
        f_files, f_favail = 100, 10

    monkeypatch.setattr(os, "statvfs", lambda _: Counted)
    assert files.lacking_room(tmp_path, 1, 10) is None
    words = "12 files (inodes) are needed and 10 available; delete 2"
    assert files.lacking_room(tmp_path, 1, 12) == words
    Counted.f_files = 0  # a file system without such a limit
    assert files.lacking_room(tmp_path, 1, 12) is None
