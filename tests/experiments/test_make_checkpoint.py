"""The random checkpoint: the published layout, the same values whatever the sharding, one line for a mistake."""

import json
from pathlib import Path

import make_checkpoint
import ml_dtypes  # noqa: F401  (names bfloat16 for numpy, which safetensors asks)
import numpy as np
import pytest
from safetensors import safe_open

from oled_jax.checkpoint import layout
from oled_jax.config import ModelConfig
from oled_jax.tokenizer import decode, encode_chat, load_tokenizer

TINY_GEOMETRY = {
    "--layers": 3,
    "--hidden": 32,
    "--heads": 4,
    "--kv-heads": 2,
    "--head-dim": 8,
    "--intermediate": 48,
    "--moe-intermediate": 16,
    "--experts": 8,
    "--experts-per-token": 2,
    "--groups": 4,
    "--topk-groups": 2,
    "--vocab": 300,
    "--max-position": 256,
}
TINY = [str(part) for pair in TINY_GEOMETRY.items() for part in pair]
TINY_22 = [*TINY, "--preset", "llada2.2-mini", "--expert-capacity", "4", "--routing-block", "8"]


def make(destination: Path, *options: str, base: list[str] = TINY) -> dict[str, np.ndarray]:
    """Runs the command line and reads every tensor back."""
    assert make_checkpoint.main([str(destination), *base, *options]) == 0
    return read(destination)


def read(folder: Path) -> dict[str, np.ndarray]:
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "numpy") as file:
            assert file.metadata() == {"format": "pt"}
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
    return tensors


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(a[k].tobytes() == b[k].tobytes() for k in a)


def test_published_layout(tmp_path):
    tensors = make(tmp_path / "a", "--bias-dtype", "float32")
    config = ModelConfig.from_hf(tmp_path / "a")
    assert {name: t.shape for name, t in tensors.items()} == layout.published_shapes(config)
    for name, tensor in tensors.items():
        assert tensor.dtype == ("float32" if name.endswith("expert_bias") else "bfloat16"), name
    assert {path.name for path in (tmp_path / "a").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    assert list(tmp_path.iterdir()) == [tmp_path / "a"]


@pytest.mark.parametrize(
    ("base", "options", "expected"),
    [
        (TINY, (), "bfloat16"),
        (TINY, ("--dtype", "float32"), "float32"),
        ([*TINY, "--preset", "llada2.1-mini"], (), "float32"),
        ([*TINY, "--preset", "llada2.1-mini"], ("--bias-dtype", "bfloat16"), "bfloat16"),
        (TINY_22, (), "float32"),
    ],
)
def test_expert_bias_has_the_published_dtype_unless_told(tmp_path, capsys, base, options, expected):
    tensors = make(tmp_path / "a", *options, base=base)
    assert {t.dtype.name for name, t in tensors.items() if name.endswith("expert_bias")} == {expected}
    rest = "float32" if "--dtype" in options else "bfloat16"
    assert {t.dtype.name for name, t in tensors.items() if not name.endswith("expert_bias")} == {rest}
    assert f"({rest}, expert_bias {expected})" in capsys.readouterr().out


def test_values_depend_on_seed_and_name_only(tmp_path):
    whole = make(tmp_path / "whole", "--dtype", "float32")
    assert same(whole, make(tmp_path / "sharded", "--dtype", "float32", "--max-shard-size", "20KB"))
    deeper = make(tmp_path / "deeper", "--dtype", "float32", "--layers", "4")
    assert same(whole, {name: deeper[name] for name in whole})
    rounded = make(tmp_path / "rounded")
    assert same(rounded, {name: t.astype(layout.DTYPES["bfloat16"]) for name, t in whole.items()})
    other = make(tmp_path / "other", "--dtype", "float32", "--seed", "1")
    assert not any(np.array_equal(other[name], whole[name]) for name in whole)


def test_tensors_differ_and_have_the_scale_asked_for(tmp_path):
    tensors = make(tmp_path / "a", "--dtype", "float32", "--hidden", "512", "--moe-intermediate", "300")
    gates = [layout.expert_name(1, expert, "gate_proj") for expert in range(8)]
    experts = np.stack([tensors[name].ravel() for name in gates])
    assert np.abs(np.corrcoef(experts) - np.eye(8)).max() < 0.02
    assert np.allclose(experts.std(axis=1), 512**-0.5, rtol=0.01)
    down = tensors[layout.expert_name(1, 0, "down_proj")]
    assert np.isclose(down.std(), 300**-0.5, rtol=0.01)
    assert np.isclose(tensors["model.norm.weight"].mean(), 1.0, atol=0.03)


def test_a_tensor_of_many_chunks_is_normal_throughout():
    weights = make_checkpoint.RandomWeights(0)
    entry = make_checkpoint.Entry("x", (1000, 999), layout.DTYPES["float32"])
    chunks = list(weights.chunks(entry))
    assert len(chunks) > 3 and all(chunk.shape[1:] == (999,) for chunk in chunks)
    values = np.concatenate(chunks)
    assert values.shape == entry.shape
    assert np.allclose(values.std(axis=1) * 999**0.5, 1, atol=0.15)
    assert not np.array_equal(chunks[0], chunks[1])
    inside = np.mean(np.abs(values) * 999**0.5 < 1)
    assert np.isclose(inside, 0.6827, atol=0.005)


def test_shards_hold_what_the_index_says(tmp_path):
    make(tmp_path / "a", "--max-shard-size", "20KB")
    index = json.loads((tmp_path / "a" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "a").glob("*.safetensors"))
    assert files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    assert len(files) > 3
    total = 0
    found = {}
    for name in files:
        with safe_open(tmp_path / "a" / name, "numpy") as file:
            sizes = {key: file.get_tensor(key).nbytes for key in file.keys()}  # noqa: SIM118
        assert sum(sizes.values()) <= 20_000 or len(sizes) == 1
        found |= dict.fromkeys(sizes, name)
        total += sum(sizes.values())
    assert index == {"metadata": {"total_size": total}, "weight_map": found}


@pytest.mark.parametrize("base", [TINY, TINY_22], ids=["2.0", "2.2"])
def test_tokenizer_and_special_ids_of_a_small_vocabulary(tmp_path, base):
    make(tmp_path / "a", base=base)
    config = ModelConfig.from_hf(tmp_path / "a")
    tokenizer = load_tokenizer(tmp_path / "a")
    vocabulary = tokenizer.get_vocab()
    end, role_end = vocabulary["<|endoftext|>"], vocabulary["<|role_end|>"]
    assert (config.eos_token_id, config.pad_token_id) == (end, end)
    assert config.mask_token_id == vocabulary["<|mask|>"]
    edits = [config.delete_token_id, config.split_token_id]
    assert edits == ([261, 262] if config.block_routing else [None, None])
    assert max(vocabulary.values()) < config.vocab_size
    stops = json.loads((tmp_path / "a" / "generation_config.json").read_text())["eos_token_id"]
    assert stops == ([end, role_end] if config.block_routing else end)

    text = "naïve 日本語 \t\n\x00 🙂 \r end"
    assert tokenizer.encode(text, add_special_tokens=False) == list(text.encode())
    assert decode(tokenizer, [*text.encode(), end, 299]) == text


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_chat_template_is_the_literal_form(tmp_path, system):
    make(tmp_path / "a")
    tokenizer = load_tokenizer(tmp_path / "a")
    ids = encode_chat(tokenizer, "Hi <there>", system=system)
    first = "" if system is None else "Be brief.\n"
    assert tokenizer.decode(ids) == (
        f"<role>SYSTEM</role>{first}detailed thinking off<|role_end|>"
        "<role>HUMAN</role>Hi <there><|role_end|><role>ASSISTANT</role>"
    )
    assert ids[0] == tokenizer.get_vocab()["<role>"]
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    assert tokenizer.apply_chat_template(turns, tokenize=False).endswith(
        "<role>ASSISTANT</role>b<|role_end|><role>HUMAN</role>c<|role_end|>"
    )


def test_published_vocabulary_keeps_its_ids(tmp_path):
    make(tmp_path / "a", "--vocab", "157184", "--hidden", "8")
    config = ModelConfig.from_hf(tmp_path / "a")
    assert (config.pad_token_id, config.eos_token_id, config.mask_token_id) == (156892, None, None)
    vocabulary = load_tokenizer(tmp_path / "a").get_vocab()
    assert [vocabulary[t] for t in ("<|endoftext|>", "<|mask|>", "<|role_end|>")] == [156892, 156895, 156900]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--preset", "llada3"], "unknown preset 'llada3'"),
        (["--experts", "6"], "num_experts 6 does not split into n_group 4 groups"),
        (["--experts-per-token", "0"], "num_experts_per_tok is 0, must be positive"),
        (["--kv-heads", "3"], "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
        (["--vocab", "100"], "vocab_size 100 is too small for the 256 bytes and 7 special tokens: at least 263"),
        (["--max-shard-size", "5 parsecs"], "argument --max-shard-size: '5 parsecs' is no number of bytes"),
        (["--max-shard-size", "0GB"], "argument --max-shard-size: '0GB' is no number of bytes"),
        (["--layers", "many"], "argument --layers: invalid int value: 'many'"),
        (["--hidden", "100000000", "--vocab", "100000000"], "bytes, and its disk has"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, capsys, options, message):
    assert make_checkpoint.main([str(tmp_path / "new" / "a"), *TINY, *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not list(tmp_path.rglob("a*"))


def test_an_existing_destination_is_left_alone(tmp_path, capsys):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "mine").write_text("kept")
    assert make_checkpoint.main([str(tmp_path / "a"), *TINY]) == 2
    assert "exists" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["mine"]


def test_a_full_disk_leaves_nothing(tmp_path, capsys, monkeypatch):
    def full(self, entry):
        yield from ()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(make_checkpoint.RandomWeights, "chunks", full)
    assert make_checkpoint.main([str(tmp_path / "a"), *TINY]) == 2
    error = capsys.readouterr().err
    assert "a cannot be written: No space left on device" in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_what_a_killed_run_left_is_replaced(tmp_path):
    (tmp_path / "a.partial").mkdir()
    (tmp_path / "a.partial" / "model-00007-of-00009.safetensors").write_text("half")
    make(tmp_path / "a")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert not (tmp_path / "a" / "model-00007-of-00009.safetensors").exists()
