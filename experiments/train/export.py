"""A trained model as a checkpoint folder in the published layout, which the engine loads like any other.

Promises: weights are the masters rounded to bfloat16, which is what training computed with; ``expert_bias`` is float32
(as LLaDA2.1 has it: the last steps of balancing are smaller than bfloat16 resolves); the tokenizer travels along; the
folder appears under its name when it is complete, in place of an older one.
"""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
from forward import Weights

from oled_jax.checkpoint import layout
from oled_jax.checkpoint.safetensors_file import SafetensorsWriter
from oled_jax.config import ModelConfig
from oled_jax.convert import published
from oled_jax.files import write_whole

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def export(destination: Path, config: ModelConfig, weights: Weights, bias: np.ndarray, tokenizer: Path) -> int:
    """Writes the folder ``destination`` and returns its bytes; ``weights`` float32 by name, ``bias [L, E]``,
    ``tokenizer`` a folder with one."""
    partial = destination.with_name(destination.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    config = dataclasses.replace(config, dtype="bfloat16")
    write_whole(partial / "config.json", json.dumps(config.to_hf(), indent=1) + "\n")
    generation = {key: getattr(config, key) for key in ("eos_token_id", "pad_token_id")}
    write_whole(partial / "generation_config.json", json.dumps(generation, indent=1) + "\n")
    for name in TOKENIZER_FILES:
        if (tokenizer / name).exists():
            shutil.copyfile(tokenizer / name, partial / name)
    _write_tensors(partial / "model.safetensors", config, weights, bias)
    if destination.exists():
        shutil.rmtree(destination)
    partial.rename(destination)
    return sum(file.stat().st_size for file in destination.iterdir())


def _write_tensors(path: Path, config: ModelConfig, weights: Weights, bias: np.ndarray) -> None:
    dtype, bias_dtype = layout.DTYPES["bfloat16"], layout.DTYPES["float32"]
    table = {
        name: (bias_dtype if name.endswith(".expert_bias") else dtype, shape)
        for name, shape in layout.published_shapes(config).items()
    }
    arrays = {f"layers.{layer}.mlp.gate.expert_bias": row for layer, row in zip(config.moe_layers, bias, strict=True)}
    arrays |= weights
    with SafetensorsWriter(path, table, {"format": "pt"}) as writer:
        for unit in layout.units(config, dtype, bias_dtype):
            for piece in unit.pieces:
                rows = np.asarray(arrays[piece.target.key])[piece.start : piece.start + piece.rows]
                for part in published.parts(config, piece, rows.astype(piece.target.dtype)):
                    writer.write(part.name, np.ascontiguousarray(part.rows), part.start)
