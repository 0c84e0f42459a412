"""Models with random weights, made on the device: for benchmarks at sizes that no checkpoint here has."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from oled_jax import ModelConfig
from oled_jax.model.experts import ExpertWeights
from oled_jax.model.transformer import LLaDA2
from oled_jax.offload.bank import to_bank


def geometry(preset: str, layers: int | None = None, model: str | None = None) -> ModelConfig:
    """The config of a preset, or of ``model`` (a checkpoint folder or its config.json) in its place; with so many
    ``layers`` if given."""
    config = ModelConfig.from_hf(model) if model else ModelConfig.from_preset(preset)
    return ModelConfig.from_hf({**config.to_hf(), "num_hidden_layers": layers}) if layers else config


def random_weights(config: ModelConfig, dtype: jnp.dtype, seed: int = 0) -> tuple[LLaDA2, dict[int, ExpertWeights]]:
    """A model and the experts of its MoE layers, normal with standard deviation 0.02."""
    model = LLaDA2(config, dtype=dtype, rngs=nnx.Rngs(seed))

    @functools.partial(jax.jit, static_argnums=1)
    def normal(key, shape):
        return (0.02 * jax.random.normal(key, shape, jnp.float32)).astype(dtype)

    width, hidden = config.moe_intermediate_size, config.hidden_size
    experts = {}
    for layer in config.moe_layers:
        keys = jax.random.split(jax.random.key(seed + 1 + layer))
        gate_up = normal(keys[0], (config.num_experts, 2 * width, hidden))
        experts[layer] = ExpertWeights(gate_up, normal(keys[1], (config.num_experts, width, hidden)))
    return model, experts


def banked(experts: dict[int, ExpertWeights]) -> dict[int, ExpertWeights]:
    """The same experts in pinned host memory."""
    total = sum(array.nbytes for array in jax.tree.leaves(experts))
    return {
        layer: jax.tree.map(lambda array, layer=layer: to_bank(array, f"layer {layer}", 0, total), weights)
        for layer, weights in experts.items()
    }
