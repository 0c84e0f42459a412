"""A checkpoint in numbers, for people and for scripts. Reads headers and metadata, no weights."""

import dataclasses
import math
from typing import Any

from oled_jax.checkpoint import Checkpoint, layout
from oled_jax.progress import counted


def inspect(checkpoint: Checkpoint) -> dict[str, Any]:
    """Format, layout, dtypes, counts and bytes, and under "config" the model config; ready for JSON."""
    shapes = layout.published_shapes(checkpoint.config)
    return {
        "path": str(checkpoint.path),
        "format": checkpoint.format,
        **checkpoint.describe(),
        "weight_dtype": checkpoint.weight_dtype.name,
        "bias_dtype": checkpoint.bias_dtype.name,
        "tensors": len(shapes),
        "parameters": sum(math.prod(shape) for shape in shapes.values()),
        "bytes": checkpoint.total_bytes,
        "config": dataclasses.asdict(checkpoint.config),
    }


def as_text(facts: dict[str, Any]) -> str:
    """The facts of ``inspect`` as lines for a person."""
    c = facts["config"]
    routing = f"{c['expert_capacity']} of {c['num_experts']} experts per window of {c['block_size']} tokens"
    if not c["expert_capacity"]:
        routing = f"{c['topk_group']} of {c['n_group']} groups"
    layers = f"{c['num_hidden_layers']} layers ({c['first_k_dense_replace']} dense), hidden {c['hidden_size']}"
    attention = f"{c['num_attention_heads']} query and {c['num_key_value_heads']} key/value heads of {c['head_dim']}"
    experts = f"{c['num_experts']} of width {c['moe_intermediate_size']}, top {c['num_experts_per_tok']}, {routing}"
    rows = {
        "path": facts["path"],
        "format": f"{facts['format']}, {facts['layout']}, {counted(facts['files'], 'file')}",
        "dtype": f"weights {facts['weight_dtype']}, expert biases {facts['bias_dtype']}",
        "tensors": f"{facts['tensors']:,} ({facts['stored_tensors']:,} as stored)",
        "parameters": f"{facts['parameters']:,}",
        "bytes": f"{facts['bytes']:,}",
        "model": f"{layers}, {attention}, vocabulary {c['vocab_size']:,}",
        "experts": f"{experts}, {c['num_shared_experts']} shared",
        "positions": f"{c['max_position_embeddings']:,}, rope theta {c['rope_theta']:,.0f}",
    }
    return "\n".join(f"{name + ':':<12}{value}" for name, value in rows.items())
