"""Folders to convert, and a process whose platform the command does not change for other tests."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy

from oled_jax.convert.cli import main

GOLDEN = Path(__file__).parents[1] / "golden"
COMPANIONS = {
    "tokenizer.json": b'{"a": 1}',
    "tokenizer_config.json": b"{}",
    "chat_template.jinja": b"{{ x }}\n",
    "generation_config.json": b"{ }",
    "modeling_llada2_moe.py": b"# code\n",
}


@pytest.fixture(autouse=True)
def platform():
    """Starts the backend that the other tests use before the command restricts the process to the CPU."""
    jax.devices()
    chosen = jax.config.jax_platforms
    yield
    jax.config.update("jax_platforms", chosen)


@pytest.fixture
def published(tmp_path):
    """The bfloat16 fixture (three shards, float32 biases) with files that travel along and files that do not."""
    folder = shutil.copytree(GOLDEN / "llada2-tiny-bf16-sharded", tmp_path / "published")
    for name, content in COMPANIONS.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture
def command(capsys):
    """Runs ``oled-convert``; returns exit code, standard output and standard error."""

    def run(*arguments):
        code = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def load():
    """All tensors of a folder as (dtype, shape, bytes), read by the reference library through the index."""

    def read(folder):
        index = folder / "model.safetensors.index.json"
        files = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
        tensors = {}
        for file in files:
            tensors |= safetensors.numpy.load_file(folder / file)
        return {name: (t.dtype, t.shape, np.ascontiguousarray(t).tobytes()) for name, t in tensors.items()}

    return read
