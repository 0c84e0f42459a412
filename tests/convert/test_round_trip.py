"""There and back: bit-identical tensors, the same config, and the files that travel along."""

import json
import shutil

import numpy as np
import pytest
import safetensors.numpy

from oled_jax.checkpoint import layout, open_checkpoint
from oled_jax.convert.to_hf import plan_shards

from .conftest import COMPANIONS, GOLDEN

FOLDERS = sorted(path.parent.name for path in GOLDEN.glob("*/config.json"))


@pytest.mark.parametrize(
    ("name", "unit_bytes", "shard_size"),
    [(name, layout.UNIT_BYTES, "5GB") for name in FOLDERS] + [("llada2-tiny-bf16-sharded", 60_000, "100KB")],
)
def test_tensors_come_back_bit_for_bit(name, unit_bytes, shard_size, tmp_path, command, load, monkeypatch):
    monkeypatch.setattr(layout, "UNIT_BYTES", unit_bytes)  # small units: tables cut by rows, experts by groups
    source, converted, back = GOLDEN / name, tmp_path / "converted", tmp_path / "back"
    assert command("to-orbax", source, converted)[0] == 0
    assert command("to-hf", converted, back, "--max-shard-size", shard_size)[0] == 0
    assert load(back) == load(source)
    assert (back / "config.json").read_bytes() == (source / "config.json").read_bytes()
    assert not list(tmp_path.glob("*.partial"))
    for a, b in ((source, converted), (converted, back), (source, back)):
        code, out, _ = command("compare", a, b)
        assert (code, out.startswith("equal: ")) == (0, True)


def test_companions_travel_along_and_nothing_else(published, tmp_path, command):
    converted, back = tmp_path / "converted", tmp_path / "back"
    assert command("to-orbax", published, converted)[0] == 0
    assert command("to-hf", converted, back)[0] == 0
    assert {p.name for p in converted.iterdir()} == {*COMPANIONS, "config.json", "oled_checkpoint.json", "units"}
    assert {p.name for p in back.iterdir()} == {*COMPANIONS, "config.json", "model.safetensors"}
    for name, content in COMPANIONS.items():
        assert (converted / name).read_bytes() == (back / name).read_bytes() == content


@pytest.mark.parametrize("through_orbax", [True, False])
def test_stacked_experts_come_back_one_by_one(through_orbax, published, tmp_path, command, load):
    original = load(published)
    tensors = {}
    for file in published.glob("*.safetensors"):
        tensors |= safetensors.numpy.load_file(file)
    stacked = tmp_path / "stacked"
    stacked.mkdir()
    shutil.copy(published / "config.json", stacked)
    for i in (1, 2, 3):
        prefix = f"model.layers.{i}.mlp.experts"
        for matrix in ("gate_proj", "up_proj", "down_proj"):
            parts = [tensors.pop(f"{prefix}.{e}.{matrix}.weight") for e in range(16)]
            tensors[f"{prefix}.{matrix}"] = np.stack(parts)
    safetensors.numpy.save_file(tensors, stacked / "model.safetensors")
    source = stacked
    if through_orbax:
        source = tmp_path / "converted"
        assert command("to-orbax", stacked, source)[0] == 0
    assert command("to-hf", source, tmp_path / "back")[0] == 0
    assert load(tmp_path / "back") == original


def test_shards_are_named_sized_and_indexed_as_published(published, tmp_path, command):
    back = tmp_path / "back"
    assert command("to-hf", published, back, "--max-shard-size", "200KB")[0] == 0
    index = json.loads((back / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert shards == [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    assert shards == sorted(p.name for p in back.glob("*.safetensors"))
    assert len(shards) == 5
    total = 0
    for shard in shards:
        tensors = safetensors.numpy.load_file(back / shard)
        size = sum(t.nbytes for t in tensors.values())
        assert size <= 200_000
        assert {name for name, place in index["weight_map"].items() if place == shard} == set(tensors)
        with safetensors.safe_open(back / shard, "numpy") as file:
            assert file.metadata() == {"format": "pt"}
        total += size
    assert index["metadata"]["total_size"] == total == 851_520


def test_a_tensor_larger_than_a_shard_gets_its_own(published):
    with open_checkpoint(published) as source:
        shards = plan_shards(source, 1)
        assert len(shards) == 189
        assert all(len(shard) == 1 for shard in shards.values())


def test_the_shard_order_of_the_source_does_not_matter(published, tmp_path, command, load):
    index = json.loads((published / "model.safetensors.index.json").read_text())
    renamed = {f"model-0000{i}-of-00003.safetensors": f"{'cab'[i - 1]}.safetensors" for i in (1, 2, 3)}
    shuffled = shutil.copytree(published, tmp_path / "shuffled")
    for old, new in renamed.items():
        (shuffled / old).rename(shuffled / new)
    index["weight_map"] = {k: renamed[v] for k, v in sorted(index["weight_map"].items(), reverse=True)}
    (shuffled / "model.safetensors.index.json").write_text(json.dumps(index))
    assert command("to-orbax", shuffled, tmp_path / "converted")[0] == 0
    assert command("compare", published, tmp_path / "converted")[0] == 0
