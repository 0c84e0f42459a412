"""Full-size models as shapes: no memory, no weights, every preset."""

import math

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from oled_jax.checkpoint import layout
from oled_jax.config import ModelConfig, preset_names
from oled_jax.model.experts import ExpertWeights
from oled_jax.model.kv_cache import KVCache
from oled_jax.model.transformer import LLaDA2
from tests.golden_fixtures import resident_seam

PARAMETERS = {"mini": 16_255_643_392, "flash": 102_889_705_216}
TENSORS = {"mini": 14_813, "flash": 24_161}


@pytest.mark.parametrize("preset", preset_names())
def test_module_matches_the_layout_and_the_published_counts(preset):
    config = ModelConfig.from_preset(preset)
    size = preset.rpartition("-")[2]
    _, state = nnx.split(LLaDA2.abstract(config, jnp.bfloat16))
    module = {".".join(map(str, path)): leaf.shape for path, leaf in nnx.to_flat_state(state)}
    assert module == layout.dense_shapes(config)
    everything = {**module, **layout.expert_shapes(config)}
    assert sum(math.prod(shape) for shape in everything.values()) == PARAMETERS[size]
    assert len(layout.published_shapes(config)) == TENSORS[size]


@pytest.mark.parametrize("preset", ["llada2.0-mini", "llada2.2-flash"])
def test_full_size_forward_has_the_right_shapes(preset):
    config = ModelConfig.from_preset(preset)
    graphdef, state = nnx.split(LLaDA2.abstract(config, jnp.bfloat16))
    shapes = layout.expert_shapes(config)
    experts = {
        layer: ExpertWeights(*(jax.ShapeDtypeStruct(shapes[key(layer)], jnp.bfloat16) for key in EXPERT_KEYS))
        for layer in config.moe_layers
    }
    batch, tokens = 2, 32

    def step(state, experts, tokens, start, valid):
        model = nnx.merge(graphdef, state)
        cache = KVCache.zeros(config, batch, 1024, jnp.bfloat16)
        seam = resident_seam(experts, tokens)
        out = model(tokens, start, valid, cache, seam, block_length=32, window=1024)
        return (
            model.head(out.hidden),
            cache.write(out.keys, out.values, start, valid),
            [record.ids for record in out.records],
        )

    logits, cache, ids = jax.eval_shape(
        step,
        state,
        experts,
        jax.ShapeDtypeStruct((batch, tokens), jnp.int32),
        jax.ShapeDtypeStruct((batch,), jnp.int32),
        jax.ShapeDtypeStruct((batch, tokens), jnp.bool_),
    )
    assert logits.shape == (batch, tokens, config.vocab_size)
    assert logits.dtype == jnp.float32
    assert cache.keys.shape == (config.num_hidden_layers, batch, 1024, config.num_key_value_heads, 128)
    assert [i.shape for i in ids] == [(batch * tokens, 8)] * (config.num_hidden_layers - 1)


EXPERT_KEYS = (layout.gate_up_key, layout.down_key)
