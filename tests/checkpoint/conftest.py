"""Checkpoint folders made from the golden fixtures, in every layout and with every defect."""

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

GOLDEN = Path(__file__).parents[1] / "golden"
FOLDERS = sorted(path.parent.name for path in GOLDEN.glob("*/config.json"))


def load_published(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a folder, read by the reference library."""
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= safetensors.numpy.load_file(file)
    return tensors


class Source:
    """One fixture, and ``write``, which puts given tensors into a new folder beside a copy of its config."""

    def __init__(self, name: str, root: Path):
        self.folder = GOLDEN / name
        self.tensors = load_published(self.folder)
        self.config = json.loads((self.folder / "config.json").read_text())
        self._root = root

    def write(self, tensors: dict[str, np.ndarray], *, shards: int = 0, name: str = "checkpoint", **config) -> Path:
        """A single file, or ``shards`` shards under an index, tensors dealt out in the given order."""
        folder = self._root / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(self.config | config))
        if not shards:
            safetensors.numpy.save_file(tensors, folder / "model.safetensors")
            return folder
        files = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
        weight_map = {tensor: files[i % shards] for i, tensor in enumerate(tensors)}
        for file in files:
            part = {tensor: tensors[tensor] for tensor, place in weight_map.items() if place == file}
            safetensors.numpy.save_file(part, folder / file)
        index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return folder


@pytest.fixture
def tiny(tmp_path):
    """The plain float32 fixture: 4 layers, layer 0 dense, 16 experts."""
    return Source("llada2-tiny-f32", tmp_path)


@pytest.fixture
def tiny_bf16(tmp_path):
    """The bfloat16 fixture with float32 expert biases."""
    return Source("llada2-tiny-bf16-sharded", tmp_path)


@pytest.fixture(params=FOLDERS)
def any_source(request, tmp_path):
    """Each fixture in turn."""
    return Source(request.param, tmp_path)
