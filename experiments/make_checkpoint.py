"""Writes a LLaDA2.x checkpoint with random weights in the published layout, at any size, offline.

    python experiments/make_checkpoint.py --preset llada2.0-mini --layers 4 DST

Promises: the folder is what a downloaded one is (config, shards and index, tokenizer, chat template, generation
config), so that everything can be tried on it. A tensor's values depend on the seed and its name only: neither sharding
nor the number of layers changes them, and bfloat16 values are the float32 values rounded. Memory stays at a few
megabytes. The folder appears under its name when it is complete.

Deliberately not here: sense. Projections keep the scale of what passes through them, masked positions differ in token
and route, some of them pass a confidence threshold; but the text is noise.
"""

import argparse
import dataclasses
import hashlib
import json
import math
import shutil
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from byte_tokenizer import ENDOFTEXT, MASK, ROLE_END, special_tokens, tokenizer_files

from oled_jax.checkpoint import layout
from oled_jax.checkpoint.safetensors_file import SafetensorsWriter
from oled_jax.cli.running import Parser, argument_type
from oled_jax.config import ModelConfig, preset_names
from oled_jax.errors import OledError
from oled_jax.progress import ProgressLine, parse_bytes
from oled_jax.special_ids import PUBLISHED_VOCAB_SIZE

# Without these three a random model gives every masked position the same token and the same experts: all of them embed
# the mask, so attention has to tell positions apart, and what it finds has to outweigh the embedding. A sharp head lets
# some tokens pass a confidence threshold at each step, about as many as in a trained model.
EMBEDDING_SCALE = 0.3
QUERY_KEY_GAIN = 2.0
HEAD_GAIN = 8.0

_CHUNK = 2**18  # elements made and written at a time, about
_FLOAT32_BIAS = ("llada2.1", "llada2.2")  # releases whose published expert_bias is float32; the others' is bfloat16

# Option, field of ModelConfig, help.
_OVERRIDES = (
    ("--layers", "num_hidden_layers", "layers, dense ones included"),
    ("--dense-layers", "first_k_dense_replace", "leading layers with a dense feed-forward part"),
    ("--hidden", "hidden_size", "hidden size"),
    ("--heads", "num_attention_heads", "query heads"),
    ("--kv-heads", "num_key_value_heads", "key/value heads"),
    ("--head-dim", "head_dim", "dimensions of a head"),
    ("--intermediate", "intermediate_size", "width of the dense feed-forward part"),
    ("--moe-intermediate", "moe_intermediate_size", "width of an expert"),
    ("--experts", "num_experts", "routed experts of a layer"),
    ("--experts-per-token", "num_experts_per_tok", "routed experts of a token"),
    ("--shared", "num_shared_experts", "shared experts"),
    ("--groups", "n_group", "expert groups (2.0 and 2.1)"),
    ("--topk-groups", "topk_group", "groups that a token may use (2.0 and 2.1)"),
    ("--expert-capacity", "expert_capacity", "experts that a window may use (2.2)"),
    ("--routing-block", "block_size", "tokens of a window (2.2)"),
    ("--vocab", "vocab_size", "vocabulary"),
    ("--max-position", "max_position_embeddings", "longest context"),
)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One tensor of a shard: published name, shape, dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class RandomWeights:
    """Normal weights, fast: 16 random bits choose one of 65,536 normal quantiles, scaled to the tensor."""

    def __init__(self, seed: int):
        self.seed = seed
        normal = statistics.NormalDist()
        self._quantiles = np.array([normal.inv_cdf((i + 0.5) / 2**16) for i in range(2**16)])
        self._tables: dict[tuple[float, float, str], np.ndarray] = {}

    def chunks(self, entry: Entry) -> Iterator[np.ndarray]:
        """The tensor as runs of its rows (axis 0), in order, of about ``_CHUNK`` elements and in its dtype."""
        key = hashlib.sha256(f"{self.seed}/{entry.name}".encode()).digest()
        # The raw stream of a bit generator is stable across numpy versions, which its distributions are not.
        bits = np.random.SFC64(int.from_bytes(key[:16], "little"))
        table = self._table(*_mean_and_scale(entry), entry.dtype)
        rows, *row_shape = entry.shape
        row_size = math.prod(row_shape)
        step = max(1, _CHUNK // row_size)
        for start in range(0, rows, step):
            count = min(step, rows - start)
            draws = bits.random_raw(-(-count * row_size // 4)).astype("<u8", copy=False).view("<u2")
            yield table[draws[: count * row_size]].reshape(count, *row_shape)

    def _table(self, mean: float, scale: float, dtype: np.dtype) -> np.ndarray:
        key = (mean, scale, dtype.name)
        if key not in self._tables:
            self._tables[key] = (mean + scale * self._quantiles).astype(np.float32).astype(dtype)
        return self._tables[key]


def _mean_and_scale(entry: Entry) -> tuple[float, float]:
    name = entry.name
    if name.endswith(("query_layernorm.weight", "key_layernorm.weight")):
        return QUERY_KEY_GAIN, 0.1
    if name.endswith("norm.weight"):
        return 1.0, 0.1
    if name.endswith((".bias", ".expert_bias")):
        return 0.0, 0.05
    if name == layout.published_name(layout.EMBEDDING):
        return 0.0, EMBEDDING_SCALE
    gain = HEAD_GAIN if name == layout.LM_HEAD else 1.0
    return 0.0, gain / math.sqrt(entry.shape[-1])


def plan_shards(entries: list[Entry], max_bytes: int) -> dict[str, list[Entry]]:
    """Assigns tensors to shard files in their order; a tensor larger than ``max_bytes`` has a shard of its own."""
    shards: list[list[Entry]] = []
    room = -1
    for entry in entries:
        if entry.nbytes > room:
            shards.append([])
            room = max_bytes
        shards[-1].append(entry)
        room -= entry.nbytes
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards, start=1)}


def make_checkpoint(
    destination: Path,
    config: ModelConfig,
    *,
    bias_dtype: str | None = None,
    seed: int = 0,
    max_shard_bytes: int = 5 * 10**9,
) -> int:
    """Writes the checkpoint folder ``destination`` and returns the bytes of its tensors; reports progress on stderr.

    ``config.dtype`` is that of all tensors but ``expert_bias``, which has ``bias_dtype`` (default: the same); special
    ids that a vocabulary smaller than the published one needs are added to the config. Raises OledError when the
    destination exists, does not fit the disk or cannot be written; nothing is left behind then.
    """
    config = with_special_ids(config)
    dtype = layout.DTYPES[config.dtype]
    entries = [
        Entry(name, shape, layout.DTYPES[bias_dtype or config.dtype] if name.endswith(".expert_bias") else dtype)
        for name, shape in layout.published_shapes(config).items()
    ]
    total = sum(entry.nbytes for entry in entries)
    if destination.exists():
        raise OledError(f"{destination} exists: name another destination or remove it")
    partial = destination.with_name(destination.name + ".partial")
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(destination.parent).free
        if free < total:
            raise OledError(f"{destination} would hold {total:,} bytes, and its disk has {free:,} free")
        shutil.rmtree(partial, ignore_errors=True)  # what a killed run left
        partial.mkdir()
        try:
            for name, text in _text_files(config).items():
                (partial / name).write_text(text, encoding="utf-8")
            _write_shards(partial, plan_shards(entries, max_shard_bytes), RandomWeights(seed), total)
            partial.rename(destination)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    except OSError as error:
        raise OledError(f"{destination} cannot be written: {error.strerror or error}") from error
    return total


def with_special_ids(config: ModelConfig) -> ModelConfig:
    """``config`` with the special ids of a small vocabulary; the published one needs none, and says no more."""
    if config.vocab_size >= PUBLISHED_VOCAB_SIZE:
        return config
    special = special_tokens(config.vocab_size)
    end = special.by_text[ENDOFTEXT]
    ids = {"pad_token_id": end, "eos_token_id": end, "mask_token_id": special.by_text[MASK]}
    if config.block_routing:
        ids |= {"delete_token_id": special.delete, "split_token_id": special.split}
    return dataclasses.replace(config, **ids)


def _text_files(config: ModelConfig) -> dict[str, str]:
    texts = special_tokens(config.vocab_size).by_text
    published = config.to_hf() | {
        "auto_map": {
            "AutoConfig": "configuration_llada2_moe.LLaDA2MoeConfig",
            "AutoModelForCausalLM": "modeling_llada2_moe.LLaDA2MoeModelLM",
        }
    }
    # LLaDA2.2 lists the end of a role beside the end of the text.
    stops = [texts[ENDOFTEXT], texts[ROLE_END]] if config.block_routing else texts[ENDOFTEXT]
    generation = {"eos_token_id": stops, "pad_token_id": texts[ENDOFTEXT]}
    return {
        "config.json": json.dumps(published, indent=1) + "\n",
        "generation_config.json": json.dumps(generation, indent=1) + "\n",
        **tokenizer_files(config.vocab_size, config.max_position_embeddings),
    }


def _write_shards(folder: Path, shards: dict[str, list[Entry]], weights: RandomWeights, total: int) -> None:
    progress = ProgressLine("writing")
    done = 0
    try:
        for file_name, entries in shards.items():
            table = {entry.name: (entry.dtype, entry.shape) for entry in entries}
            with SafetensorsWriter(folder / file_name, table, {"format": "pt"}) as writer:
                for entry in entries:
                    row = 0
                    for rows in weights.chunks(entry):
                        writer.write(entry.name, rows, row)
                        row += len(rows)
                        done += rows.nbytes
                        progress(done, total)
    finally:
        progress.close()
    if len(shards) > 1:
        weight_map = {entry.name: file_name for file_name, entries in shards.items() for entry in entries}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def config_from_arguments(arguments: argparse.Namespace) -> ModelConfig:
    """The preset with the overrides applied; ConfigError when they do not hold together."""
    given = {field: getattr(arguments, field) for _, field, _ in _OVERRIDES}
    changes = {field: value for field, value in given.items() if value is not None}
    return dataclasses.replace(ModelConfig.from_preset(arguments.preset), dtype=arguments.dtype, **changes)


def published_bias_dtype(preset: str, dtype: str) -> str:
    """The dtype of ``expert_bias`` in the published checkpoint of a preset, written with ``dtype`` weights.

    float32 for LLaDA2.1 and 2.2; LLaDA2.0 stores it like everything else.
    """
    return "float32" if preset.startswith(_FLOAT32_BIAS) else dtype


def parser() -> argparse.ArgumentParser:
    """The command line; raises OledError where argparse would print its usage."""
    p = Parser(description="Writes a LLaDA2.x checkpoint with random weights in the published layout.")
    p.add_argument("destination", type=Path, metavar="DST", help="folder to write; must not exist")
    p.add_argument("--preset", default="llada2.0-mini", help=f"{', '.join(preset_names())} (default: %(default)s)")
    for option, field, text in _OVERRIDES:
        p.add_argument(option, dest=field, type=int, metavar="N", help=f"{text}; default: the preset's")
    p.add_argument("--dtype", choices=sorted(layout.DTYPES), default="bfloat16", help="default: %(default)s")
    p.add_argument(
        "--bias-dtype",
        choices=sorted(layout.DTYPES),
        help="of expert_bias (default: as published: float32 for the presets of 2.1 and 2.2, else --dtype)",
    )
    p.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    p.add_argument(
        "--max-shard-size",
        type=argument_type(parse_bytes),
        default="5GB",
        metavar="SIZE",
        help="such as 200MB (default: %(default)s)",
    )
    return p


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code, 2 for a user's mistake."""
    start = time.monotonic()
    try:
        arguments = parser().parse_args(argv)
        config = config_from_arguments(arguments)
        bias_dtype = arguments.bias_dtype or published_bias_dtype(arguments.preset, config.dtype)
        total = make_checkpoint(
            arguments.destination,
            config,
            bias_dtype=bias_dtype,
            seed=arguments.seed,
            max_shard_bytes=arguments.max_shard_size,
        )
    except OledError as error:
        print(f"make_checkpoint: error: {error}", file=sys.stderr)
        return 2
    tensors, rate = len(layout.published_shapes(config)), total / 1e6 / (time.monotonic() - start)
    print(
        f"{arguments.destination}: {tensors:,} tensors ({config.dtype}, expert_bias {bias_dtype}), {total:,} bytes, "
        f"{rate:,.0f} MB/s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
