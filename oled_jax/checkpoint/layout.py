"""What a checkpoint holds and where each tensor goes: the key table, as pure functions of a ``ModelConfig``.

There are two sides. *Published* tensors are those of the Hugging Face layout (one tensor per expert matrix). *Targets*
are the arrays that the engine holds: each published non-expert tensor as it is, under its name without the ``model.``
prefix (which is also its path in the Flax module), and per MoE layer two stacked expert arrays,

    layers.{i}.mlp.experts.gate_up   [E, 2I, H]   rows of gate_proj, then rows of up_proj
    layers.{i}.mlp.experts.down      [E, I, H]    down_proj transposed, once, at load

A *piece* is a run of rows (axis 0) of one target, a *unit* a few pieces that are read, written and placed together. All
streaming (loading, both directions of conversion) walks the same units, so that no step holds more than about
``UNIT_BYTES`` beyond its final arrays.

Numpy only; reads and writes nothing.
"""

import dataclasses
import math
from collections.abc import Iterator

import ml_dtypes
import numpy as np

from oled_jax.config import ModelConfig

DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}

# One unit's bytes. Saving an array through Orbax holds about three copies of it, so this bounds a conversion's memory.
UNIT_BYTES = 128 * 2**20
UNIT_EXPERTS = 16

EMBEDDING = "word_embeddings.weight"
LM_HEAD = "lm_head.weight"


@dataclasses.dataclass(frozen=True)
class Target:
    """One array that the engine holds: ``key`` (path in the module, or an expert array), ``shape`` and ``dtype``."""

    key: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Piece:
    """Rows ``start : start + rows`` (axis 0) of ``target``."""

    target: Target
    start: int
    rows: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.rows, *self.target.shape[1:])

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.target.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Unit:
    """Pieces that travel together; ``name`` is unique, and safe as a file name."""

    name: str
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


def gate_up_key(layer: int) -> str:
    """Key of the stacked gate and up matrices of one MoE layer."""
    return f"layers.{layer}.mlp.experts.gate_up"


def down_key(layer: int) -> str:
    """Key of the stacked, transposed down matrices of one MoE layer."""
    return f"layers.{layer}.mlp.experts.down"


def published_name(key: str) -> str:
    """Published tensor name of a non-expert target."""
    return key if key == LM_HEAD else f"model.{key}"


def expert_name(layer: int, expert: int, matrix: str) -> str:
    """Published name of one expert matrix; ``matrix`` is "gate_proj", "up_proj" or "down_proj"."""
    return f"model.layers.{layer}.mlp.experts.{expert}.{matrix}.weight"


def dense_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Key and shape of every target except the routed experts, in the order of the forward pass."""
    c = config
    h, d = c.hidden_size, c.head_dim
    qkv = (c.num_attention_heads + 2 * c.num_key_value_heads) * d
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (c.vocab_size, h)}

    def ffn(prefix: str, width: int) -> None:
        shapes[f"{prefix}.gate_proj.weight"] = (width, h)
        shapes[f"{prefix}.up_proj.weight"] = (width, h)
        shapes[f"{prefix}.down_proj.weight"] = (h, width)

    for i in range(c.num_hidden_layers):
        layer = f"layers.{i}"
        shapes[f"{layer}.input_layernorm.weight"] = (h,)
        shapes[f"{layer}.attention.query_key_value.weight"] = (qkv, h)
        if c.use_qkv_bias:
            shapes[f"{layer}.attention.query_key_value.bias"] = (qkv,)
        shapes[f"{layer}.attention.query_layernorm.weight"] = (d,)
        shapes[f"{layer}.attention.key_layernorm.weight"] = (d,)
        shapes[f"{layer}.attention.dense.weight"] = (h, c.num_attention_heads * d)
        if c.use_bias:
            shapes[f"{layer}.attention.dense.bias"] = (h,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (h,)
        if i < c.first_k_dense_replace:
            ffn(f"{layer}.mlp", c.intermediate_size)
            continue
        shapes[f"{layer}.mlp.gate.weight"] = (c.num_experts, h)
        shapes[f"{layer}.mlp.gate.expert_bias"] = (c.num_experts,)
        if c.num_shared_experts:
            ffn(f"{layer}.mlp.shared_experts", c.moe_intermediate_size * c.num_shared_experts)
    shapes["norm.weight"] = (h,)
    shapes[LM_HEAD] = (c.vocab_size, h)
    return shapes


def expert_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Key and shape of the stacked expert arrays, two per MoE layer."""
    e, width, h = config.num_experts, config.moe_intermediate_size, config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in config.moe_layers:
        shapes[gate_up_key(layer)] = (e, 2 * width, h)
        shapes[down_key(layer)] = (e, width, h)
    return shapes


def published_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the published layout (spec section 2.1)."""
    shapes = {published_name(key): shape for key, shape in dense_shapes(config).items()}
    width, h = config.moe_intermediate_size, config.hidden_size
    for layer in config.moe_layers:
        for expert in range(config.num_experts):
            shapes[expert_name(layer, expert, "gate_proj")] = (width, h)
            shapes[expert_name(layer, expert, "up_proj")] = (width, h)
            shapes[expert_name(layer, expert, "down_proj")] = (h, width)
    return shapes


def targets(config: ModelConfig, dtype: np.dtype, bias_dtype: np.dtype) -> dict[str, Target]:
    """Every array that the engine holds. ``bias_dtype`` is that of ``expert_bias``, stored apart from the weights."""
    dense = {
        key: Target(key, shape, bias_dtype if key.endswith(".expert_bias") else dtype)
        for key, shape in dense_shapes(config).items()
    }
    experts = {key: Target(key, shape, dtype) for key, shape in expert_shapes(config).items()}
    return {**dense, **experts}


def units(config: ModelConfig, dtype: np.dtype, bias_dtype: np.dtype) -> Iterator[Unit]:
    """Cuts all targets into units: the dense part of a layer together, large tables by rows, experts by groups."""
    table = targets(config, dtype, bias_dtype)
    layers: dict[str, list[Piece]] = {}
    for key in dense_shapes(config):
        target = table[key]
        if target.nbytes > UNIT_BYTES // 4:
            yield from _row_units(target)
        else:
            name = ".".join(key.split(".")[:2]) if key.startswith("layers.") else "final"
            layers.setdefault(name, []).append(Piece(target, 0, target.shape[0]))
    for name, pieces in layers.items():
        yield Unit(f"dense.{name}", tuple(pieces))
    for layer in config.moe_layers:
        gate_up, down = table[gate_up_key(layer)], table[down_key(layer)]
        per_expert = (gate_up.nbytes + down.nbytes) // config.num_experts
        group = max(1, min(UNIT_EXPERTS, UNIT_BYTES // per_expert))
        for start in range(0, config.num_experts, group):
            rows = min(group, config.num_experts - start)
            pieces = (Piece(gate_up, start, rows), Piece(down, start, rows))
            yield Unit(f"experts.layers.{layer}.{start:04d}", pieces)


def _row_units(target: Target) -> Iterator[Unit]:
    rows_per_unit = max(1, UNIT_BYTES // 4 * target.shape[0] // target.nbytes)
    for start in range(0, target.shape[0], rows_per_unit):
        rows = min(rows_per_unit, target.shape[0] - start)
        yield Unit(f"dense.{target.key}.{start:08d}", (Piece(target, start, rows),))
