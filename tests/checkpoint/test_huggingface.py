"""The published layout, its variants, and every way in which a folder can be wrong."""

import json
import random
import threading

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from oled_jax.checkpoint import layout, open_checkpoint, stream
from oled_jax.errors import CheckpointError

BF16 = np.dtype(ml_dtypes.bfloat16)
BIAS = "model.layers.1.mlp.gate.expert_bias"
EXPERT = "model.layers.2.mlp.experts.3.down_proj.weight"


def loaded(folder):
    """Every target of a folder, put together from the streamed units."""
    with open_checkpoint(folder) as checkpoint:
        targets = layout.targets(checkpoint.config, checkpoint.weight_dtype, checkpoint.bias_dtype)
        arrays = {key: np.full(t.shape, np.nan, t.dtype) for key, t in targets.items()}
        for unit, parts in stream(checkpoint):
            for piece, part in zip(unit.pieces, parts, strict=True):
                assert part.shape == piece.shape
                assert part.dtype == piece.target.dtype
                assert part.flags.c_contiguous
                arrays[piece.target.key][piece.start : piece.start + piece.rows] = part
    return arrays


def expected(source):
    """The same from the tensors as published, put together without our reader."""
    tensors, config = source.tensors, source.config
    arrays = {k.removeprefix("model."): v for k, v in tensors.items() if ".mlp.experts." not in k}
    for i in range(config["first_k_dense_replace"], config["num_hidden_layers"]):
        experts = [
            [tensors[f"model.layers.{i}.mlp.experts.{e}.{m}_proj.weight"] for m in ("gate", "up", "down")]
            for e in range(config["num_experts"])
        ]
        arrays[f"layers.{i}.mlp.experts.gate_up"] = np.stack([np.concatenate([g, u]) for g, u, _ in experts])
        arrays[f"layers.{i}.mlp.experts.down"] = np.stack([d.T for _, _, d in experts])
    return arrays


def assert_same(left, right):
    assert set(left) == set(right)
    for key in left:
        assert left[key].dtype == right[key].dtype, key
        assert left[key].tobytes() == np.ascontiguousarray(right[key]).tobytes(), key


def stacked(source, suffix="", fused=False):
    """The tensors with each layer's experts in one tensor per matrix, or gate and up in one."""
    config = source.config
    tensors = {k: v for k, v in source.tensors.items() if ".mlp.experts." not in k}
    for i in range(config["first_k_dense_replace"], config["num_hidden_layers"]):
        prefix = f"model.layers.{i}.mlp.experts"
        for m in ("gate_proj", "up_proj", "down_proj"):
            matrices = [source.tensors[f"{prefix}.{e}.{m}.weight"] for e in range(config["num_experts"])]
            tensors[f"{prefix}.{m}{suffix}"] = np.stack(matrices)
        if fused:
            pair = [tensors.pop(f"{prefix}.{m}{suffix}") for m in ("gate_proj", "up_proj")]
            tensors[f"{prefix}.gate_up_proj{suffix}"] = np.concatenate(pair, axis=1)
    return tensors


def prefixed(tensors):
    return {k.replace("model.", "model.language_model.", 1): v for k, v in tensors.items()}


def error_of(folder):
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert str(folder) in message
    return message


def test_every_fixture_gives_its_published_tensors(any_source):
    assert_same(loaded(any_source.folder), expected(any_source))


@pytest.mark.parametrize("unit_bytes", [1, 2048, 40_000])
def test_units_of_any_size_give_the_same(any_source, monkeypatch, unit_bytes):
    monkeypatch.setattr(layout, "UNIT_BYTES", unit_bytes)
    assert_same(loaded(any_source.folder), expected(any_source))


def test_a_fixture_says_what_it_is(tiny_bf16):
    with open_checkpoint(str(tiny_bf16.folder)) as checkpoint:
        assert checkpoint.format == "huggingface"
        assert (checkpoint.weight_dtype, checkpoint.bias_dtype) == (BF16, np.float32)
        assert checkpoint.path == tiny_bf16.folder
        assert checkpoint.total_bytes == sum(t.nbytes for t in tiny_bf16.tensors.values())
        assert checkpoint.describe() == {"layout": "experts one by one", "files": 3, "stored_tensors": 189}


VARIANTS = {
    "single file": lambda s: (s.tensors, "experts one by one"),
    "stacked": lambda s: (stacked(s), "experts stacked"),
    "stacked with .weight": lambda s: (stacked(s, ".weight"), "experts stacked"),
    "fused": lambda s: (stacked(s, fused=True), "experts fused"),
    "fused with .weight": lambda s: (stacked(s, ".weight", fused=True), "experts fused"),
    "prefixed": lambda s: (prefixed(s.tensors), "experts one by one, prefix model.language_model."),
    "prefixed and fused": lambda s: (
        prefixed(stacked(s, fused=True)),
        "experts fused, prefix model.language_model.",
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shards", [0, 3])
def test_a_variant_loads_to_equal_arrays(tiny_bf16, variant, shards):
    tensors, words = VARIANTS[variant](tiny_bf16)
    folder = tiny_bf16.write(tensors, shards=shards)
    assert_same(loaded(folder), expected(tiny_bf16))
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.describe()["layout"] == words


def test_tensors_may_lie_in_any_shard(tiny):
    names = sorted(tiny.tensors)
    random.Random(0).shuffle(names)
    folder = tiny.write({name: tiny.tensors[name] for name in names}, shards=7)
    assert_same(loaded(folder), expected(tiny))


def test_layers_may_mix_layouts(tiny):
    tensors = {k: v for k, v in tiny.tensors.items() if not k.startswith("model.layers.2.mlp.experts.")}
    tensors |= {k: v for k, v in stacked(tiny).items() if k.startswith("model.layers.2.mlp.experts.")}
    folder = tiny.write(tensors)
    assert_same(loaded(folder), expected(tiny))


def test_rotary_tables_and_value_heads_are_ignored(tiny):
    extra = {
        "model.layers.0.attention.rotary_emb.inv_freq": np.zeros(4, np.float32),
        "v_head.summary.weight": np.zeros((1, 64), np.float16),
    }
    for shards in (0, 2):
        folder = tiny.write(tiny.tensors | extra, shards=shards, name=f"shards-{shards}")
        assert_same(loaded(folder), expected(tiny))


@pytest.mark.parametrize("weights", [BF16, np.float32])
@pytest.mark.parametrize("biases", [BF16, np.float32])
def test_weights_and_biases_have_their_own_dtypes(tiny, weights, biases):
    tensors = {k: v.astype(biases if k.endswith("expert_bias") else weights) for k, v in tiny.tensors.items()}
    with open_checkpoint(tiny.write(tensors)) as checkpoint:
        assert (checkpoint.weight_dtype, checkpoint.bias_dtype) == (weights, biases)
        (bias,) = (
            part
            for unit, parts in stream(checkpoint)
            for piece, part in zip(unit.pieces, parts, strict=True)
            if piece.target.key == BIAS.removeprefix("model.")
        )
    np.testing.assert_array_equal(bias, tensors[BIAS])


def drop(name):
    return lambda t: t.pop(name)


def replace(name, change):
    return lambda t: t.update({name: change(t[name])})


BAD_TENSORS = {
    "missing tensor": (drop(EXPERT), [f"1 problem: {EXPERT} is missing"]),
    "missing bias": (drop(BIAS), [f"1 problem: {BIAS} is missing"]),
    "unknown tensor": (lambda t: t.update(extra=t[BIAS]), ["1 problem: extra is unknown"]),
    "expert out of range": (
        lambda t: t.update({EXPERT.replace(".3.", ".16."): t[EXPERT]}),
        ["1 problem: model.layers.2.mlp.experts.16.down_proj.weight is unknown"],
    ),
    "expert of a dense layer": (
        lambda t: t.update({"model.layers.0.mlp.experts.gate_proj": t[BIAS]}),
        ["1 problem: model.layers.0.mlp.experts.gate_proj is unknown"],
    ),
    "layer out of range": (
        lambda t: t.update({"model.layers.4.mlp.experts.gate_proj": t[BIAS]}),
        ["1 problem: model.layers.4.mlp.experts.gate_proj is unknown"],
    ),
    "wrong shape": (
        replace(EXPERT, lambda x: x.T.copy()),
        [f"1 problem: {EXPERT} has the shape [32, 64], the config asks for [64, 32]"],
    ),
    "wrong rank": (replace(BIAS, lambda x: x[None]), [f"1 problem: {BIAS} has the shape [1, 16]"]),
    "empty": (replace(BIAS, lambda x: x[:0]), [f"1 problem: {BIAS} has the shape [0]"]),
    "float16 tensor": (
        replace(EXPERT, lambda x: x.astype(np.float16)),
        [f"1 problem: {EXPERT} has the dtype F16: weights must all be BF16 or all F32"],
    ),
    "integer bias": (replace(BIAS, lambda x: x.astype(np.int32)), [f"1 problem: {BIAS} has the dtype I32"]),
    "other weight dtype": (
        replace(EXPERT, lambda x: x.astype(BF16)),
        [f"1 problem: {EXPERT} has the dtype BF16 where the other weights are F32"],
    ),
    "other bias dtype": (
        replace(BIAS, lambda x: x.astype(BF16)),
        [f"1 problem: {BIAS} has the dtype BF16 where the other expert biases are F32"],
    ),
    "all float16": (
        lambda t: t.update({k: v.astype(np.float16) for k, v in t.items()}),
        ["189 problems", "and 169 more", "has the dtype F16"],
    ),
    "given twice": (
        lambda t: t.update({"model.layers.2.mlp.experts.down_proj": np.zeros((16, 64, 32), np.float32)}),
        ["gives what", "model.layers.2.mlp.experts.down_proj"],
    ),
    "several at once": (
        lambda t: (t.pop(EXPERT), t.update(extra=t[BIAS]), t.update({"model.norm.weight": t[BIAS]})),
        ["3 problems", f"{EXPERT} is missing", "extra is unknown", "model.norm.weight has the shape [16]"],
    ),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
@pytest.mark.parametrize("shards", [0, 2])
def test_bad_tensors_are_named(tiny, case, shards):
    change, fragments = BAD_TENSORS[case]
    tensors = dict(tiny.tensors)
    change(tensors)
    message = error_of(tiny.write(tensors, shards=shards))
    for fragment in fragments:
        assert fragment in message


@pytest.mark.parametrize("suffix", ["", ".weight"])
def test_a_stacked_tensor_of_the_wrong_shape_is_named(tiny, suffix):
    tensors = stacked(tiny, suffix)
    name = f"model.layers.1.mlp.experts.up_proj{suffix}"
    tensors[name] = tensors[name][:-1].copy()
    message = error_of(tiny.write(tensors))
    assert f"1 problem: {name} has the shape [15, 32, 64], the config asks for [16, 32, 64]" in message


def test_a_config_of_another_size_is_named(tiny):
    folder = tiny.write(tiny.tensors, moe_intermediate_size=16)
    assert "the config asks for [16, 64]" in error_of(folder)


def edit_index(folder, change):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


SHARD = "model-00002-of-00003.safetensors"


def test_a_missing_shard_is_one_problem(tiny):
    folder = tiny.write(tiny.tensors, shards=3)
    (folder / SHARD).unlink()
    assert f"1 problem: shard {SHARD} is missing" in error_of(folder)


def test_a_truncated_shard_is_one_problem(tiny):
    folder = tiny.write(tiny.tensors, shards=3)
    content = (folder / SHARD).read_bytes()
    for size in (0, 100, len(content) // 2, len(content) - 1):
        (folder / SHARD).write_bytes(content[:size])
        message = error_of(folder)
        assert message.startswith(f"{folder}: 1 problem: {folder / SHARD}")
        assert "truncated" in message


def test_a_damaged_shard_and_a_bad_tensor_are_reported_together(tiny):
    folder = tiny.write(tiny.tensors | {"extra": np.zeros(3, np.float32)}, shards=3)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    victim = next(shard for shard in sorted(set(index.values())) if shard != index["extra"])
    (folder / victim).unlink()
    message = error_of(folder)
    assert "2 problems" in message
    assert f"shard {victim} is missing" in message
    assert "extra is unknown" in message


def test_an_unknown_tensor_is_reported_even_if_its_shard_is_missing(tiny):
    folder = tiny.write(tiny.tensors, shards=3)
    edit_index(folder, lambda index: index["weight_map"].update(extra="gone.safetensors"))
    message = error_of(folder)
    assert "2 problems: shard gone.safetensors is missing" in message
    assert "extra is unknown" in message


def test_an_index_that_names_an_absent_tensor(tiny):
    folder = tiny.write({k: v for k, v in tiny.tensors.items() if k != EXPERT}, shards=3)
    edit_index(folder, lambda index: index["weight_map"].update({EXPERT: SHARD}))
    assert f"1 problem: the index places {EXPERT} in {SHARD}, which lacks it" in error_of(folder)


def test_a_tensor_in_two_shards(tiny):
    folder = tiny.write(tiny.tensors, shards=3)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    other = next(shard for shard in sorted(set(index.values())) if shard != index[EXPERT])
    held = safetensors.numpy.load_file(folder / other)
    safetensors.numpy.save_file(held | {EXPERT: tiny.tensors[EXPERT]}, folder / other)
    message = error_of(folder)
    assert f"1 problem: {EXPERT} is in two shards: the index says {index[EXPERT]}, and {other} holds it too" in message


def test_a_tensor_that_the_index_does_not_name(tiny):
    folder = tiny.write(tiny.tensors | {"extra": tiny.tensors[BIAS]}, shards=3)
    edit_index(folder, lambda index: index["weight_map"].pop("extra"))
    message = error_of(folder)
    assert "1 problem: model-0000" in message
    assert "holds extra, which the index does not name" in message


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "expected a JSON object"),
        ("{}", "holds no weight_map"),
        ('{"weight_map": {}}', "holds no weight_map"),
        ('{"weight_map": {"a": 3}}', "places a in 3"),
        ('{"weight_map": {"a": "../b.safetensors"}}', "no file name in this folder"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "no file name in this folder"),
        ('{"weight_map": {"a": ""}}', "no file name in this folder"),
    ],
)
def test_a_broken_index_is_a_clear_error(tiny, index, message):
    folder = tiny.write(tiny.tensors, shards=2)
    (folder / "model.safetensors.index.json").write_text(index)
    assert message in error_of(folder)


def test_the_index_decides_over_a_file_beside_it(tiny):
    folder = tiny.write(tiny.tensors, shards=2)
    (folder / "model.safetensors").write_bytes(b"left over")
    assert_same(loaded(folder), expected(tiny))


def test_the_fingerprint_follows_the_files(tiny):
    folder = tiny.write(tiny.tensors, shards=2)

    def fingerprint():
        with open_checkpoint(folder) as checkpoint:
            return checkpoint.fingerprint()

    first = fingerprint()
    assert fingerprint() == first
    shard = folder / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes())
    second = fingerprint()
    assert second != first
    (folder / "config.json").write_text(json.dumps(tiny.config | {"pad_token_id": 3}))
    assert fingerprint() not in (first, second)


def test_streaming_counts_bytes_and_reads_only_what_is_wanted(tiny):
    with open_checkpoint(tiny.folder) as checkpoint:
        calls = []
        for _ in stream(checkpoint, lambda done, total: calls.append((done, total))):
            pass
        sizes = [unit.nbytes for unit in checkpoint.units()]
        assert calls == [(sum(sizes[:i]), checkpoint.total_bytes) for i in range(len(sizes) + 1)]
        assert calls[-1][0] == checkpoint.total_bytes
        calls.clear()
        wanted = checkpoint.units()[2:4]
        assert [unit for unit, _ in stream(checkpoint, lambda *c: calls.append(c), units=wanted)] == list(wanted)
        assert len(calls) == 3
        assert calls[0][0] == checkpoint.total_bytes - sum(unit.nbytes for unit in wanted)
        assert list(stream(checkpoint, units=[])) == []


def test_streaming_passes_errors_on_and_ends_its_thread(tiny, monkeypatch):
    before = threading.active_count()
    with open_checkpoint(tiny.folder) as checkpoint:
        real, bad = checkpoint.read, checkpoint.units()[2]

        def read(unit):
            if unit is bad:
                raise CheckpointError("broken unit")
            return real(unit)

        monkeypatch.setattr(checkpoint, "read", read)
        seen = []
        with pytest.raises(CheckpointError, match="broken unit"):
            seen.extend(unit for unit, _ in stream(checkpoint))
        assert len(seen) <= 2
        monkeypatch.setattr(checkpoint, "read", real)
        abandoned = stream(checkpoint)
        next(abandoned)
        abandoned.close()
    assert threading.active_count() == before


def test_thousands_of_broken_tensors_are_one_short_line(tiny):
    """Names with line ends and escapes among them, as a damaged header may have."""
    tensors = {f"junk.{i}\n\x1b[2J": np.zeros(1, np.float32) for i in range(5000)}
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tiny.write(tensors))
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 5000
    assert "junk.0\\n\\x1b[2J is unknown" in message
    assert f"and {5000 + len(tiny.tensors) - 20} more" in message


@pytest.mark.parametrize("shard", ["a\0b", "\ud800", "a\nb"])
def test_a_shard_whose_name_no_file_can_have(tiny, shard):
    folder = tiny.write(tiny.tensors, shards=2)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = shard
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"weight_map places model.norm.weight in .* no file name") as caught:
        open_checkpoint(folder)
    assert str(caught.value).isprintable()
