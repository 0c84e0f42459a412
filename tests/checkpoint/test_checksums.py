"""Checksums of a folder's files: what changed is found and named, whatever it is."""

import os
import socket
import tracemalloc
import zlib

import pytest

from oled_jax.checkpoint import checksums
from oled_jax.checkpoint.checksums import CHUNK_BYTES, FileSum, content_problems, size_problems, sum_folder

LARGE = bytes(range(256)) * (CHUNK_BYTES // 128) + b"rest"  # two chunks and a bit


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "unit"
    (folder / "d" / "deep").mkdir(parents=True)
    (folder / "d" / "deep" / "large").write_bytes(LARGE)
    (folder / "d" / "small").write_bytes(b"abc")
    (folder / "empty").touch()
    return folder


def test_every_file_is_summed_by_its_path(folder):
    assert sum_folder(folder) == {
        "d/deep/large": FileSum(len(LARGE), f"{zlib.crc32(LARGE):08x}"),
        "d/small": FileSum(3, "352441c2"),
        "empty": FileSum(0, "00000000"),
    }


def test_an_intact_folder_has_no_problems(folder):
    sums = sum_folder(folder)
    assert size_problems(folder, sums) == content_problems(folder, sums) == []


def test_what_changed_is_named_all_at_once(folder):
    sums = sum_folder(folder)
    (folder / "d" / "small").unlink()
    (folder / "d" / "more").touch()
    (folder / "empty").write_bytes(b"x")
    expected = ["d/small is missing", "d/more does not belong there", "empty holds 1 bytes of 0"]
    assert size_problems(folder, sums) == content_problems(folder, sums) == expected


@pytest.mark.parametrize("position", [0, CHUNK_BYTES - 1, CHUNK_BYTES, len(LARGE) - 1])
def test_one_bit_is_found_wherever_it_is(folder, position):
    sums = sum_folder(folder)
    damaged = bytearray(LARGE)
    damaged[position] ^= 16
    (folder / "d" / "deep" / "large").write_bytes(damaged)
    assert size_problems(folder, sums) == []
    found, expected = f"{zlib.crc32(damaged):08x}", sums["d/deep/large"].crc32
    assert content_problems(folder, sums) == [f"d/deep/large has the CRC-32 {found}, and {expected} was written"]


def test_pipes_sockets_devices_and_dead_links_do_not_make_it_wait(folder):
    sums = sum_folder(folder)
    (folder / "empty").unlink()
    os.mkfifo(folder / "empty")
    assert content_problems(folder, sums) == ["empty cannot be read: it is a named pipe, not a regular file"]
    (folder / "empty").unlink()
    (folder / "empty").symlink_to("/dev/zero")
    assert content_problems(folder, sums) == ["empty cannot be read: it is a device, not a regular file"]
    (folder / "empty").unlink()
    with socket.socket(socket.AF_UNIX) as server:
        here = os.open(folder, os.O_RDONLY)  # the path itself may be too long for a socket
        server.bind(f"/proc/self/fd/{here}/empty")
        os.close(here)
        assert content_problems(folder, sums) == ["empty cannot be read: it is a socket, not a regular file"]
    (folder / "empty").unlink()
    (folder / "empty").symlink_to("nowhere")
    assert content_problems(folder, sums) == ["empty is missing"]


def test_a_folder_that_is_gone_lacks_every_file(folder, tmp_path):
    assert content_problems(tmp_path / "gone", sum_folder(folder)) == [
        "d/deep/large is missing",
        "d/small is missing",
        "empty is missing",
    ]


def test_memory_does_not_grow_with_the_file(tmp_path):
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(100 * CHUNK_BYTES)
    tracemalloc.start()
    try:
        checksums.crc32(tmp_path / "sparse")
        assert tracemalloc.get_traced_memory()[1] < 2 * CHUNK_BYTES
    finally:
        tracemalloc.stop()


def test_json_and_back(folder):
    sums = sum_folder(folder)
    assert checksums.from_json(checksums.to_json(sums)) == sums


@pytest.mark.parametrize(
    "raw",
    [
        None,
        {},
        [],
        {"a": 3},
        {"a": [1]},
        {"a": ["1", "00000000"]},
        {"a": [True, "00000000"]},
        {"a": [1, 5]},
        {"a": [1, "0000000G"]},
        {"/etc/passwd": [1, "00000000"]},
        {"../a": [1, "00000000"]},
        {"a//b": [1, "00000000"]},
    ],
)
def test_anything_else_is_no_list_of_sums(raw):
    assert checksums.from_json(raw) is None
