"""Which folder is which, and what is said about one that is none."""

import json
import os

import pytest

from oled_jax.checkpoint import Checkpoint, open_checkpoint
from oled_jax.errors import CheckpointError, ConfigError


def message_for(path, kind=CheckpointError):
    with pytest.raises(kind) as caught:
        open_checkpoint(path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


def test_every_fixture_opens(any_source):
    with open_checkpoint(any_source.folder) as checkpoint:
        assert isinstance(checkpoint, Checkpoint)
        assert checkpoint.config.num_experts == any_source.config["num_experts"]


def test_no_folder(tmp_path):
    assert "does not exist" in message_for(tmp_path / "absent")


def test_a_file_instead_of_a_folder(tiny):
    assert "give the folder" in message_for(tiny.folder / "model.safetensors")


def test_no_config(tmp_path):
    assert "config.json does not exist" in message_for(tmp_path, ConfigError)


def test_another_model_type(tiny):
    folder = tiny.write(tiny.tensors, model_type="llama")
    assert "model_type is 'llama'" in message_for(folder, ConfigError)


def test_a_config_without_a_required_key(tiny):
    folder = tiny.write(tiny.tensors)
    config = {k: v for k, v in tiny.config.items() if k not in ("num_experts", "vocab_size")}
    (folder / "config.json").write_text(json.dumps(config))
    message = message_for(folder, ConfigError)
    assert "num_experts is missing" in message
    assert "vocab_size is missing" in message


@pytest.mark.parametrize(
    ("files", "hint"),
    [
        ([], "expected model.safetensors"),
        (["model-00001-of-00002.safetensors"], "download the index"),
        (["pytorch_model.bin"], "only safetensors are read"),
        (["oled_conversion.json"], "unfinished conversion"),
    ],
)
def test_neither_format(tiny, tmp_path, files, hint):
    (tmp_path / "config.json").write_text(json.dumps(tiny.config))
    for file in files:
        (tmp_path / file).touch()
    message = message_for(tmp_path)
    assert "holds no checkpoint" in message
    assert hint in message


def test_an_unfinished_conversion(tiny):
    folder = tiny.write(tiny.tensors, name="converted.partial")
    (folder / "oled_conversion.json").write_text("{}")
    assert "unfinished conversion" in message_for(folder)
    assert "converted.partial" in message_for(folder.with_name("converted"))
    assert "unfinished conversion" in message_for(folder.with_name("converted"))


@pytest.mark.parametrize("path", ["a\0b", "a\udcffb", b"bytes", None, 3, ["a"]])
def test_what_no_folder_can_be_called(path):
    with pytest.raises(CheckpointError, match="cannot be the path of a checkpoint folder") as caught:
        open_checkpoint(path)
    assert str(caught.value).isprintable()


def test_a_name_that_is_too_long(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be opened: File name too long"):
        open_checkpoint(tmp_path / ("x" * 300))


ODD = {
    "a named pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": os.mkdir,
}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("config.json", ConfigError),
        ("model.safetensors", CheckpointError),
        ("model.safetensors.index.json", CheckpointError),
        ("oled_checkpoint.json", CheckpointError),
    ],
)
def test_files_of_other_kinds_are_named_and_do_not_make_it_wait(tiny, name, error, kind):
    folder = tiny.write(tiny.tensors)
    (folder / name).unlink(missing_ok=True)
    ODD[kind](folder / name)
    message = message_for(folder, error)
    assert f"{name} cannot be" in message
    assert f"it is {kind}, not a regular file" in message
    assert "is missing" not in message


def test_a_shard_that_is_a_pipe_is_named_with_what_else_is_wrong(tiny):
    folder = tiny.write(tiny.tensors, shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    os.mkfifo(folder / "model-00002-of-00003.safetensors")
    (folder / "model-00003-of-00003.safetensors").unlink()
    message = message_for(folder)
    assert "2 problems" in message
    assert "model-00002-of-00003.safetensors cannot be opened: it is a named pipe" in message
    assert "shard model-00003-of-00003.safetensors is missing" in message
